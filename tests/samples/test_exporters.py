"""Every format carries the same sample: written and read back it is equal to the last bit, and the trainer's own
columns are audited."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.samples.test_audit import forest
from tokentrue.cli.main import run
from tokentrue.errors import FileFormatError
from tokentrue.samples import audit, export_bytes, read_samples, write_samples
from tokentrue.samples.files import recognise_format
from tokentrue.samples.formats import FORMATS
from tokentrue.types import RoutedExperts, Sample


@pytest.fixture
async def samples() -> list[Sample]:
    return (await forest()).samples()


@pytest.mark.parametrize("name", FORMATS)
async def test_a_sample_survives_any_format(samples: list[Sample], name: str, tmp_path: Path) -> None:
    samples[0] = replace(
        samples[0], routed_experts=RoutedExperts(shape=(3, 2, 1), data=bytes(range(12))), reward=None, group=None
    )
    path = tmp_path / f"s{FORMATS[name].suffix}"
    assert write_samples(samples, path, format=name) == len(samples)
    assert recognise_format(path) == name
    assert list(read_samples(path)) == samples
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "no scratch file is left behind"


@pytest.mark.parametrize("name", FORMATS)
async def test_any_format_can_be_audited(samples: list[Sample], name: str, tmp_path: Path) -> None:
    write_samples(samples, tmp_path / "s", format=name)
    assert audit(read_samples(tmp_path / "s")).findings == []
    broken = [
        replace(sample, token_ids=[*sample.token_ids[:40], sample.token_ids[40] + 1, *sample.token_ids[41:]])
        for sample in samples
    ]
    write_samples(broken, tmp_path / "b", format=name)
    assert len(audit(read_samples(tmp_path / "b")).findings) >= len(samples)


def lines(path: Path) -> list[Any]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def aligned(prompt: list[int], response: list[int], mask: list[int], logprobs: list[float], sample: Sample) -> None:
    """Prompt and response are the sequence, cut where the first token was sampled; mask and log-probabilities lie on
    the response."""
    assert prompt + response == list(sample.token_ids)
    start = len(prompt)
    assert sample.rollout_logprobs[start] is not None and set(sample.rollout_logprobs[:start]) == {None}
    assert mask == list(sample.loss_mask[start:])
    for got, value in zip(logprobs, sample.rollout_logprobs[start:], strict=True):
        assert got == (0.0 if value is None else value)


async def test_trl_rows(samples: list[Sample], tmp_path: Path) -> None:
    write_samples(samples, tmp_path / "s", format="trl")
    for row, sample in zip(lines(tmp_path / "s"), samples, strict=True):
        aligned(row["prompt_ids"], row["completion_ids"], row["env_mask"], row["logprobs"], sample)


async def test_slime_rows(samples: list[Sample], tmp_path: Path) -> None:
    write_samples(samples, tmp_path / "s", format="slime")
    for row, sample in zip(lines(tmp_path / "s"), samples, strict=True):
        at = len(row["tokens"]) - row["response_length"]
        aligned(row["tokens"][:at], row["tokens"][at:], row["loss_mask"], row["rollout_log_probs"], sample)
        assert row["status"] == "completed" and row["weight_versions"] == ["7"] and row["reward"] == 1.0


async def test_verl_rows(samples: list[Sample], tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_samples(samples, tmp_path / "s", format="verl")
    for row, sample in zip(pq.read_table(tmp_path / "s").to_pylist(), samples, strict=True):
        aligned(row["prompt_ids"], row["response_ids"], row["response_mask"], row["response_logprobs"], sample)
        assert row["uid"] == "g" and row["reward_score"] == 1.0


async def test_prime_rl_rows(samples: list[Sample], tmp_path: Path) -> None:
    write_samples(samples, tmp_path / "s", format="prime-rl")
    for row, sample in zip(lines(tmp_path / "s"), samples, strict=True):
        length = len(sample.token_ids)
        assert [len(row[name]) for name in ("token_ids", "mask", "logprobs", "temperatures")] == [length] * 4
        assert row["mask"] == [bool(bit) for bit in sample.loss_mask]


async def test_tinker_rows(samples: list[Sample], tmp_path: Path) -> None:
    write_samples(samples, tmp_path / "s", format="tinker")
    for row, sample in zip(lines(tmp_path / "s"), samples, strict=True):
        inputs = row["loss_fn_inputs"]
        shown = row["model_input"]["chunks"][0]["tokens"]
        assert shown == list(sample.token_ids[:-1]) and inputs["target_tokens"]["data"] == list(sample.token_ids[1:])
        assert inputs["mask"]["data"] == [float(bit) for bit in sample.loss_mask[1:]]
        assert inputs["logprobs"]["shape"] == [len(shown)]


async def test_an_unknown_format_is_named(samples: list[Sample], tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no format 'csv'"):
        write_samples(samples, tmp_path / "s", format="csv")
    with pytest.raises(FileFormatError, match="cannot write"):
        write_samples(samples, tmp_path / "no" / "folder", format="jsonl")


@pytest.mark.parametrize("start", [b"PAR1garbage", (8).to_bytes(8, "little") + b"{}      ", b"{", b"[1]\n"])
def test_a_damaged_file_is_one_clear_error(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(start)
    with pytest.raises(FileFormatError):
        list(read_samples(tmp_path / "s"))


async def test_the_command_exports_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tokentrue as tt
    from tests.turn.letters import Letters, sampled
    from tests.turn.world import Engine
    from tokentrue.sessions import Journal

    journal = Journal(tmp_path / "j.db")
    for group in "ab":
        session = tt.Session(renderer=Letters(), provider=Engine([sampled("r", "c")] * 2), journal=journal, group=group)
        await session.chat([{"role": "user", "content": "hi"}])
        await session.chat([{"role": "user", "content": "hi"}])
    journal.close()
    out = tmp_path / "out.parquet"
    assert run("samples", [f"sqlite:{tmp_path / 'j.db'}", "-o", str(out), "--format", "parquet", "--json"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert (report["samples"], report["sessions"], report["coverage"], report["untrained"]) == (
        2,
        2,
        0.5,
        {"retried": 8},
    )
    assert run("audit", [str(out)]) == 0
    assert run("samples", [str(tmp_path / "j.db"), "-o", str(out), "--group", "a", "--abandoned"]) == 0
    assert len(list(read_samples(out))) == 2
    assert run("samples", [str(tmp_path / "j.db"), "-o", str(out), "--session", "nobody"]) == 2
    assert run("samples", [str(tmp_path / "none.db"), "-o", str(out)]) == 2
    assert run("samples", [str(tmp_path / "j.db"), "-o", str(out), "--format", "csv"]) == 2
    assert run("samples", ["http://127.0.0.1:9", "-o", str(out)]) == 2
    assert "is `tokentrue serve` running?" in capsys.readouterr().err


@pytest.mark.parametrize("name", FORMATS)
async def test_a_file_may_be_made_in_memory(samples: list[Sample], name: str, tmp_path: Path) -> None:
    content, media_type = export_bytes(samples, format=name)
    (tmp_path / "s").write_bytes(content)
    assert list(read_samples(tmp_path / "s")) == samples and "/" in media_type


def test_an_empty_file_is_not_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples([], tmp_path / "s")
    assert run("audit", [str(tmp_path / "s")]) == 1
    assert "no sample" in capsys.readouterr().out
