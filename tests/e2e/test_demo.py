"""The demo, short: HTTP, streaming, exact engine, samples, GRPO; twice with one seed for equal bits. The full promise
is `make demo`."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tokentrue.cli.demo import DemoResult, run
from tokentrue.samples import audit, read_samples

pytestmark = pytest.mark.timeout(280)


def demo(out: Path, *, steps: int) -> DemoResult:
    return asyncio.run(run(seed=3, steps=steps, tasks=2, heldout=8, out=out, quiet=True))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, Path]:
    out = tmp_path_factory.mktemp("demo")
    return demo(out, steps=2), out


def test_every_token_is_covered_and_no_bit_differs(first: tuple[DemoResult, Path]) -> None:
    result, _ = first
    assert result.failed == 0 and result.rollouts == 2 * 2 * 8
    assert result.sampled == result.trained == result.compared > 1000
    assert result.differing == 0


def test_what_it_leaves_behind_can_be_checked_by_others(first: tuple[DemoResult, Path]) -> None:
    result, out = first
    samples = list(read_samples(out / "samples.jsonl"))
    assert len(samples) == result.rollouts
    report = audit(samples)
    assert not report.findings, report.findings[:3]
    page = (out / "report.html").read_text()
    assert "100.00%" in page and "Reward by step" in page
    assert samples[-1].session_id in page, "rollouts to read"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy_version"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_over_http_whatever_the_timing(
    first: tuple[DemoResult, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run is jostled: every turn of every agent waits a random while, so that other requests meet in other
    batches."""
    from tokentrue.environments import chat

    plain = chat.ask

    async def jostled(*args: Any, **options: Any) -> dict[str, Any]:
        await asyncio.sleep(random.random() * 0.2)
        return await plain(*args, **options)

    monkeypatch.setattr(chat, "ask", jostled)
    _, out = first
    demo(tmp_path, steps=2)

    def trace(folder: Path) -> list[tuple[object, ...]]:
        return [
            (s.group, tuple(s.token_ids), tuple(s.rollout_logprobs), s.reward)
            for s in read_samples(folder / "samples.jsonl")
        ]

    assert trace(out) == trace(tmp_path)

    def numbers(folder: Path) -> list[dict[str, object]]:
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in row.items() if not key.startswith("seconds/")} for row in rows]

    assert numbers(out) == numbers(tmp_path)
