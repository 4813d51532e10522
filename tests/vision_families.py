"""Model directories of the vision families, for tests: a tokenizer, a chat template, the model's configuration and the
settings of its image processor; and transformers' own processor over them, which is the truth.

`own` directories use our BPE and our templates (tests/fixtures/vision) and work on any machine; `real` ones use the real
template of the family, and its real tokenizer where it can be had (see tests/parts.py).
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests import carriers, parts

FIXTURES = parts.FIXTURES / "vision"
COMMON: Mapping[str, Any] = {"vision_config": {}, "transformers_version": "5.0.0"}
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
QWEN2_5_VL = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
QWEN3_VL: Mapping[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GEMMA3: Mapping[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 896, "width": 896},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSubject:
    """`template`: a file of tests/fixtures/vision, or a key of `carriers.all_templates()`; `tokenizer`: a real one's
    name, or "" for our BPE; `roles`: whose images must be proven."""

    name: str
    model_type: str
    template: str
    settings: Mapping[str, Any]
    tokenizer: str = ""
    roles: frozenset[str] = frozenset({"user", "tool"})
    calls: bool = True  # the template shows calls; without them no span can be found
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def source(self) -> str:
        own = FIXTURES / self.template
        if own.exists():
            return own.read_text()
        found = carriers.all_templates().get(self.template)
        if found is None:
            pytest.skip(f"template {self.template}: its wheel is not here")
        return found

    @property
    def is_gemma(self) -> bool:
        return self.model_type == "gemma3"

    def folder(self) -> Path:
        base = parts.tokenizer_dir(self.tokenizer) if self.tokenizer else parts.standin_dir(self.source())
        return model_dir(base, self.source(), self.model_type, self.settings)

    def processor(self) -> Any:
        return own_processor(self.folder(), self.model_type)


OWN = (
    VisionSubject(name="own-qwen2.5-vl", model_type="qwen2_5_vl", template="qwen-vl-like.jinja", settings=QWEN2_5_VL),
    VisionSubject(name="own-qwen3-vl", model_type="qwen3_vl", template="qwen-vl-like.jinja", settings=QWEN3_VL),
    VisionSubject(
        name="own-gemma-3",
        model_type="gemma3",
        template="gemma3-like.jinja",
        settings=GEMMA3,
        roles=frozenset({"user"}),
    ),
)
REAL = (
    VisionSubject(
        name="real-qwen2.5-vl",
        model_type="qwen2_5_vl",
        template="trl/qwen2_5_vl.jinja",
        settings=QWEN2_5_VL,
        tokenizer="qwen2.5",
        calls=False,
    ),
    VisionSubject(
        name="real-qwen3-vl",
        model_type="qwen3_vl",
        template="trl/qwen3_vl.jinja",
        settings=QWEN3_VL,
        tokenizer="qwen3",
    ),
    VisionSubject(
        name="real-qwen3.5",
        model_type="qwen3_5",
        template="trl/qwen3_5_think.jinja",
        settings=QWEN3_VL,
        tokenizer="qwen3.5",
    ),
    VisionSubject(
        name="real-gemma-3",
        model_type="gemma3",
        template="trl/gemma3.jinja",
        settings=GEMMA3,
        tokenizer="gemma-3",
        roles=frozenset({"user"}),
    ),
)
BY_NAME = {subject.name: subject for subject in (*OWN, *REAL)}


def model_dir(base: Path, template: str, model_type: str, settings: Mapping[str, Any]) -> Path:
    """A model's directory without weights, built once for the tokenizer directory `base`."""
    facts = json.dumps([str(base), template, model_type, settings, 4], sort_keys=True)
    target = parts.CACHE / "vision" / sha256(facts.encode()).hexdigest()[:16]
    if not (target / "config.json").exists():
        parts.build_once(target, lambda folder: _write(base, template, model_type, settings, folder))
    return target


def _write(base: Path, template: str, model_type: str, settings: Mapping[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    is_gemma = model_type == "gemma3"
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    wanted = tuple(GEMMA_TOKENS.values()) if is_gemma else QWEN_TOKENS
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in wanted])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((base / "tokenizer_config.json").read_text())
    for gone in ("chat_template", "added_tokens_decoder", "additional_special_tokens"):
        config.pop(gone, None)
    if is_gemma:
        config |= {**GEMMA_TOKENS, "extra_special_tokens": GEMMA_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    ids = {name: tokenizer.token_to_id(text) for name, text in GEMMA_TOKENS.items()}
    if is_gemma:
        config = {"image_token_index": ids["image_token"], "boi_token_index": ids["boi_token"]}
    else:
        named = {f"{kind}_token_id": f"<|{kind}_pad|>" for kind in ("image", "video")}
        config = {name: tokenizer.token_to_id(text) for name, text in named.items()}
    (folder / "config.json").write_text(json.dumps({**config, **COMMON, "model_type": model_type}))
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(settings)))


@cache
def own_processor(folder: Path, model_type: str) -> Any:
    """transformers' processor of the family over the directory, with the Pillow backend. It has no video processor:
    that one needs torchvision."""
    from transformers import AutoImageProcessor, AutoTokenizer, Gemma3Processor
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    kind: Any = {"qwen2_5_vl": Qwen2_5_VLProcessor, "gemma3": Gemma3Processor}.get(model_type, Qwen3VLProcessor)

    class WithoutVideos(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    given = {
        "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil"),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "chat_template": (folder / "chat_template.jinja").read_text(),
    }
    made: Any = WithoutVideos(**given)
    return made


def processed(
    processor: Any, messages: Sequence[Mapping[str, Any]], **options: Any
) -> tuple[list[int], list[tuple[int, ...]]]:
    """The ids of the whole conversation by transformers' own processor, from pixels; and the grids of its images."""
    from PIL import Image

    pictures: list[Any] = []
    talk: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [{"type": "image"} if part["type"] == "image" else part for part in content]
            pictures += [
                Image.new("RGB", (part["width"], part["height"]))
                for part in message["content"]
                if part["type"] == "image"
            ]
        talk.append({**message, "content": content})
    text = processor.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, **options)
    made = processor(text=[text], images=pictures or None, add_special_tokens=False)
    grids = made.get("image_grid_thw", [(1, 1, 1)] * len(pictures))
    return [int(id_) for id_ in made["input_ids"][0]], [tuple(map(int, grid)) for grid in grids]


def picture(width: int = 64, height: int = 48, *, seed: int = 0) -> dict[str, Any]:
    """The part of a read conversation for an image of random colour; `picture_bytes` has its file."""
    data = picture_bytes(width, height, seed=seed)
    return {
        "type": "image",
        "sha256": sha256(data).hexdigest(),
        "media_type": "image/png",
        "width": width,
        "height": height,
    }


@cache
def picture_bytes(width: int = 64, height: int = 48, *, seed: int = 0) -> bytes:
    from PIL import Image

    colour = tuple(random.Random(seed).randrange(256) for _ in range(3))
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()
