"""Ranks that share every layer: the bits of one process and of the trainer at every size, and negative controls.

Most ranks here are threads that run the code of the processes (`Rank`) and gather in memory; one engine has processes.
"""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.world import Run, build, clone_of, judge, nudged, random_run
from tests.marks import IS_THOROUGH
from tokentrue.engine import ExactEngine, processes
from tokentrue.engine.processes import Rank, Stage, StageFailed, StageProcess, StageSpec
from tokentrue.errors import ConfigError, EngineError, ExactnessError
from tokentrue.numerics import exact, leaves, same_bits, score
from tokentrue.numerics import ops as numerics_ops
from tokentrue.numerics.cpu import CpuOps
from tokentrue.numerics.ops import ExpertWeights, Ops, Ranks
from tokentrue.types import Sampling

SIZES = {
    "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 24,
    "num_experts": 8,
}  # fmt: skip
PROMPT = list(range(7, 60))
TOKENS = 120 if IS_THOROUGH else 30


def model_of(kind: str, **changes: Any) -> Any:
    return build(kind, **{**SIZES, **changes})


# ---- ranks as threads
class Meeting:
    """All ranks of an engine leave a tensor and take everyone's."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.left: list[Any] = [None] * size

    def gather(self, index: int, value: Tensor) -> list[Tensor]:
        self.left[index] = value.clone()
        self.barrier.wait(60)
        found = list(self.left)
        self.barrier.wait(60)
        return found


class ThreadRank(Rank):
    building = threading.Lock()
    meetings: dict[str, Meeting] = {}  # noqa: RUF012

    def _make_model(self) -> Any:
        with self.building:
            return super()._make_model()

    def _connect(self) -> None:
        spec = self._spec
        with self.building:
            meeting = self.meetings.setdefault(spec.rendezvous, Meeting(spec.stages))
        self._meet = lambda value: meeting.gather(spec.index, value)
        self._ops.ranks = Ranks(index=spec.index, size=spec.stages, gather=self._gather)

    def _gather(self, value: Tensor) -> list[Tensor]:
        return self._meet(value)


class ThreadProcess:
    """The part of `multiprocessing.Process` that the driver uses; the thread ends when its pipe is closed."""

    exitcode = None

    def __init__(self, spec: StageSpec, pipe: Any) -> None:
        self.sentinel, self._end = os.pipe()
        threading.Thread(target=self.run, args=(spec, pipe), daemon=True).start()

    def run(self, spec: StageSpec, pipe: Any) -> None:
        try:
            ThreadRank(spec, pipe).serve()
        except (EOFError, OSError):
            pass
        except Exception as error:
            pipe.send(StageFailed(f"{type(error).__name__}: {error}"))

    def terminate(self) -> None:
        os.close(self._end)
        os.close(self.sentinel)

    def join(self, seconds: float) -> None:
        pass

    def is_alive(self) -> bool:
        return False


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def start(kind: type[Stage], spec: StageSpec) -> StageProcess:
        assert kind is Rank
        here, there = multiprocessing.Pipe()
        return StageProcess(ThreadProcess(spec, there), here)

    monkeypatch.setattr(processes, "start_stage", start)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # each rank is a thread already
    yield
    torch.set_num_threads(before)


def shaken(model: Any, dtype: str, tensor: int, *, tokens: int = TOKENS, loads: int = 2, **options: Any) -> Run:
    run = random_run(model, dtype, 5, tokens=tokens, loads=loads, tensor=tensor, leaves=8, **options)
    run.engine.close()
    return run


def results(run: Run) -> list[tuple[Any, ...]]:
    return [(tuple(r.tokens), tuple(r.logprobs), tuple(r.versions)) for r in run.finished]


# ---- equal at every size
@pytest.mark.parametrize(
    ("kind", "dtype", "sizes"),
    [
        ("qwen3", "float32", (1, 2, 4)),
        pytest.param("qwen3_moe", "bfloat16", (1, 4), marks=pytest.mark.slow),
        pytest.param("llama", "bfloat16", (1, 2, 4, 8), marks=pytest.mark.slow),
        pytest.param("qwen3", "bfloat16", (1, 2, 4, 8), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "float32", (1, 2, 4, 8), marks=pytest.mark.slow),
        pytest.param("qwen3", "float16", (1, 8), marks=pytest.mark.slow),
    ],
)
def test_every_size_has_the_trainers_bits(kind: str, dtype: str, sizes: tuple[int, ...], threads: None) -> None:
    """Random schedules with prefix hits, preemptions, filters and weight updates: the same run at every size."""
    runs = [shaken(model_of(kind), dtype, size) for size in sizes]
    compared, different, first = judge(runs[-1])
    assert (compared, different) == (runs[-1].tokens, 0), first
    assert all(results(run) == results(runs[0]) for run in runs)
    assert len({run.engine.fingerprint for run in runs}) == 1
    assert runs[0].stats["loads"] == 2 and runs[0].engine.core.scheduler.prefix_hits > 0


def test_biases_of_products_are_added_once(threads: None) -> None:
    model = model_of("llama", attention_bias=True, mlp_bias=True, num_hidden_layers=1)
    assert judge(shaken(model, "bfloat16", 2, tokens=8, loads=0))[1] == 0


def test_leaves_change_the_bits_and_the_fingerprint_says_so() -> None:
    model, ids = model_of("qwen3"), torch.tensor([PROMPT])
    with torch.no_grad(), exact(model) as plain:
        without = score(model, ids)
    with torch.no_grad(), exact(model, leaves=8) as cut:
        assert not same_bits(score(model, ids), without)
        with (
            pytest.raises(ExactnessError, match="leaves=4 inside an exact block of this model with leaves=8"),
            exact(model, leaves=4),
        ):
            pass
    with exact(model, leaves=4) as other:
        assert len({plain.fingerprint, cut.fingerprint, other.fingerprint}) == 3
    assert "8 leaves" in cut.operators["row_linear"] and "row_linear" not in plain.operators
    with pytest.raises(ExactnessError, match="fingerprints differ"):
        plain.require(cut.fingerprint)


def test_the_tree_is_the_documented_one() -> None:
    """Against numpy: leaves whose sums depend on the order of additions, exact in themselves."""
    values = np.array([2**24, 1, 1, -(2**24), 3, 2**25, 1, -(2**25)], np.float32)

    def tree(part: np.ndarray) -> np.float32:
        half = len(part) // 2
        return part[0] if half == 0 else np.float32(tree(part[:half]) + tree(part[half:]))

    assert tree(values) not in (np.cumsum(values, dtype=np.float32)[-1], values.sum(dtype=np.float64))
    ops, x = CpuOps(), torch.ones(3, 64)
    ops.leaves = 8
    weight = torch.from_numpy(values).repeat_interleave(8)[None].repeat(20, 1) / 8
    for dtype in (torch.float32, torch.bfloat16):
        found = leaves.row_linear(ops, x.to(dtype), weight.to(dtype), torch.full((20,), 0.25, dtype=dtype))
        assert same_bits(found, torch.full((3, 20), float(tree(values)) + 0.25).to(dtype))


def test_gradients_are_those_without_leaves_up_to_rounding() -> None:
    model, ids = model_of("qwen3_moe"), torch.tensor([PROMPT])
    found = []
    for count in (1, 8):
        model.zero_grad()
        with exact(model, leaves=count):
            score(model, ids).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    for name, one in found[0].items():
        torch.testing.assert_close(one, found[1][name], rtol=1e-3, atol=1e-4)


# ---- negative controls: each must be found
def in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def another_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load refuses it; without that check the schedule finds it."""
    for module in (numerics_ops, leaves):
        monkeypatch.setattr(module, "join", in_order)
    with pytest.raises(ExactnessError, match="bits depend on rows or ranks"), exact(model_of("qwen3"), leaves=8):
        pass
    monkeypatch.setattr(import_module("tokentrue.numerics.exact"), "check_parts", lambda *_: None)


def rounded_before_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = ThreadRank._gather
    narrow = lambda self, value: [part.bfloat16().to(value.dtype) for part in gather(self, value)]  # noqa: E731
    monkeypatch.setattr(ThreadRank, "_gather", narrow)


def reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a ring reduces: each part of the tensor starts at another rank."""

    def ring(parts: Sequence[Tensor]) -> Tensor:
        size = len(parts)
        pieces = zip(*(part.chunk(size, -1) for part in parts), strict=True)
        return torch.cat([in_order([*own[i:], *own[:i]]) for i, own in enumerate(pieces)], -1)

    def sum_leaves(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if ops.ranks is None:
            return ops.leaf_product(x, weight, bias, ops.leaves)
        own = ops.leaf_product(x, weight, None, ops.leaves // ops.ranks.size, rounded=False)
        return numerics_ops.round_sum(ring(ops.ranks.gather(own)), bias, x.dtype)

    monkeypatch.setattr(leaves, "sum_leaves", sum_leaves)


def experts_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank adds the slots of its own experts, then the ranks' sums are added."""

    def run_experts(ops: Ops, x: Tensor, index: Tensor, weight: Tensor, experts: ExpertWeights) -> Tensor:
        if ops.ranks is None:
            return ops.experts(x, index, weight, experts)
        number = experts.gate_up.shape[0]
        own = index // number == ops.ranks.index
        rows = ops.expert_rows(x, torch.where(own, index % number, number), experts)
        return in_order(ops.ranks.gather(ops.add_slots(rows, weight * own)))

    monkeypatch.setattr("tokentrue.numerics.modules.run_experts", run_experts)


@pytest.mark.parametrize(
    ("kind", "control"),
    [("qwen3", another_tree), ("qwen3", rounded_before_joining), ("qwen3", reduced), ("qwen3_moe", experts_reduced)],
)
def test_a_wrong_join_is_found(
    kind: str, control: Callable[[pytest.MonkeyPatch], None], threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and its ranks agree with each other, so only the comparison with another size can find it."""
    control(monkeypatch)
    dtype, model = "bfloat16" if control is rounded_before_joining else "float32", model_of(kind, num_hidden_layers=1)
    assert judge(shaken(model, dtype, 4, tokens=8, loads=0))[1] > 0


# ---- refusals
@pytest.mark.parametrize("kind", ["gemma3", "mixtral", "qwen3_next", "gpt_oss", "deepseek_v3", "granite"])
def test_other_families_are_refused_by_name(kind: str) -> None:
    model = build(kind)
    with pytest.raises(ExactnessError, match=rf"{type(model).__name__} \(\w+\) has no form with leaves"):
        ExactEngine(model, tensor=2)
    with (
        pytest.raises(ExactnessError, match=rf"{type(model).__name__} \(\w+\) has no form with leaves"),
        exact(model, leaves=8),
    ):
        pass


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    model = model_of("qwen3")
    for options, said in (
        ({"tensor": 3}, "tensor=3: with leaves=8 choose one of 1, 2, 4, 8"),
        ({"tensor": 0}, "tensor=0: with leaves=8 choose one of"),
        ({"tensor": 16}, "tensor=16: with leaves=8 choose one of"),
        ({"tensor": 4, "leaves": 2}, "tensor=4: with leaves=2 choose one of 1, 2"),
        ({"leaves": 3}, "leaves=3: choose one of 1, 2, 4, 8"),
        ({"leaves": 0}, "leaves=0: choose one of"),
        ({"tensor": 2, "pipeline": 2}, "pipeline=2 and tensor=2: one of them must be 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            ExactEngine(model, **options)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has 6 attention heads, which 4 ranks cannot share"):
        ExactEngine(model_of("qwen3", num_attention_heads=6, num_key_value_heads=2, head_dim=32), tensor=4)
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM has 6 experts, which 4 ranks cannot share"):
        ExactEngine(model_of("qwen3_moe", num_experts=6), tensor=4)
    with pytest.raises(ExactnessError, match=r"leaves=8: model\.layers\.0\.mlp\.down_proj has 156 inputs"):
        ExactEngine(model_of("qwen3", intermediate_size=156), leaves=8)


# ---- processes
@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("qwen3_moe")


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[ExactEngine]:
    with ExactEngine(copy.deepcopy(model), tensor=2, max_len=400, kv_tokens=2000, version=1) as engine:
        yield engine


def trainer_bits(model: Any, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad(), exact(model, leaves=8):
        return score(model, torch.tensor([[*PROMPT, *tokens]]))[0, len(PROMPT) - 1 :]


async def test_one_process_and_two_ranks_answer_the_same(model: Any, engine: ExactEngine) -> None:
    """Tokens, log-probabilities, prompt log-probabilities, chosen experts and fingerprint."""
    extra = {"prompt_logprobs": True, "routed_experts": True}
    sampling = Sampling(max_tokens=25, seed=4, top_logprobs=2, repetition_penalty=1.1, extra=extra)
    with ExactEngine(copy.deepcopy(model), leaves=8, max_len=400, version=1) as one:
        wanted = await one.generate(PROMPT, sampling)
    assert await engine.generate(PROMPT, sampling) == wanted
    plain = await engine.generate(PROMPT, Sampling(max_tokens=20, seed=1))
    assert same_bits(torch.tensor(plain.logprobs), trainer_bits(model, plain.token_ids))


async def test_weights_reach_every_rank_and_adapters_are_refused(model: Any, engine: ExactEngine) -> None:
    new = nudged(clone_of(model), 5)
    engine.load_weights(iter(new.items()), version=2)
    found = await engine.generate(PROMPT, Sampling(max_tokens=20, seed=1))
    other = copy.deepcopy(model)
    other.load_state_dict(new)
    assert same_bits(torch.tensor(found.logprobs), trainer_bits(other, found.token_ids)) and engine.version == 2
    with pytest.raises(ExactnessError, match="adapters have no form with leaves or tensor parallelism"):
        engine.load_adapter("a", {}, config={"lora_alpha": 8})


async def test_a_rank_that_dies_is_an_error_and_not_a_hang(model: Any, engine: ExactEngine) -> None:
    """Last of the module: it ends the engine."""
    ranks = [stage.process for stage in engine.core.runner._stages]  # type: ignore[attr-defined]
    tasks = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=300, seed=i))) for i in range(4)]
    await asyncio.sleep(0.3)
    os.kill(ranks[random.Random(time.monotonic()).randrange(2)].pid, signal.SIGKILL)
    for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30):
        assert isinstance(result, EngineError)
        assert "tensor parallelism is down: rank" in str(result) and "died (exit code -9)" in str(result)
    with pytest.raises(EngineError, match="died"):
        engine.load_weights(clone_of(model), version=3)
    for rank in ranks:
        rank.join(10)
    assert not any(rank.is_alive() for rank in ranks)
