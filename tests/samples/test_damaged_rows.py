"""Every leaf of every exporter's row is changed, dropped and given a wrong type: an audit finds it, or the file is
refused with a typed error. What may pass is listed in `UNBOUND`, with the reason."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import tokentrue as tt
from tests.marks import IS_THOROUGH, slow_but_every, slow_except
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.cli.main import run
from tokentrue.errors import AuditError, FileFormatError
from tokentrue.routing_replay import RoutedExperts, SamplingMask, TopLogprobs
from tokentrue.samples import audit_exported, read_exported, read_samples, write_samples
from tokentrue.samples.files import read_sound_samples
from tokentrue.samples.formats import FORMATS
from tokentrue.samples.recorded_turns import seal
from tokentrue.types import Sample

UNBOUND = {
    "metadata.env_name": "the user's own metadata: the seal binds metadata.tokentrue alone",
    "metadata.env_name (removed)": "the same",
    "multi_modal_data (removed)": "null in a sample without images, and unknown to earlier releases",
    "top_logprobs (removed)": "null in a sample without them, and unknown to earlier releases",
    "routed_experts.start (removed)": "0, the only start that an audit accepts, and what it is read as where it is missing",
}
TRAINERS = ["verl", "trl", "slime", "prime-rl", "tinker"]
WRONG = [None, -1, 10**30, "x", "\ud800", [], {}, True, 1.5, [[1]]]
Row = dict[str, Any]
PathInRow = tuple[str | int, ...]


@pytest.fixture
async def sample() -> Sample:
    """One sample of two turns, with everything that an exporter may write."""
    session = tt.Session(renderer=Letters(), provider=Engine([sampled("r", "one"), sampled("r", "two")]), group="g")
    history: list[Any] = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        reply = await session.chat(history, sampling=tt.Sampling(temperature=0.7))
        history = [*history, reply.message, {"role": "user", "content": "go"}]
    await session.reward(0.5, metadata={"env_name": "calc"})
    (found,) = session.samples()
    inputs = len(found.token_ids) - 1
    kept = [
        [] if value is None else sorted({token, 1, 5})
        for token, value in zip(found.token_ids, found.rollout_logprobs, strict=True)
    ]
    experts = (np.arange(inputs * 4, dtype="<i2") % 7).tobytes()
    weights = np.arange(inputs * 4, dtype="<f4").tobytes()
    routed = RoutedExperts(shape=(inputs, 2, 2), data=experts, weights=weights)
    return sealed(replace(found, routed_experts=routed, sampling_mask=SamplingMask.from_rows(kept)))


def sealed(sample: Sample) -> Sample:
    own = {**sample.metadata["tokentrue"], "seal": seal(sample)}
    return replace(sample, metadata={**sample.metadata, "tokentrue": own})


def json_columns(name: str) -> list[str]:
    return ["tokentrue"] if name == "verl" else ["spans", "metadata", "certificate", "routed_experts", "sampling_mask"]


def load_row(name: str, path: Path) -> Row:
    """The only row of a file as a tree of plain values, JSON texts inside it opened."""
    if name == "safetensors":
        with safe_open(path, framework="numpy") as file:
            header = file.metadata()
            tensors = {key: file.get_tensor(key).tolist() for key in file.keys()}  # noqa: SIM118
        return {"format": header["format"], "samples": json.loads(header["samples"]), "tensors": tensors}
    if FORMATS[name].suffix == ".parquet":
        (row,) = pq.read_table(path).to_pylist()
        return {key: json.loads(value) if key in json_columns(name) else value for key, value in row.items()}
    return json.loads(path.read_text())


def save_row(name: str, row: Row, path: Path) -> bool:
    """False where the format itself cannot hold such values."""
    try:
        if name == "safetensors":
            types = {"token_ids": np.int32, "loss_mask": np.uint8, "rollout_logprobs": np.float64, "offsets": np.int64}
            tensors = {key: as_tensor(value, types[key]) for key, value in row.get("tensors", {}).items()}
            header = {"format": row.get("format"), "samples": json.dumps(row["samples"]) if "samples" in row else None}
            save_file(tensors, path, metadata={key: value for key, value in header.items() if value is not None})
        elif FORMATS[name].suffix == ".parquet":
            flat = {key: json.dumps(value) if key in json_columns(name) else value for key, value in row.items()}
            pq.write_table(pa.Table.from_pylist([flat]), path)
        else:
            path.write_text(json.dumps(row))
    except (
        pa.ArrowException,
        SafetensorError,
        OverflowError,
        TypeError,
        ValueError,
        AttributeError,
    ):  # UnicodeEncodeError among them
        return False
    return True


def as_tensor(value: Any, dtype: Any) -> Any:
    """Of the column's own type where that changes no value."""
    with suppress(OverflowError, TypeError, ValueError):
        made = np.array(value, dtype=dtype)
        if json.dumps(made.tolist()) == json.dumps(value):
            return made
    return np.array(value)


def paths_in(value: Any, before: PathInRow = ()) -> Iterator[PathInRow]:
    """Every place in a tree; of a list its first entry, and the middle and last one where they are numbers or texts."""
    if before:
        yield before
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths_in(item, (*before, key))
    elif isinstance(value, list):
        kept = [0] if value and isinstance(value[0], (dict, list)) else sorted({0, len(value) // 2, len(value) - 1})
        for index in kept if value else []:
            yield from paths_in(value[index], (*before, index))


def values_instead(value: Any) -> Iterator[Any]:
    """Another value of the same type, and values of wrong types."""
    if isinstance(value, str):
        yield from (f"{value}x", f"z{value[1:]}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value + 1 if isinstance(value, int) else -0.5 if value != value else value - 0.25
    elif isinstance(value, bool):
        yield not value
    yield from (wrong for wrong in WRONG if type(wrong) is not type(value) or wrong != value)


def mutations(row: Row) -> Iterator[tuple[str, Callable[[Row], None]]]:
    """(name of the place, the change)."""

    def put(path: PathInRow, value: Any) -> Callable[[Row], None]:
        return lambda changed: parent_of(changed, path).__setitem__(path[-1], value)

    def remove(path: PathInRow) -> Callable[[Row], None]:
        return lambda changed: parent_of(changed, path).__delitem__(path[-1])

    for path in paths_in(row):
        name = ".".join(key for key in path if isinstance(key, str)).removeprefix("tokentrue.").removeprefix("samples.")
        for value in values_instead(follow(row, path)):
            yield name, put(path, value)
        yield f"{name} (removed)", remove(path)


def follow(row: Any, path: PathInRow) -> Any:
    for key in path:
        row = row[key]
    return row


def parent_of(row: Row, path: PathInRow) -> Any:
    return follow(row, path[:-1])


def passes(path: Path) -> bool:
    """As `tokentrue audit` reads it. Any other error than a typed one fails the test."""
    try:
        rows = list(read_exported(path))
    except FileFormatError:
        return False
    return bool(rows) and audit_exported(rows).ok


@pytest.mark.parametrize("name", slow_except({"jsonl"}, FORMATS))
async def test_no_change_to_a_row_passes(sample: Sample, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"s{FORMATS[name].suffix}"
    write_samples([sample], path, format=name)
    row = load_row(name, path)
    assert save_row(name, row, path) and passes(path), "the row that was not changed"
    missed, tried = set[str](), 0
    # A table takes long to write; `make test` tries every ninth change.
    step = (2 if FORMATS[name].suffix == ".parquet" else 1) if IS_THOROUGH else 9
    for place, change in islice(mutations(row), 0, None, step):
        changed = copy.deepcopy(row)
        change(changed)
        if save_row(name, changed, path):
            tried += 1
            if passes(path):
                missed.add(place)
    assert missed <= UNBOUND.keys(), missed - UNBOUND.keys()
    assert tried > 900 / step / 3


@pytest.mark.parametrize("name", ["jsonl", "parquet", "safetensors"])
async def test_recorded_top_logprobs_cannot_be_removed(sample: Sample, name: str, tmp_path: Path) -> None:
    """`UNBOUND` lets the column be missing where it is null."""
    tops = TopLogprobs.from_tops([({} if value is None else {1: -0.5}, 1) for value in sample.rollout_logprobs])
    path = tmp_path / f"s{FORMATS[name].suffix}"
    write_samples([sealed(replace(sample, top_logprobs=tops))], path, format=name)
    row = load_row(name, path)
    assert save_row(name, row, path) and passes(path), "the row that was not changed"
    held = row["samples"][0] if name == "safetensors" else row
    del held["top_logprobs"]
    assert save_row(name, row, path) and not passes(path)


COLUMNS = {  # of a trainer's row: what a sample is read back from, and what the format is recognised by
    "verl": {"prompt_ids", "response_ids", "response_mask", "response_logprobs"},
    "trl": {"prompt_ids", "completion_ids", "env_mask", "logprobs"},
    "slime": {"tokens", "response_length", "loss_mask", "rollout_log_probs"},
    "prime-rl": {"token_ids", "mask", "logprobs"},
    "tinker": {"model_input", "loss_fn_inputs"},
}


@pytest.mark.parametrize("name", TRAINERS)
async def test_each_field_of_a_trainers_row_is_a_finding_that_names_it(
    sample: Sample, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"s{FORMATS[name].suffix}"
    write_samples([sample], path, format=name)
    row = load_row(name, path)
    for field in [key for key in row if key not in {"tokentrue", *COLUMNS[name]} and row[key] is not None]:
        assert save_row(name, {key: value for key, value in row.items() if key != field}, path)
        assert run("audit", [str(path)]) == 1
        assert f"the trainer's row: {field} is missing" in capsys.readouterr().out
        with pytest.raises(AuditError, match=f"{field} is missing"):
            read_sound_samples(path)
        with pytest.raises(AuditError, match=f"row 0: {field} is missing|:1: {field} is missing"):
            list(read_samples(path))
    assert save_row(name, {**row, "more": 1}, path)
    assert run("audit", [str(path)]) == 1
    assert "more is not a field of this export" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "said"), [
    (lambda row: row.update(response_length=2**64 - 1), "response_length is 18446744073709551615"),
    (lambda row: row["metadata"].update(policy_versions=list(map(float, row["metadata"]["policy_versions"]))), "policy_versions"),
])  # fmt: skip
async def test_whole_numbers_of_a_slime_row_stay_whole_and_small(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Row], None], said: str
) -> None:
    path = tmp_path / "s.jsonl"
    write_samples([sample], path, format="slime")
    row = load_row("slime", path)
    change(row)
    assert save_row("slime", row, path)
    assert run("audit", [str(path)]) in (1, 2)
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize("span", [0, 1])
@pytest.mark.parametrize("name", ["trl", "slime", "prime-rl", "tinker"])
async def test_a_span_that_starts_beyond_all_indices_is_an_audits_finding(
    sample: Sample, name: str, span: int, tmp_path: Path
) -> None:
    path = tmp_path / "s.jsonl"
    write_samples([sample], path, format=name)
    row = load_row(name, path)
    row["tokentrue"]["spans"][span]["start"] = 2**64 - 1
    assert save_row(name, row, path) and not passes(path)


async def test_a_column_that_stands_twice_is_refused(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.parquet"
    write_samples([sample], path, format="verl")
    table = pq.read_table(path)
    name = table.column_names[0]
    pq.write_table(table.append_column(name, table.column(name)), path)
    assert run("audit", [str(path)]) == 2
    assert f"column '{name}' is there twice" in capsys.readouterr().err


async def test_advantages_may_be_added_to_a_tinker_row(sample: Sample, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    write_samples([sample], path, format="tinker")
    row = load_row("tinker", path)
    row["loss_fn_inputs"]["advantages"] = {"data": [0.5], "dtype": "float32", "shape": [1]}
    assert save_row("tinker", row, path) and passes(path)


@pytest.mark.parametrize(("field", "value", "said"), [
    ("loss_mask", -1, "$.loss_mask"),
    ("reward", "x", "$.reward"),
    ("images", {}, "$.images"),
    ("images", False, "$.images"),
    ("certificate", {"chain": "", "template": None, "tokenizer": ""}, "$.certificate.template"),
])  # fmt: skip
async def test_a_damaged_row_is_named_with_its_field(
    sample: Sample, field: str, value: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples([sample], tmp_path / "s.jsonl")
    row = load_row("jsonl", tmp_path / "s.jsonl")
    row[field] = [value, *row[field][1:]] if isinstance(row.get(field), list) else value
    save_row("jsonl", row, tmp_path / "s.jsonl")
    assert run("audit", [str(tmp_path / "s.jsonl")]) == 2
    error = capsys.readouterr().err
    assert "s.jsonl:1: " in error and said in error and error.count("\n") == 1


async def test_names_that_utf8_cannot_hold_are_printed_escaped(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples([replace(sample, sample_id="s\ud800", reward=9.0)], tmp_path / "s.jsonl")
    assert run("audit", [str(tmp_path / "s.jsonl")]) == 1
    assert "s\\ud800" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["jsonl", "slime"])
async def test_values_that_are_nested_too_deeply_are_a_finding(
    sample: Sample, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.jsonl"
    write_samples([sample], path, format=name)
    row = load_row(name, path)
    own, field = (row["metadata"]["tokentrue"], "more") if name == "jsonl" else (row, "status")
    own[field] = "deep"
    path.write_text(json.dumps(row).replace('"deep"', "[" * 1000 + "]" * 1000))
    assert run("audit", [str(path)]) == 1
    assert ("nested too deeply" if name == "jsonl" else "status is [[[") in capsys.readouterr().out


@pytest.mark.parametrize("name", ["jsonl", "parquet", "safetensors", "verl"])
@pytest.mark.parametrize("seed", slow_but_every(4, range(4)))
async def test_changed_bytes_never_raise_anything_but_a_typed_error(
    sample: Sample, name: str, seed: int, tmp_path: Path
) -> None:
    path = tmp_path / f"s{FORMATS[name].suffix}"
    write_samples([sample], path, format=name)
    whole, draw = path.read_bytes(), np.random.default_rng(seed)
    for _ in range(40):
        changed = bytearray(whole)
        changed[int(draw.integers(len(whole)))] ^= 1 << int(draw.integers(8))
        path.write_bytes(changed)
        passes(path)
