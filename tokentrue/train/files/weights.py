"""A model's weights as Hugging Face files: one, or several with an index above a size. Never more than one file's worth
is held at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tokentrue.train.ranks import Ranks, named_weights, whole

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def weights_bytes(model: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for _, value in named_weights(model))


def plan_files(model: nn.Module, limit_bytes: int) -> dict[str, list[str]]:
    """Names of tensors by file, in the model's order; a file holds at most `limit_bytes`, or one tensor."""
    parts: list[list[str]] = [[]]
    held = 0
    for name, value in named_weights(model):
        size = value.numel() * value.element_size()
        if parts[-1] and held + size > limit_bytes:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": names for number, names in enumerate(parts, 1)}


def write_weights(model: nn.Module, directory: Path, ranks: Ranks, *, limit_bytes: int) -> None:
    """Every rank takes part in gathering; rank 0 writes. A tied parameter is written once."""
    held = dict(named_weights(model))
    files = plan_files(model, limit_bytes)
    for file, names in files.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            value = whole(held[name].detach())
            if ranks.first:
                tensors[name] = value.cpu().contiguous()
        if ranks.first:
            save_file(tensors, directory / file, metadata={"format": "pt"})
    if ranks.first and len(files) > 1:
        table = {
            "metadata": {"total_size": weights_bytes(model)},
            "weight_map": {n: f for f, names in files.items() for n in names},
        }
        (directory / INDEX).write_text(json.dumps(table, indent=1))


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor, one at a time."""
    files = [SINGLE]
    if (directory / INDEX).is_file():
        files = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    for file in files:
        with safe_open(directory / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def write_model_files(model: Any, source: str | None, target: Path) -> None:
    """Configuration, generation settings, tokenizer and template: copied from a directory, saved for a hub id."""
    if source is not None and Path(source).is_dir():
        for name in MODEL_FILES:
            if (Path(source) / name).exists():
                shutil.copyfile(Path(source) / name, target / name)
        return
    model.config.save_pretrained(target)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(target)
    if source is not None:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(target)
