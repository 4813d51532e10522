"""Checkpoints: everything from which a run goes on with the same bits, and a model directory that any tool can load.

    step-000010/
      model.safetensors, config.json, tokenizer …   a Hugging Face directory: parameters and persistent buffers
      optimizer.safetensors                          moments and step counts by parameter name
      rounds.jsonl                                   batches sampled but not yet trained on (off-policy modes)
      state.json                                     version, counters, configuration hash, digests; written last

A checkpoint is written under another name and moved into place: what is called step-… is whole. `latest` links to the newest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokentrue.errors import FileFormatError
from tokentrue.train.ranks import named_weights, whole, whole_weights
from tokentrue.train.trainer import Trainer

MASTER = "master"
NAME = re.compile(r"step-(\d{6})")
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint's own facts; the trainer already has its weights."""

    path: Path
    version: int
    rounds: Mapping[int, list[list[dict[str, Any]]]]


def save(
    trainer: Trainer,
    directory: Path,
    *,
    model: str | None,
    run_hash: str,
    rounds: Mapping[int, Any],
    keep: int,
    best: int | None = None,
) -> Path | None:
    """Every rank calls it; rank 0 writes. `rounds` are plain JSON: the batches in waiting, by number.

    `model` is the directory or hub id whose tokenizer belongs to the weights. The newest `keep` checkpoints stay, and that of step `best`.
    """
    weights = {name: value.cpu().contiguous() for name, value in whole_weights(trainer.model)}
    moments = optimizer_tensors(trainer)
    if not trainer.ranks.first:
        return None
    target = directory / f"step-{trainer.version:06d}"
    partial = directory / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    save_file(moments, partial / "optimizer.safetensors")
    write_model_files(trainer.model, model, partial)
    with (partial / "rounds.jsonl").open("w") as out:
        for number, groups in sorted(rounds.items()):
            out.write(json.dumps({"round": number, "groups": groups}) + "\n")
    state = {"version": trainer.version, "updates": trainer.updates, "run_hash": run_hash, "torch": torch.__version__}
    state["loss_scale"] = [trainer.scale.value, trainer.scale.good]
    state["response_lengths"] = trainer.response_lengths
    state["digests"] = {path.name: digest_of(path) for path in sorted(partial.iterdir())}
    (partial / "state.json").write_text(json.dumps(state, indent=1))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    for old in find_checkpoints(directory)[:-keep]:
        if best is None or old.name != f"step-{best:06d}":
            shutil.rmtree(old)
    point_to(directory / "latest", target)
    return target


def write_model_files(model: Any, source: str | None, target: Path) -> None:
    """Configuration, generation settings, tokenizer and template: copied from a directory, saved anew for a hub id."""
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


def point_to(link: Path, target: Path) -> None:
    """A relative link, moved into place whole."""
    beside = link.with_name(f".{link.name}.partial")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target.name)
    os.replace(beside, link)


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_digests(path: Path) -> None:
    """Raises FileFormatError where a file of the checkpoint is not the one that was written."""
    for name, digest in json.loads((path / "state.json").read_text()).get("digests", {}).items():
        if not (path / name).is_file() or digest_of(path / name) != digest:
            raise FileFormatError(f"{path}: not a whole checkpoint ({name} is missing or changed); remove it to resume from an earlier one")


def find_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name) and (path / "state.json").exists())


def state_of(path: Path, *, run_hash: str) -> tuple[int, int]:
    """A checkpoint's version and count of updates; refused when another configuration made it."""
    try:
        state = json.loads((path / "state.json").read_text())
        version, updates, made_by = int(state["version"]), int(state["updates"]), state["run_hash"]
    except (OSError, ValueError, KeyError) as error:
        raise FileFormatError(f"{path}: not a whole checkpoint ({error!r}); remove it to resume from an earlier one") from error
    if made_by != run_hash:
        raise FileFormatError(f"{path}: another configuration made it ({made_by}, now {run_hash}); choose another directory")
    return version, updates


def load(trainer: Trainer, path: Path, *, run_hash: str) -> Checkpoint:
    """Puts weights, moments and counters back in place, bit for bit."""
    version, updates = state_of(path, run_hash=run_hash)
    require_digests(path)
    try:
        weights = load_file(path / "model.safetensors")
        moments = load_file(path / "optimizer.safetensors")
        rounds = {line["round"]: line["groups"] for line in map(json.loads, (path / "rounds.jsonl").read_text().splitlines())}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise FileFormatError(f"{path}: not a whole checkpoint ({error!r}); remove it to resume from an earlier one") from error
    own = dict(named_weights(trainer.model))
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    if shapes != {name: tuple(value.shape) for name, value in weights.items()}:
        raise FileFormatError(f"{path}: its weights are those of another model; choose another directory")
    with torch.no_grad():
        for name, value in own.items():
            place(value, weights[name])
    restore_optimizer(trainer, moments)
    trainer.version, trainer.updates = version, updates
    state = json.loads((path / "state.json").read_text())
    trainer.scale.value, trainer.scale.good = state.get("loss_scale", [1.0, 0])
    trainer.response_lengths = list(state.get("response_lengths", ()))
    return Checkpoint(path=path, version=version, rounds=rounds)


def optimizer_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Moments and counts by parameter name, and master weights where the model computes in a lower precision."""
    tensors: dict[str, Tensor] = {}
    for name, master in trainer.masters.named():
        for key, value in trainer.optimizer.state.get(master, {}).items():
            tensors[f"{name}|{key}"] = whole(value).detach().cpu().contiguous()
    for name, master in trainer.masters.copies():
        tensors[f"{name}|{MASTER}"] = whole(master.detach()).cpu().contiguous()
    return tensors


def restore_optimizer(trainer: Trainer, moments: Mapping[str, Tensor]) -> None:
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in moments.items():
        name, _, kind = key.rpartition("|")
        by_name.setdefault(name, {})[kind] = value
    for name, master in trainer.masters.named():
        mine = by_name.get(name, {})
        if (copy := mine.pop(MASTER, None)) is not None:
            with torch.no_grad():
                place(master, copy)
        if mine:
            placed = {k: v.clone() if v.dim() == 0 else place(torch.zeros_like(master), v) for k, v in mine.items()}
            trainer.optimizer.state[master] = placed


def place(target: Tensor, value: Tensor) -> Tensor:
    """Copies a whole tensor into a parameter that may be sharded."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None:
        return target.copy_(value)
    from torch.distributed.tensor import distribute_tensor

    return target.copy_(distribute_tensor(value.to(target.device), mesh, target.placements))  # type: ignore[attr-defined]


def latest(directory: Path) -> Path | None:
    paths: Sequence[Path] = find_checkpoints(directory)
    return paths[-1] if paths else None
