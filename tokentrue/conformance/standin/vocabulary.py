"""Ids and text by the `tokenizers` and `transformers` libraries alone, and the same text in other ids than the
tokenizer would choose. Pictures of one colour, and a model directory for them: the shipped tokenizer with Qwen's vision
tokens and image processor. An image of W by H pixels, multiples of 28, has W·H/784 tokens.
"""

import hashlib
import io
import json
import random
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

SIDE = 28  # pixels of a token: patches of 14, merged two by two
PAD = "<|image_pad|>"
TOKENS = ("<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>")
Colour = tuple[int, ...]
ImagePlace = tuple[str, int, int]
"""SHA-256 of the file, its first token, and how many tokens it has."""


class Vocabulary:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.added = {token.content: index for index, token in self._tokenizer.get_added_tokens_decoder().items()}
        self.added_ids = frozenset(self.added.values())
        self.stop = self.added["<|im_end|>"]
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.colours: dict[str, Colour] = {}  # of the pictures that were in prompts, by their hash

    @cached_property
    def _chat(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.folder))

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        return self._chat.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)

    def expand_images(
        self, ids: Sequence[int], images: Sequence[bytes]
    ) -> tuple[tuple[int, ...], Sequence[ImagePlace]]:
        """The prompt with as many placeholders as each image has tokens, and where they are."""
        pad, out, places = self.added.get(PAD), list[int](), list[ImagePlace]()
        if sum(token == pad for token in ids) != len(images):
            raise ValueError(f"{len(images)} images and another number of {PAD} in the prompt")
        left = iter(images)
        for token in ids:
            count = 1
            if token == pad:
                data = next(left)
                name = hashlib.sha256(data).hexdigest()
                count, self.colours[name] = see_picture(data)
                places.append((name, len(out), count))
            out += [token] * count
        return tuple(out), places

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Marker literals become marker tokens, as a model samples them."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def split(self, ids: Sequence[int], rng: random.Random, share: float) -> list[int]:
        """The same bytes: some tokens are cut in two at any byte, also inside a character."""
        out: list[int] = []
        for token in ids:
            out += self._halves(token, rng) if token not in self.added_ids and rng.random() < share else [token]
        return out

    def _halves(self, token: int, rng: random.Random) -> list[int]:
        name = self._tokenizer.id_to_token(token)
        if name is None or len(name) < 2:
            return [token]
        cut = rng.randrange(1, len(name))
        first, second = (self._tokenizer.token_to_id(part) for part in (name[:cut], name[cut:]))
        return [first, second] if first is not None and second is not None else [token]


def draw_picture(colour: Colour, width: int = 2, height: int = 2, *, level: int = 6) -> bytes:
    """PNG of `width` by `height` tokens; another `level` of compression is the same picture in other bytes."""
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
