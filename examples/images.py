"""An agent that sees: the answer is in a picture that a tool returns, and GRPO trains the small vision model that reads
it. Every log-probability of the trainer equals the rollout's in bits.

The agent sees a gray preview of 32 x 32 pixels with a block, calls `zoom(part)`, gets that quarter enlarged and in colour,
and says the number of the block's colour. The preview is the same file for all four colours, so without the tool the
answer is a guess. The model (Qwen3-VL, 0.4 million parameters) is made here: a few supervised steps on conversations of
which half are guessed teach it the format and some of the task. `tokentrue train` does the rest, with the configuration
in examples/images.toml.

Needs: the extras `train` and `images`.
Run: python examples/images.py [--steps 12] [--out out/images]
"""

import argparse
import base64
import io
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import tokentrue as tt
from tokentrue.environments import SMALL_MODEL, Task
from tokentrue.environments.chat import work
from tokentrue.pixels import load_processor

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
CONTENT = """{%- macro show(content) -%}
    {%- if content is string %}{{- content }}{%- else %}{%- for part in content %}
        {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}{%- endif %}
    {%- endfor %}{%- endif %}
{%- endmacro %}
"""
GRAY = (110, 110, 110)
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
def see(task: str, part: int | None = None) -> Image.Image:
    """The preview, or what `zoom` returns: a light picture with a block, a piece of it in every quarter."""
    colour, seed = task.split("/")
    random_, picture = random.Random(seed), Image.new("RGB", (32, 32), (240, 240, 240))
    place = [random_.randint(2, 10), random_.randint(2, 10), random_.randint(22, 30), random_.randint(22, 30)]
    picture.paste(GRAY if part is None else COLOURS[colour], tuple(place))
    if part is None:
        return picture
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


def pretrain(model: Qwen3VLForConditionalGeneration, folder: Path, steps: int = 75, size: int = 16) -> None:
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
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    for step in range(1, steps + 1):
        rows, right, pictures = [], [], []
        for number in range(size):
            part, colour = random_.randrange(4), random_.choice(list(COLOURS))
            task = f"{colour}/{step * size + number}"
            pictures += [see(task), see(task, part)]
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
        schedule.step()
        seen = scores[:, answer - 1].exp().gather(-1, torch.tensor(right)[:, None]).mean().item()
        if step % 15 == 0:
            print(f"supervised step {step}: loss {loss.item():.3f}, the right answer has {seen:.2f}", flush=True)
    model.save_pretrained(folder)


# ---- the agent
def zoom(task: str, arguments: str) -> list[dict[str, Any]]:
    number = next((int(sign) for sign in arguments if sign in COLOURS), 1)
    return [shown(see(task, number - 1))]


class Zoom:
    """Tasks are named colour/seed."""

    name = "zoom"

    def tasks(self, count: int, *, seed: int = 0, split: str = "train") -> Sequence[Task]:
        random_ = random.Random(f"{split} {seed}")
        names = (f"{random_.choice(list(COLOURS))}/{random_.randrange(10**6)}" for _ in range(count))
        return [Task(task_id=name, prompt="Colour?") for name in names]

    async def run(self, client: Any, task: Task) -> float:
        tools = {"zoom": (ZOOM, partial(zoom, task.task_id))}
        said = await work(client, [ask(see(task.task_id))], tools=tools, max_turns=3)
        return float((said or "").strip() == task.task_id.split("/")[0])


def train(model: Path, out: Path, steps: int) -> list[float]:
    """Returns the reward of each step."""
    here = Path(__file__).resolve()
    command = [sys.executable, "-m", "tokentrue", "train", "--config", str(here.with_suffix(".toml")), "--json"]
    command += ["--model", str(model.resolve()), "--out", str(out.resolve()), "--steps", str(steps)]
    rewards: list[float] = []
    with subprocess.Popen(command, cwd=here.parent, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for row in map(json.loads, running.stdout):
            rewards.append(row["reward"])
            differ = f"{row['exact_differing']} of {row['exact_compared']} log-probabilities differ"
            print(f"step {row['step']}: reward {row['reward']:.2f}, {differ}", flush=True)
    if running.returncode:
        sys.exit(running.returncode)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("out/images"), help="the model and the run; resumes a run")
    options = parser.parse_args()
    folder = options.out / "model"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pretrain(make_model(folder), folder)
    found = train(folder, options.out / "run", options.steps)
    third = max(1, len(found) // 3)
    first, last = sum(found[:third]) / third, sum(found[-third:]) / third
    print(f"reward {first:.2f} in the first third of the steps, {last:.2f} in the last")
