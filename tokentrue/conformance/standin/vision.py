"""Pictures of one colour, and a model directory whose prompts may have images: the shipped tokenizer with Qwen's vision
tokens and image processor. An image of W by H pixels, multiples of 28, has W·H/784 tokens."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

SIDE = 28  # pixels of a token: patches of 14, merged two by two
PAD = "<|image_pad|>"
TOKENS = ("<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>")
Colour = tuple[int, ...]
ImagePlace = tuple[str, int, int]
"""SHA-256 of the file, its first token, and how many tokens it has."""


def draw_picture(colour: Colour, width: int = 2, height: int = 2, *, level: int = 6) -> bytes:
    """A PNG file of `width` by `height` tokens; another `level` of compression is the same picture in other bytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width * SIDE, height * SIDE), colour).save(file, "PNG", compress_level=level)
    return file.getvalue()


def see_picture(data: bytes) -> tuple[int, Colour]:
    """The number of tokens and the colour."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        colour = image.convert("RGB").resize((1, 1)).getpixel((0, 0))
        assert isinstance(colour, tuple)
        return round(image.width / SIDE) * round(image.height / SIDE), tuple(map(int, colour))


def write_vision_model(base: Path, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(base / "tokenizer_config.json", folder)
    shutil.copy(Path(__file__).with_name("vision.jinja"), folder / "chat_template.jinja")
    ids = {f"{kind}_token_id": tokenizer.token_to_id(f"<|{kind}_pad|>") for kind in ("image", "video")}
    facts = {"model_type": "qwen2_5_vl", "vision_config": {}, "transformers_version": "5.0.0", **ids}
    (folder / "config.json").write_text(json.dumps(facts))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 4 * SIDE**2, "max_pixels": 99 * SIDE**2}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def is_same_picture(one: Sequence[int], other: Sequence[int]) -> bool:
    """Lossy formats change a colour a little."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 8
