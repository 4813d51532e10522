"""A tiny random Qwen3-VL with its image processor, pictures, and prompts that show them. What the record says of an
image comes from transformers' own processor."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tokentrue.pixels import PixelReader, processor_identity
from tokentrue.types import ImageRun, PromptImage

VOCABULARY, START, END, PAD, VIDEO = 300, 290, 291, 292, 293
SIDE = 32  # pixels of a token's square


def config(**text: Any) -> Qwen3VLConfig:
    return Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            **text,
        },
        vision_config={
            "depth": 3, "hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "out_hidden_size": text.get("hidden_size", 64),
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "patch_size": 16,
        },
        image_token_id=PAD, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip


def save_processor(folder: Path) -> None:
    size = {"shortest_edge": SIDE * SIDE, "longest_edge": 24 * SIDE * SIDE}
    Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size).save_pretrained(folder)


def save_model(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> str:
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config()).to(dtype)
    with torch.no_grad():  # random weights of the usual size would hide what an image changes
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 and "embed_tokens" not in name else None
    model.save_pretrained(folder)
    save_processor(folder)
    return str(folder)


@cache
def picture(seed: int, width: int = 96, height: int = 64) -> bytes:
    random_ = random.Random(seed)
    made = Image.frombytes("RGB", (width, height), random_.randbytes(3 * width * height))
    file = io.BytesIO()
    made.save(file, "PNG")
    return file.getvalue()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record(processor: Any, data: bytes, start: int) -> PromptImage:
    with Image.open(io.BytesIO(data)) as opened:
        grid = tuple(processor(images=[opened], return_tensors="np")["image_grid_thw"][0].tolist())
    run = ImageRun(
        sha256=digest(data), start=start, count=grid[1] * grid[2] // 4, grid=grid,
        processor=processor_identity(processor),
    )  # fmt: skip
    return PromptImage(run=run, data=data, media_type="image/png")


def prompt(reader: PixelReader, parts: Sequence[int | bytes]) -> tuple[list[int], list[PromptImage]]:
    """Ids as they are, each picture between its markers."""
    ids: list[int] = []
    images: list[PromptImage] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        image = record(reader.processor()[0], part, len(ids) + 1)
        images.append(image)
        ids += [START, *[PAD] * image.run.count, END]
    return ids, images
