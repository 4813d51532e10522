"""Bits, not closeness: whatever the schedule, every recorded log-probability is the trainer's, and every token is the
request's own."""

from __future__ import annotations

import pytest

from tests.engine.world import alone, build, judge, random_run
from tests.marks import IS_THOROUGH, slow_except

REQUIRED = ["qwen3", "llama", "qwen2", "qwen3_moe"]
FURTHER = [
    "mistral",
    "gemma3",
    "mixtral",
    "smollm3",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5",
    "gpt_oss",
    "deepseek_v3",
    "olmo3",
    "granite",
]


def check(kind: str, dtype: str, seed: int, tokens: int, replays: int) -> int:
    model = build(kind)
    run = random_run(model, dtype, seed, tokens=tokens)
    scheduler = run.engine.core.scheduler
    assert run.stats["loads"] == 2 and run.stats["forced"] > 0, run.stats
    assert scheduler.prefix_hits > 0 and run.stats["mixed"] > run.stats["steps"] // 2
    compared, different, first = judge(run)
    assert compared == run.tokens >= tokens
    assert different == 0, f"{different} of {compared} log-probabilities differ: {first}"
    crossed = [r for r in run.finished if len(set(r.versions)) > 1]
    chosen = [*crossed[:2], *(r for r in run.finished if r.num_sampled and r not in crossed)][:replays]
    for request in chosen:
        assert alone(run, model, dtype, request) == request.sampled_ids, f"request {request.number} alone"
    run.engine.close()
    return compared


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_except(
        {"qwen3-float32", "qwen3_moe-bfloat16"},
        [(kind, dtype) for kind in REQUIRED for dtype in ("float32", "bfloat16")],
        name="-".join,
    ),
)
def test_random_schedule(kind: str, dtype: str) -> None:
    check(kind, dtype, seed=REQUIRED.index(kind), tokens=300 if IS_THOROUGH else 150, replays=2)


@pytest.mark.parametrize("kind", slow_except({"qwen3_next"}, FURTHER))
def test_random_schedule_of_further_families(kind: str) -> None:
    dtype = "bfloat16" if kind in {"gemma3", "qwen3_5", "olmo3", "gpt_oss"} else "float32"
    check(kind, dtype, seed=7, tokens=200 if IS_THOROUGH else 100, replays=2)


@pytest.mark.parametrize("kind", slow_except({"qwen3"}, ["qwen3", "qwen3_moe"]))
def test_random_schedule_in_float16(kind: str) -> None:
    check(kind, "float16", seed=11, tokens=200, replays=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", REQUIRED + FURTHER)
def test_many_random_schedules(kind: str, dtype: str) -> None:
    assert sum(check(kind, dtype, seed=100 + i, tokens=1500, replays=6) for i in range(3)) >= 4500
