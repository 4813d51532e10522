"""An agent that sees: the answer is in the picture, a tool returns another picture, and GRPO trains the small vision
model that reads them. Every log-probability of the trainer equals the rollout's in bits.

A picture of 32 x 32 pixels has a block in one of four colours. The agent calls `zoom(part)`, gets that quarter enlarged,
and says the number of the colour. The model (Qwen3-VL, 0.4 million parameters) is made here: a few supervised steps on
conversations of which half are guessed teach it the format and some of the task.

Needs: the extras `train` and `images`.
Run: python examples/images.py [--steps 10]
"""

import argparse
import asyncio
import base64
import io
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import tokentrue as tt
from tokentrue.app.background import BackgroundGateway
from tokentrue.client import AsyncClient
from tokentrue.environments import SMALL_MODEL
from tokentrue.mismatch import loss_named
from tokentrue.pixels.reader import load_processor
from tokentrue.train import OptimConfig, TrainConfig, Trainer

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
CONTENT = """{%- macro show(content) -%}
    {%- if content is string %}{{- content }}{%- else %}{%- for part in content %}
        {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}{%- endif %}
    {%- endfor %}{%- endif %}
{%- endmacro %}
"""
COLOURS = {"1": (220, 30, 30), "2": (30, 200, 30), "3": (30, 30, 220), "4": (240, 220, 20)}
ZOOM = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "enlarges a part",
        "parameters": {"type": "object", "properties": {"part": {"type": "integer"}}, "required": ["part"]},
    },
}


# ---- the pictures
def draw(colour: str, random_: random.Random) -> Image.Image:
    """A block at a random place on a light picture; a piece of it is in every quarter."""
    picture = Image.new("RGB", (32, 32), (240, 240, 240))
    place = [random_.randint(2, 10), random_.randint(2, 10), random_.randint(22, 30), random_.randint(22, 30)]
    picture.paste(COLOURS[colour], tuple(place))
    return picture


def enlarge(picture: Image.Image, part: int) -> Image.Image:
    left, top = 16 * (part % 2), 16 * (part // 2)
    return picture.crop((left, top, left + 16, top + 16)).resize((32, 32), Image.Resampling.NEAREST)


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def ask(picture: Image.Image) -> dict[str, Any]:
    return {"role": "user", "content": [shown(picture), {"type": "text", "text": "Colour?"}]}


def shown(picture: Image.Image) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png(picture)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


# ---- the model
def make_model(folder: Path) -> Qwen3VLForConditionalGeneration:
    """Random weights; the tokenizer and the template are those of the shipped model, with images."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.save_pretrained(folder)
    template = (SMALL_MODEL / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        CONTENT + template.replace("+ message.content +", "+ show(message.content) +")
    )
    start, pad, end, video = tokenizer.convert_tokens_to_ids(list(MARKS))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    torch.manual_seed(0)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rope_parameters": rope, "initializer_range": 0.08,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
            "patch_size": 8, "deepstack_visual_indexes": [0], "initializer_range": 0.08,
        },
        image_token_id=pad, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    size = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32}
    Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=size).save_pretrained(folder)
    return Qwen3VLForConditionalGeneration.from_pretrained(folder)


def conversation(part: int, colour: str) -> list[dict[str, Any]]:
    """A supervised one. Its ids do not depend on the pixels."""
    image = {"type": "image", "sha256": "0" * 64, "media_type": "image/png", "width": 32, "height": 32}
    call = {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": f'{{"part": {part + 1}}}'}}
    return [
        {"role": "user", "content": [image, {"type": "text", "text": "Colour?"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [image]},
        {"role": "assistant", "content": colour},
    ]


def pretrain(model: Qwen3VLForConditionalGeneration, folder: Path, steps: int = 45, size: int = 16) -> None:
    """Next-token loss on the assistant's turns."""
    renderer, processor, random_ = tt.load_renderer(folder), load_processor(folder), random.Random(0)
    opening = list(renderer.encode_sampled("<|im_start|>assistant\n"))
    known = {
        (part, colour): list(renderer.render(conversation(part, colour), tools=[ZOOM]).token_ids)[: -len(opening)]
        for part in range(4)
        for colour in COLOURS
    }
    first, closing = known[0, "1"], renderer.encode_sampled("<|im_end|>")[0]
    answer = next(i for i, (one, two) in enumerate(zip(first, known[0, "2"], strict=True)) if one != two)
    weights = torch.zeros(len(first))
    for at in (i for i in range(len(first)) if first[i : i + len(opening)] == opening):
        weights[at + len(opening) : first.index(closing, at) + 1] = 1.0
    weights[answer] = 4.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, steps + 1):
        rows, right, pictures = [], [], []
        for _ in range(size):
            part, colour = random_.randrange(4), random_.choice(list(COLOURS))
            picture = draw(colour, random_)
            pictures += [picture, enlarge(picture, part)]
            right.append(known[part, colour][answer])
            rows.append(known[part, colour if random_.random() < 0.5 else random_.choice(list(COLOURS))])
        ids, pixels = torch.tensor(rows), processor(pictures, return_tensors="pt")
        kinds = (ids == model.config.image_token_id).int()
        scores = torch.log_softmax(model(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[:, :-1], -1)
        logprobs = scores.gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(logprobs * weights[1:]).sum() / (weights.sum() * size)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen = scores[:, answer - 1].exp().gather(-1, torch.tensor(right)[:, None]).mean().item()
        if step % 15 == 0:
            print(f"supervised step {step}: loss {loss.item():.3f}, the right answer has {seen:.2f}", flush=True)
    model.save_pretrained(folder)


# ---- the agent
async def play(client: AsyncClient, task: int, group: str) -> tuple[list[tt.Sample], dict[str, bytes], float]:
    """One conversation over HTTP, with the official SDK."""
    random_ = random.Random(10**6 + task)
    colour = random_.choice(list(COLOURS))
    picture = draw(colour, random_)
    async with client.session(group=group) as session:
        chat, messages, said = session.openai().chat.completions, [ask(picture)], ""
        for _ in range(3):
            answer = (await chat.create(model="x", messages=messages, tools=[ZOOM], max_tokens=40)).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            said = answer.content or ""
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                number = "".join(filter(str.isdigit, call.function.arguments))[:1]
                crop = [shown(enlarge(picture, (int(number or 1) - 1) % 4))]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": crop})
        reward = float(said.strip() == colour)
        await session.reward(reward)
        samples = await session.samples()
        files = {run.sha256: await session.image(run.sha256) for sample in samples for run in sample.images}
    return samples, files, reward


async def train(folder: Path, steps: int) -> list[float]:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    files: dict[str, bytes] = {}
    config = TrainConfig(baseline="grpo", exact=True, micro_tokens=8192)
    trainer = Trainer(
        model, config=config, optim=OptimConfig(lr=1e-3), loss=loss_named("grpo"), images=files.__getitem__
    )
    rewards, tasks, size = [], 6, 8
    with BackgroundGateway(str(folder), version=0) as gateway:
        async with AsyncClient(gateway.url, gateway.admin_key) as client:
            for step in range(steps):
                jobs = (
                    play(client, tasks * step + task, f"{step}-{task}") for task in range(tasks) for _ in range(size)
                )
                played = await asyncio.gather(*jobs)
                files.clear()
                for _, seen, _ in played:
                    files |= seen
                groups = [
                    [sample for samples, _, _ in played[i : i + size] for sample in samples]
                    for i in range(0, len(played), size)
                ]
                report = await asyncio.to_thread(trainer.step, groups)
                await asyncio.to_thread(gateway.publish, dict(trainer.weights()), version=trainer.version)
                rewards.append(sum(reward for _, _, reward in played) / len(played))
                print(
                    f"step {step}: reward {rewards[-1]:.2f}, {len(files)} pictures, {report.agreement.differing} of "
                    f"{report.agreement.compared} log-probabilities differ",
                    flush=True,
                )
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", type=Path, help="keeps the model there, or takes the one that is there")
    options = parser.parse_args()
    folder = options.model or Path(tempfile.mkdtemp())
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pretrain(make_model(folder), folder)
    found = asyncio.run(train(folder, options.steps))
    third = max(1, len(found) // 3)
    print(
        f"reward {sum(found[:third]) / third:.2f} in the first third of the steps, {sum(found[-third:]) / third:.2f} in the last"
    )
    if options.model is None:
        shutil.rmtree(folder)
