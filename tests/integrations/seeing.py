"""A small random Qwen3-VL for the frameworks, its processor, and an agent whose two questions each have a picture."""

from __future__ import annotations

import base64
import io
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))


def make_model(folder: Path) -> None:
    import images

    model = images.make_model(folder)
    with torch.no_grad():  # random weights of the usual size would hide what an image changes
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 and "embed_tokens" not in name else None
    model.save_pretrained(folder)


def load_processor(folder: Path) -> Any:
    """transformers' own, under its own name, by which verl recognises it."""
    from tests.vision_families import own_processor

    found = own_processor(folder, "qwen3_vl")
    type(found).__name__ = "Qwen3VLProcessor"
    return found


def draw(seed: int) -> bytes:
    """Turned by EXIF: the upright picture is taller than wide."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.frombytes("RGB", (48, 32), random.Random(seed).randbytes(48 * 32 * 3)).save(file, "PNG", exif=exif)
    return file.getvalue()


async def look_twice(client: Any, task: Any) -> float:
    """The second picture follows the first sampled token."""
    messages: list[Any] = []
    for place in range(2):
        url = f"data:image/png;base64,{base64.b64encode(draw(place)).decode()}"
        messages.append(
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": str(task)}],
            }
        )
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return float(random.random())
