"""What an image costs under exactness, and the bit check beside it: random weights in the shape of Qwen3-VL-2B on a GPU
(bfloat16), of a small one on the CPU (float32).

The vision tower alone, and a training pass (forward and backward) over one image with text after it, exact beside the
model's own sdpa; then the exact engine samples from prompts that share images, weights change half way, and every
log-probability is compared with the trainer's in bits.

    python -m benchmarks.images [--quick]
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import Report, main
from tokentrue.engine import ExactEngine
from tokentrue.numerics import exact, score, see_rows
from tokentrue.pixels import PixelReader, plain_inputs, processor_identity
from tokentrue.types import ImageRun, PromptImage, Sampling

START, END, PAD, VIDEO = 4, 5, 6, 7
CUDA = torch.cuda.is_available()


def save_model(folder: Path, quick: bool) -> None:
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    large = CUDA and not quick
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    text = {
        "vocab_size": 151_936 if large else 2048, "hidden_size": 2048 if large else 256, "intermediate_size": 6144 if large else 512,
        "num_hidden_layers": 28 if large else 4, "num_attention_heads": 16 if large else 4, "num_key_value_heads": 8 if large else 2,
        "head_dim": 128 if large else 64, "max_position_embeddings": 8192, "eos_token_id": None,
        "rope_parameters": {**rope, "mrope_section": [24, 20, 20] if large else [12, 10, 10]},
    }  # fmt: skip
    sight = {
        "depth": 24 if large else 4, "hidden_size": 1024 if large else 144, "intermediate_size": 4096 if large else 256,
        "num_heads": 16 if large else 2, "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [5, 11, 17] if large else [0, 1],
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3VLConfig(
        text_config=text, vision_config=sight, image_token_id=PAD, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda" if CUDA else "cpu"):
        model: Any = Qwen3VLForConditionalGeneration(config)
    model.to(torch.bfloat16 if CUDA else torch.float32)
    model.save_pretrained(folder)
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size).save_pretrained(folder)


def picture(seed: int, width: int, height: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(file, "PNG")
    return file.getvalue()


def prompt(reader: PixelReader, parts: list[Any]) -> tuple[list[int], list[PromptImage]]:
    from PIL import Image

    ids, images = list[int](), list[PromptImage]()
    processor = reader.processor()[0]
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        grid = tuple(
            processor(images=[Image.open(io.BytesIO(part))], return_tensors="np")["image_grid_thw"][0].tolist()
        )
        run = ImageRun(
            sha256=hashlib.sha256(part).hexdigest(), start=len(ids) + 1, count=grid[1] * grid[2] // 4, grid=grid,
            processor=processor_identity(processor),
        )  # fmt: skip
        images.append(PromptImage(run=run, data=part, media_type="image/png"))
        ids += [START, *[PAD] * run.count, END]
    return ids, images


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if CUDA:
            torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found[1:])


def run(*, quick: bool) -> list[Report]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as made:
        save_model(Path(made), quick)
        return [price(made, quick), bits(made, quick)]


def load(folder: str) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    dtype = torch.bfloat16 if CUDA else torch.float32
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    return model.to("cuda" if CUDA else "cpu")


def price(folder: str, quick: bool) -> Report:
    reader, model = PixelReader(folder), load(folder)
    sizes = ((512, 512), (1024, 768), (1920, 1080))[: 2 if quick or not CUDA else 3]
    columns = (
        "image", "tokens", "tower sdpa ms", "tower exact ms", "ratio", "row", "step sdpa ms", "step exact ms", "ratio",
    )  # fmt: skip
    return Report(
        title="An image: exact beside sdpa", columns=columns, notes=("step: forward and backward, one row",),
        rows=[price_of(model, reader, *size, 2 if quick else 5) for size in sizes],
    )  # fmt: skip


def price_of(model: Any, reader: PixelReader, width: int, height: int, repeats: int) -> tuple[Any, ...]:
    ids, images = prompt(reader, [11, picture(1, width, height), *range(20, 84)])
    tensor = torch.tensor([ids], device=model.device)
    seen = see_rows(model, [(torch.tensor(ids), images)], reader)
    plain = plain_inputs(model, tensor, [images], reader)

    def tower() -> None:
        with torch.no_grad():
            model.model.visual(plain["pixel_values"], grid_thw=plain["image_grid_thw"])

    def train_plain() -> None:
        logits = model(input_ids=tensor, use_cache=False, **plain).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits.float(), tensor[0, 1:]).backward()
        model.zero_grad()

    def train_exact() -> None:
        (-score(model, tensor, images=seen).mean()).backward()
        model.zero_grad()

    sdpa, sdpa_step = milliseconds(tower, repeats), milliseconds(train_plain, repeats)
    with exact(model):
        ours, our_step = milliseconds(tower, repeats), milliseconds(train_exact, repeats)
    count = images[0].run.count
    return f"{width}x{height}", count, sdpa, ours, ours / sdpa, len(ids), sdpa_step, our_step, our_step / sdpa_step


def bits(folder: str, quick: bool) -> Report:
    reader, trainer = PixelReader(folder), load(folder).eval()
    name = "cuda" if CUDA else "cpu"
    random_ = random.Random(3)
    pictures = [picture(seed, *size) for seed, size in enumerate(((512, 512), (640, 427), (512, 512)))]
    prompts = []
    for _ in range(4 if quick else 24):
        before = [random_.randrange(20, 2000) for _ in range(random_.choice([0, 64, 150]))]
        parts = [
            *before,
            random_.choice(pictures),
            *(random_.randrange(20, 2000) for _ in range(random_.randrange(3, 90))),
        ]
        prompts.append(prompt(reader, [*parts, random_.choice(pictures), 30] if random_.random() < 0.4 else parts))
    states = {0: {key: value.clone() for key, value in trainer.state_dict().items()}}
    states[1] = {k: v * (1.05 if v.dim() > 1 and "visual" in k else 1) for k, v in states[0].items()}
    wrong = total = 0
    with ExactEngine(folder, name, "bfloat16" if CUDA else "float32", kv_tokens=40_000, version=0) as engine:
        features = engine.core.local.forward.features

        async def play() -> list[Any]:
            sampling = [Sampling(max_tokens=12 if quick else 48, seed=seed) for seed in range(len(prompts))]
            first = [
                asyncio.create_task(engine.generate(p[0], s, images=p[1]))
                for p, s in zip(prompts, sampling, strict=True)
            ]
            while not any(request.num_sampled for request in engine.core.requests) and not first[0].done():
                await asyncio.sleep(0.01)
            await engine.publish(states[1], version=1)
            done = await asyncio.gather(*first)
            return done + [await engine.generate(p[0], sampling[0], images=p[1]) for p in prompts[:2]]

        start = time.perf_counter()
        found = asyncio.run(play())
        seconds, encoded, hits = (
            time.perf_counter() - start,
            features.encoded,
            engine.metrics()["prefix_hit_tokens_total"],
        )
    for version, state in states.items():
        trainer.load_state_dict(state)
        with torch.no_grad(), exact(trainer):
            for (ids, images), completion in zip([*prompts, *prompts[:2]], found, strict=True):
                at = [i for span in completion.versions if span.version == version for i in range(span.start, span.end)]
                if not at:
                    continue
                whole = torch.tensor([*ids, *completion.token_ids])
                values = score(trainer, whole.to(trainer.device), images=see_rows(trainer, [(whole, images)], reader))
                values = values[len(ids) - 1 :].float().cpu()[at]
                theirs = torch.tensor(completion.logprobs)[at]
                wrong += int((values.view(torch.int32) != theirs.view(torch.int32)).sum())
                total += len(at)
    row = (len(found), sum(len(p[1]) for p in prompts), encoded, int(hits), total, wrong, seconds)
    columns = (
        "requests",
        "images in them",
        "encoded",
        "tokens from the prefix cache",
        "sampled",
        "differing bits",
        "seconds",
    )
    notes = (
        "3 distinct images, 2 versions of the weights (the second changes the vision tower), 2 more images in the proof",
    )
    return Report(title="Engine against trainer", columns=columns, rows=[row], notes=notes)


if __name__ == "__main__":
    main("images", "what an image costs under exactness", run)
