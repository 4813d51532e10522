"""Checkpoints: everything that a run resumes from with the same bits, and a model directory that any tool can load.

    step-000010/
      model.safetensors, config.json, tokenizer …   a Hugging Face directory: parameters and persistent buffers
      optimizer.safetensors                          moments and step counts by parameter name, master weights
      rounds.jsonl                                   batches sampled but not yet trained on (off-policy modes)
      state.json                                     version, counters, configuration hash, digests; written last

Above a size the weights are several files with an index, and `optimizer/` holds the shards of
torch.distributed.checkpoint.
A checkpoint is written under another name and moved into place: what is called step-… is whole. `latest` links to the
newest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tokentrue.errors import FileFormatError, TrainingError
from tokentrue.json_lines import read_numbered_lines
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.train.files.digests import digests_under, require_digests
from tokentrue.train.files.optimizer import place, read_optimizer, write_shards, write_whole
from tokentrue.train.files.weights import read_weights, weights_bytes, write_model_files, write_weights
from tokentrue.train.ranks import named_weights
from tokentrue.train.trainer import Trainer

NAME = re.compile(r"step-(\d{6})")
DAMAGED = (OSError, ValueError, KeyError, SafetensorError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint's own facts; the trainer already has its weights."""

    path: Path
    version: int
    rounds: Mapping[int, list[list[JsonObject]]]
    evaluation: JsonMapping = field(default_factory=JsonObject)
    counts: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])


def save(
    trainer: Trainer,
    directory: Path,
    *,
    model: str | None,
    run_hash: str,
    rounds: Mapping[int, Any],
    keep: int,
    best: int | None = None,
    evaluation: JsonMapping | None = None,
    counts: Mapping[int, Mapping[str, float]] | None = None,
    samples_digest: str = "",
) -> Path | None:
    """Every rank calls it; rank 0 writes, and above `train.shard_checkpoint_gib` each rank its share of the optimiser's
    state.

    `rounds` are plain JSON: the batches in waiting, by number; `counts` says what became of their rollouts. `model` is
    the directory or hub id whose tokenizer belongs to the weights. `samples_digest` names the content of the file that
    the run trains from. The newest `keep` checkpoints stay, and that of step `best`.
    """
    target = directory / f"step-{trainer.version:06d}"
    partial = directory / f".{target.name}.partial"
    try:
        if trainer.ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        trainer.ranks.all_gather_object(None)  # the directory is there
        write_tensors(trainer, partial)
        if trainer.ranks.first:
            write_model_files(trainer.model, model, partial)
            with (partial / "rounds.jsonl").open("w") as out:
                for number, groups in sorted(rounds.items()):
                    out.write(json.dumps({"round": number, "groups": groups}) + "\n")
        digests = digests_under(partial, trainer.ranks)
        if not trainer.ranks.first:
            return None
        state = {
            **trainer.counters(),
            "torch": torch.__version__,
            "run_hash": run_hash,
            "samples_digest": samples_digest,
            "evaluation": dict(evaluation or {}),
            "counts": {str(number): dict(found) for number, found in (counts or {}).items()},
            "digests": digests,
        }
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainingError(
            f"step {trainer.version}: the checkpoint could not be written to {directory} ({error}); the ones before are whole: make room "
            "and run again to resume"
        ) from error
    for old in find_checkpoints(directory)[:-keep]:
        if best is None or old.name != f"step-{best:06d}":
            shutil.rmtree(old)
    point_to(directory / "latest", target)
    return target


def write_tensors(trainer: Trainer, directory: Path) -> None:
    limit = int(trainer.config.shard_checkpoint_gib * 2**30)
    write_weights(trainer.model, directory, trainer.ranks, limit_bytes=limit)
    if weights_bytes(trainer.model) > limit:
        write_shards(trainer, directory)
    else:
        write_whole(trainer, directory)


def point_to(link: Path, target: Path) -> None:
    """A relative link, moved into place whole."""
    beside = link.with_name(f".{link.name}.partial")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target.name)
    os.replace(beside, link)


def find_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name) and (path / "state.json").exists())


def state_of(path: Path, *, run_hash: str, samples_digest: str = "") -> tuple[int, int]:
    """A checkpoint's version and count of updates; refused when another configuration, or another file of samples, made
    it.

    Checkpoints of older versions name no digest.
    """
    try:
        state = json.loads((path / "state.json").read_text())
        version, updates, made_by = int(state["version"]), int(state["updates"]), state["run_hash"]
    except (OSError, ValueError, KeyError) as error:
        raise FileFormatError(
            f"{path}: not a whole checkpoint ({error!r}); remove it to resume from an earlier one"
        ) from error
    if made_by != run_hash:
        raise FileFormatError(
            f"{path}: another configuration made it ({made_by}, now {run_hash}); choose another directory"
        )
    trained_on = state.get("samples_digest", "")
    if samples_digest and trained_on and trained_on != samples_digest:
        raise FileFormatError(
            f"{path}: another file of samples made it (SHA-256 {trained_on[:12]}…, now {samples_digest[:12]}…); choose another directory"
        )
    return version, updates


def load(trainer: Trainer, path: Path, *, run_hash: str) -> Checkpoint:
    """Puts weights, moments and counters back in place, bit for bit. Every rank calls it."""
    version, _ = state_of(path, run_hash=run_hash)
    state = json.loads((path / "state.json").read_text())
    require_digests(path, state.get("digests", {}), trainer.ranks)
    try:
        rows = [json.loads(line) for _, line in read_numbered_lines(path / "rounds.jsonl")]
        rounds = {row["round"]: row["groups"] for row in rows}
        restore_weights(trainer, path)
        read_optimizer(trainer, path)
    except DAMAGED as error:
        raise FileFormatError(
            f"{path}: not a whole checkpoint ({error!r}); remove it to resume from an earlier one"
        ) from error
    trainer.set_counters(state)
    counts = {int(number): found for number, found in state.get("counts", {}).items()}
    return Checkpoint(path=path, version=version, rounds=rounds, evaluation=state.get("evaluation", {}), counts=counts)


def restore_weights(trainer: Trainer, path: Path) -> None:
    own = dict(named_weights(trainer.model))
    left = set(own)
    with torch.no_grad():
        for name, value in read_weights(path):
            if name not in own or own[name].shape != value.shape:
                raise FileFormatError(
                    f"{path}: its weights are those of another model ({name}); choose another directory"
                )
            place(own[name], value)
            left.discard(name)
    if left:
        raise FileFormatError(
            f"{path}: its weights are those of another model (no {sorted(left)[0]}); choose another directory"
        )


def latest(directory: Path) -> Path | None:
    paths: Sequence[Path] = find_checkpoints(directory)
    return paths[-1] if paths else None
