"""Checkpoints: everything that a run resumes from with the same bits, and a model directory that any tool can load.

    step-000010/
      model.safetensors, config.json, tokenizer …   a Hugging Face directory: parameters and persistent buffers
      optimizer.safetensors                          moments and step counts by parameter name, master weights
      rounds.jsonl                                   batches sampled but not yet trained on (off-policy modes)
      state.json                                     version, counters, configuration hash, digests; written last
      adapter/                                       of a LoRA run, as peft saves it; model.safetensors has it merged in

Large weights are several files with an index, and `optimizer/` holds the shards of torch.distributed.checkpoint. What is
called step-… is whole: it was moved into place. `latest` links to the newest."""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokentrue.errors import FileFormatError, TrainingError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.pixels import load_processor
from tokentrue.plain_json import read_numbered_lines
from tokentrue.records import record
from tokentrue.samples import sample_from_json, sample_to_json
from tokentrue.train.config import list_changes
from tokentrue.train.ranks import Ranks, adapter_weights, find_adapter, named_weights, whole
from tokentrue.train.rows import Groups
from tokentrue.train.trainer import Trainer

NAME = re.compile(r"step-(\d{6})")
ADAPTER = "adapter/adapter_model.safetensors"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OPTIMIZER, SHARDS, MASTER = "optimizer.safetensors", "optimizer", "master"
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


@record
class Store:
    """Where a run keeps its checkpoints, and what it is a run of. `samples_digest`: of the file that it trains from;
    `on_kept` gets the version of a whole checkpoint."""

    directory: Path
    run_hash: str
    model: str | None  # directory or hub id whose tokenizer belongs to the weights
    samples_digest: str = ""
    made_from: JsonMapping = field(default_factory=JsonObject)  # what `run_hash` names
    on_kept: Callable[[int], None] = lambda _: None


@record
class Progress:
    """What a run resumes with beside its trainer; `rounds` and `counts` are by round number."""

    rounds: dict[int, Groups] = field(default_factory=dict[int, Groups])
    counts: dict[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    evaluation: JsonMapping = field(default_factory=JsonObject)


def save(trainer: Trainer, store: Store, progress: Progress, *, best: int | None = None) -> Path | None:
    """Every rank calls it. The newest checkpoints stay, and that of step `best`."""
    ranks, directory = trainer.ranks, store.directory
    target = directory / f"step-{trainer.version:06d}"
    partial = directory / f".{target.name}.partial"
    try:
        if ranks.first:
            for left in directory.glob(".step-*.partial"):  # of a run that was killed while it wrote
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
        ranks.all_gather_object(None)  # the directory is there
        trained: Any = trainer.model
        limit = int(trainer.config.shard_checkpoint_gib * 2**30)
        is_large = write_weights(trained, partial, ranks, limit_bytes=limit)
        if find_adapter(trained) is not None:
            trained.save_pretrained(partial / "adapter")
        write_optimizer(trainer, partial, is_sharded=is_large)
        if ranks.first:
            write_model_files(trained, store.model, partial)
            with (partial / "rounds.jsonl").open("w") as out:
                for number, groups in sorted(progress.rounds.items()):
                    row = {"round": number, "groups": [[sample_to_json(each) for each in group] for group in groups]}
                    out.write(json.dumps(row) + "\n")
        digests = digests_under(partial, ranks)
        if not ranks.first:
            return None
        state = {
            **trainer.counters(),
            "torch": torch.__version__,
            "run_hash": store.run_hash,
            "made_from": store.made_from,
            "samples_digest": store.samples_digest,
            "evaluation": progress.evaluation,
            "counts": progress.counts,
            "digests": digests,
        }
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainingError(
            f"step {trainer.version}: the checkpoint could not be written to {directory} ({error}); the ones before "
            "are whole: make room and run again to resume"
        ) from error
    link = directory / ".latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    os.replace(link, directory / "latest")
    for old in find_checkpoints(directory)[: -trainer.config.keep_checkpoints]:
        if best is None or old.name != f"step-{best:06d}":
            shutil.rmtree(old)
    return target


def find_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(path for path in found if NAME.fullmatch(path.name) and (path / "state.json").exists())


def latest(directory: Path) -> Path | None:
    return next(reversed(find_checkpoints(directory)), None)


def read_state(path: Path, store: Store) -> JsonObject:
    """Refuses a checkpoint of another configuration or file of samples."""
    try:
        state = json.loads((path / "state.json").read_text())
        made_by, _, _ = (state[name] for name in ("run_hash", "version", "updates"))
    except (OSError, ValueError, KeyError) as error:
        raise not_whole(path, repr(error)) from error
    if made_by != store.run_hash:  # checkpoints of older versions have no `made_from`
        known = store.made_from and state.get("made_from")
        changes = "; ".join(list_changes(known, store.made_from)[:8]) if known else f"{made_by}, now {store.run_hash}"
        raise FileFormatError(f"{path}: another configuration made it ({changes}); choose another directory")
    trained_on = state.get("samples_digest", "")  # checkpoints of older versions name none
    if store.samples_digest and trained_on and trained_on != store.samples_digest:
        digests = f"SHA-256 {trained_on[:12]}…, now {store.samples_digest[:12]}…"
        raise FileFormatError(f"{path}: another file of samples made it ({digests}); choose another directory")
    return state


def not_whole(path: Path, why: str) -> FileFormatError:
    return FileFormatError(f"{path}: not a whole checkpoint ({why}); remove it to resume from an earlier one")


def load(trainer: Trainer, path: Path, store: Store) -> Progress:
    """Puts weights, moments and counters in place, bit for bit. Every rank calls it."""
    state = read_state(path, store)
    require_digests(path, state.get("digests", {}), trainer.ranks)
    try:
        rows = [json.loads(line) for _, line in read_numbered_lines(path / "rounds.jsonl")]
        rounds = {row["round"]: [[sample_from_json(each) for each in group] for group in row["groups"]] for row in rows}
        restore_weights(trainer.model, path)
        is_sharded = (path / SHARDS).is_dir()
        restore_optimizer(trainer, read_shards(trainer, path) if is_sharded else load_file(path / OPTIMIZER))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise not_whole(path, repr(error)) from error
    trainer.set_counters(state)
    counts = {int(number): found for number, found in state.get("counts", {}).items()}
    return Progress(rounds=rounds, counts=counts, evaluation=state.get("evaluation", {}))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_under(directory: Path, ranks: Ranks) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    names = ranks.from_first(sorted(str(path.relative_to(directory)) for path in files))
    return ranks.merge({name: file_digest(directory / name) for name in names[ranks.rank :: ranks.world]})


def require_digests(directory: Path, digests: Mapping[str, str], ranks: Ranks) -> None:
    """Other files are not read. A rank that does not see one of its files still meets the others in `merge`."""
    mine = sorted(digests)[ranks.rank :: ranks.world]
    found = ranks.merge({name: file_digest(directory / name) for name in mine if (directory / name).is_file()})
    for name in sorted(digests):
        if found.get(name) != digests[name]:
            raise not_whole(directory, f"{name} is missing or changed")


def gather_tensors(held: Iterable[tuple[str, Tensor]], ranks: Ranks) -> dict[str, Tensor]:
    gathered = ((name, whole(value.detach())) for name, value in held)
    kept = [(name, value.cpu().contiguous()) for name, value in gathered if ranks.first]
    return dict(kept)


def write_weights(model: nn.Module, directory: Path, ranks: Ranks, *, limit_bytes: int) -> bool:
    """In files of at most `limit_bytes`, in the model's order, tied parameters once; whether they are larger."""
    parts: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, value in named_weights(model):
        total += value.nbytes
        if parts[-1] and size + value.nbytes > limit_bytes:
            parts.append({})
            size = 0
        size += value.nbytes
        parts[-1][name] = value
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = gather_tensors(part.items(), ranks)
        if ranks.first:
            save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if ranks.first and len(parts) > 1:
        table = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(table, indent=1))
    return total > limit_bytes


def restore_weights(model: nn.Module, directory: Path) -> None:
    files, left = [SINGLE], dict(named_weights(model))
    if find_adapter(model) is not None:
        files, left = [ADAPTER], dict(adapter_weights(model))
    elif (directory / INDEX).is_file():
        files = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    for file in files:
        with safe_open(directory / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                target, value = left.pop(name, None), opened.get_tensor(name)
                if target is None or target.shape != value.shape:
                    raise other_model(directory, name)
                place(target, value)
    if left:
        raise other_model(directory, f"no {min(left)}")


def other_model(path: Path, why: str) -> FileFormatError:
    return FileFormatError(f"{path}: its weights are those of another model ({why}); choose another directory")


def write_model_files(model: Any, source: str | None, target: Path) -> None:
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
        if hasattr(model.config, "vision_config"):
            load_processor(source).save_pretrained(target)


def held_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for name, master in trainer.masters.named.items():
        for key, value in trainer.optimizer.state.get(master, {}).items():
            yield f"{name}|{key}", value.detach()
    for name, master in trainer.masters.copies.items():
        yield f"{name}|{MASTER}", master.detach()


def write_optimizer(trainer: Trainer, directory: Path, *, is_sharded: bool) -> None:
    """Whole tensors by rank 0, or each rank's shards, which another number of ranks can read."""
    if is_sharded:
        from torch.distributed.checkpoint.state_dict_saver import save

        with alone_is_meant():
            save(dict(held_tensors(trainer)), checkpoint_id=directory / SHARDS, no_dist=trainer.ranks.world == 1)
        return
    tensors = gather_tensors(held_tensors(trainer), trainer.ranks)
    if trainer.ranks.first:
        save_file(tensors, directory / OPTIMIZER)


def restore_optimizer(trainer: Trainer, found: Mapping[str, Tensor]) -> None:
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in found.items():
        name, _, kind = key.rpartition("|")
        by_name.setdefault(name, {})[kind] = value
    for name, master in trainer.masters.named.items():
        mine = by_name.get(name, {})
        if (copy := mine.pop(MASTER, None)) is not None:
            place(master, copy)
        if mine:
            trainer.optimizer.state[master] = {
                kind: value.clone() if value.dim() == 0 else place(torch.zeros_like(master), value)
                for kind, value in mine.items()
            }


def read_shards(trainer: Trainer, directory: Path) -> Mapping[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    wanted: dict[str, Tensor] = {}
    for key, facts in FileSystemReader(directory / SHARDS).read_metadata().state_dict_metadata.items():
        like = trainer.masters.named.get(key.rpartition("|")[0])
        if like is not None and isinstance(facts, TensorStorageMetadata):
            like = like.detach()
            wanted[key] = torch.zeros_like(like) if facts.size else torch.zeros((), dtype=facts.properties.dtype)
    with alone_is_meant():
        load(wanted, checkpoint_id=directory / SHARDS, no_dist=trainer.ranks.world == 1)
    return wanted


@contextmanager
def alone_is_meant() -> Iterator[None]:
    """With one rank torch warns that one process writes alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@torch.no_grad()
def place(target: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, or a shard like the target's, into a parameter that may be sharded."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or hasattr(value, "device_mesh"):
        return target.copy_(value)
    from torch.distributed.tensor import distribute_tensor

    return target.copy_(distribute_tensor(value.to(target.device), mesh, target.placements))  # type: ignore[attr-defined]
