"""One flipped token, mask bit or log-probability is found, and located in its turn. Each mutation here is a way that
data goes bad in real life."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.cli.main import run
from tokentrue.errors import FileFormatError
from tokentrue.samples import audit, read_samples, sample_from_json, sample_to_json, write_samples
from tokentrue.types import Sample, TurnRequest

USER = {"role": "user", "content": "go on"}


async def forest() -> tt.Session:
    """Two branches that share two turns, a retried turn, a second conversation; 12 nodes."""
    session = tt.Session(
        renderer=Letters(), provider=Engine(sampled(f"r{i}", f"content number {i} " * 9) for i in range(99)), group="g"
    )
    history: list[Any] = [{"role": "user", "content": "hi"}]
    for turn in range(5):
        reply = await session.chat(history)
        if turn == 1:
            other = [*history, reply.message, {"role": "user", "content": "otherwise"}]
        if turn == 2:
            reply = await session.chat(history)
        history = [*history, reply.message, USER]
    await session.chat(other)
    await session.turn(TurnRequest(messages=[{"role": "user", "content": "another"}], n=3))
    await session.reward(1.0)
    return session


@pytest.fixture
async def rows() -> list[dict[str, Any]]:
    return [sample_to_json(sample) for sample in (await forest()).samples()]


def findings(rows: list[dict[str, Any]]) -> list[Any]:
    return audit(sample_from_json(row) for row in json.loads(json.dumps(rows))).findings


async def test_what_was_exported_holds(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 5 and findings(rows) == []


def sampled_at(row: dict[str, Any], nth: int = 0) -> int:
    return [i for i, value in enumerate(row["rollout_logprobs"]) if value is not None][nth]


def next_double(value: float) -> float:
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return struct.unpack("<d", struct.pack("<q", bits - 1))[0]


def flip_sampled(rows: Any) -> tuple[int, int]:
    at = sampled_at(rows[0], 130)
    rows[0]["token_ids"][at] += 1
    return 0, at


def flip_given(rows: Any) -> tuple[int, int]:
    rows[0]["token_ids"][2] += 1
    return 0, 2


def flip_logprob(rows: Any) -> tuple[int, int]:
    at = sampled_at(rows[0], 200)
    rows[0]["rollout_logprobs"][at] = next_double(rows[0]["rollout_logprobs"][at])
    return 0, at


def round_logprobs(rows: Any) -> tuple[int, int]:
    rows[1]["rollout_logprobs"] = [None if v is None else round(v, 4) for v in rows[1]["rollout_logprobs"]]
    return 1, sampled_at(rows[1])


def flip_mask_off(rows: Any) -> tuple[int, int]:
    at = sampled_at(rows[0], 5)
    rows[0]["loss_mask"][at] = 0
    return 0, at


def flip_mask_on(rows: Any) -> tuple[int, int]:
    rows[0]["loss_mask"][1] = 1
    return 0, 1


def swap_tokens(rows: Any) -> tuple[int, int]:
    at = sampled_at(rows[0], 3)
    ids = rows[0]["token_ids"]
    ids[at], ids[at + 1] = ids[at + 1], ids[at]
    return 0, at


def fill_given(rows: Any) -> tuple[int, int]:
    rows[0]["rollout_logprobs"][0] = 0.0
    return 0, 0


def drop_logprob(rows: Any) -> tuple[int, int]:
    at = sampled_at(rows[0], 7)
    rows[0]["rollout_logprobs"][at] = None
    return 0, at


def impossible_logprob(rows: Any) -> tuple[int, int]:
    at = sampled_at(rows[0], 7)
    rows[0]["rollout_logprobs"][at] = 0.5
    return 0, at


LOCATED: list[Callable[[Any], tuple[int, int]]] = [
    flip_sampled, flip_given, flip_logprob, round_logprobs, flip_mask_off, flip_mask_on, swap_tokens, fill_given,
    drop_logprob, impossible_logprob,
]  # fmt: skip


@pytest.mark.parametrize("mutate", LOCATED, ids=lambda m: m.__name__)
async def test_it_is_found_and_located(rows: list[dict[str, Any]], mutate: Callable[[Any], tuple[int, int]]) -> None:
    broken = copy.deepcopy(rows)
    number, at = mutate(broken)
    placed = [f for f in findings(broken) if f.sample == rows[number]["sample_id"] and f.start is not None]
    turn = next(span["turn"] for span in rows[number]["spans"] if span["start"] <= at < span["end"])
    within = [span for span in rows[number]["spans"] if span["turn"] == turn]
    start, end = min(span["start"] for span in within), max(span["end"] for span in within)
    assert any(start <= f.start <= at < f.end <= end for f in placed), placed


def retrain_shared(rows: Any) -> None:
    """A shared span made trainable in the second sample too, its span with it."""
    row = next(row for row in rows if any(span["why"] == "trained_elsewhere" for span in row["spans"]))
    for span in row["spans"]:
        if span["why"] == "trained_elsewhere":
            span.update(trainable=True, why="sampled")
            row["loss_mask"][span["start"] : span["end"]] = [1] * (span["end"] - span["start"])


def other_version(rows: Any) -> None:
    for span in rows[0]["spans"]:
        if span["kind"] == "sampled":
            span["policy_version"] += 1


def other_reward(rows: Any) -> None:
    rows[0]["reward"] = 0.0


def lose_a_sample(rows: Any) -> None:
    del rows[1]


def twice(rows: Any) -> None:
    rows.append(copy.deepcopy(rows[0]))


def other_chain(rows: Any) -> None:
    rows[0]["certificate"]["chain"] = rows[1]["certificate"]["chain"]


def other_template(rows: Any) -> None:
    rows[0]["certificate"]["template"] = "sha256:else"


def hide_tokens(rows: Any) -> None:
    for row in rows:
        row["metadata"]["tokentrue"]["coverage"]["untrained"] = []


def cut_the_end(rows: Any) -> None:
    for name in ("token_ids", "loss_mask", "rollout_logprobs"):
        rows[0][name].pop()


def shift_spans(rows: Any) -> None:
    rows[0]["spans"][0]["end"] += 1
    rows[0]["spans"][1]["start"] += 1


def no_evidence(rows: Any) -> None:
    del rows[0]["metadata"]["tokentrue"]


FOUND: list[Callable[[Any], None]] = [
    retrain_shared, other_version, other_reward, lose_a_sample, twice, other_chain, other_template, hide_tokens,
    cut_the_end, shift_spans, no_evidence,
]  # fmt: skip


@pytest.mark.parametrize("mutate", FOUND, ids=lambda m: m.__name__)
async def test_it_is_found(rows: list[dict[str, Any]], mutate: Callable[[Any], None]) -> None:
    broken = copy.deepcopy(rows)
    mutate(broken)
    assert findings(broken)


@pytest.mark.parametrize("seed", range(30))
async def test_any_single_change_to_a_column_is_found(rows: list[dict[str, Any]], seed: int) -> None:
    rng = random.Random(seed)
    broken = copy.deepcopy(rows)
    row = rng.choice(broken)
    column = rng.choice(["token_ids", "loss_mask", "rollout_logprobs"])
    at = rng.randrange(len(row["token_ids"]))
    value = row[column][at]
    row[column][at] = {"token_ids": value, "loss_mask": value}.get(
        column, -0.125 if value is None else next_double(value)
    )
    if column == "token_ids":
        row[column][at] = value ^ (1 << rng.randrange(17))
    elif column == "loss_mask":
        row[column][at] = 1 - value
    assert any(f.start is not None and f.start <= at < f.end for f in findings(broken))


async def test_the_command_says_where_and_exits_with_1(
    rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples: list[Sample] = [sample_from_json(row) for row in rows]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write_samples(samples, good)
    assert run("audit", [str(good)]) == 0
    assert "OK: verified" in capsys.readouterr().out
    number, at = flip_sampled(rows)
    bad.write_text("\n".join(json.dumps(row) for row in rows))
    assert run("audit", [str(bad), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    placed = [f for f in report["findings"] if f["sample"] == rows[number]["sample_id"] and f["start"] is not None]
    assert any(f["start"] <= at < f["end"] for f in placed)
    assert run("audit", [str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "text").write_text("hello world\n")
    assert run("audit", [str(tmp_path / "text")]) == 2
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    assert run("audit", [str(tmp_path / "other.jsonl")]) == 2


async def test_files_are_read_lazily(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    write_samples((sample_from_json(row) for row in rows), tmp_path / "a.jsonl")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("broken\n")
    iterator = read_samples(tmp_path / "a.jsonl")
    assert [next(iterator).sample_id for _ in rows] == [row["sample_id"] for row in rows]
    with pytest.raises(FileFormatError, match=r"a.jsonl:6: not JSON"):
        next(iterator)
