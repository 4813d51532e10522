"""Computes the core's steps in this process; `processes.Processes` does so in several."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokentrue.engine.adapters import Adapter, attach_adapter, check_adapter
from tokentrue.engine.decoder import MIXERS, Decoder, body_of
from tokentrue.engine.forward import Forward
from tokentrue.engine.graphs import PrefillGraphs
from tokentrue.engine.sample import SamplingRow, sample, sampling_row
from tokentrue.engine.schedule import Sampled, ScheduleLimits, StepInputs, Work
from tokentrue.engine.weights import Weights, load_weights
from tokentrue.errors import ExactnessError
from tokentrue.numerics import Contract, Ops, logits_of, logprobs_of, same_bits
from tokentrue.numerics.delta import GatedDelta
from tokentrue.records import record
from tokentrue.types import RoutedExperts


@record
class PromptRows:
    """Logits `first` .. `first + len(targets)` of the requested ones score these prompt tokens."""

    first: int
    targets: tuple[int, ...]
    temperature: float


class StepWants(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: token rows whose logits are needed; `sampling` indexes into them. `routing`: token rows (first, end) of
    each request that records its experts."""

    rows: list[int] = []
    sampling: list[tuple[int, SamplingRow]] = []
    scoring: list[PromptRows] = []
    routing: list[tuple[int, int]] = []


@record
class StepResult:
    """In the order of `StepWants`."""

    sampled: list[Sampled | Exception]
    scored: list[list[float]]
    routes: list[RoutedExperts]


def wants_of(batch: Sequence[Work]) -> StepWants:
    wants, start = StepWants(), 0
    for work in batch:
        request = work.request
        if request.wants_routes:
            # A preempted request computes positions again whose experts are kept already.
            known = max(0, request.num_routed - work.start)
            wants.routing.append((start + min(known, work.count), start + work.count))
        if scores_prompt(work):
            stop = min(work.start + work.count + 1, len(request.prompt_ids))
            targets, temperature = request.prompt_ids[work.start + 1 : stop], request.sampling.temperature or 1.0
            wants.scoring.append(PromptRows(first=len(wants.rows), targets=targets, temperature=temperature))
            wants.rows.extend(range(start, start + work.count))
        elif work.samples:
            wants.rows.append(start + work.count - 1)
        if work.samples:
            wants.sampling.append((len(wants.rows) - 1, sampling_row(request)))
        start += work.count
    return wants


def scores_prompt(work: Work) -> bool:
    return work.request.wants_prompt and work.start + 1 < len(work.request.prompt_ids)


def answer(forward: Forward, logits: Tensor, wants: StepWants) -> StepResult:
    """From the logits of the requested rows; the caller adds the experts."""
    scored, sampled = list[list[float]](), list[Sampled | Exception]()
    for part in wants.scoring:
        targets = torch.tensor(part.targets, device=logits.device)
        rows = logits[part.first : part.first + len(part.targets)]
        scored.append(logprobs_of(forward.ops, rows, targets, part.temperature).tolist())
    if wants.sampling:
        index = torch.tensor([at for at, _ in wants.sampling], device=logits.device)
        rows = logits if len(index) == logits.shape[0] else logits.index_select(0, index)
        sampled = sample(forward.ops, rows, [row for _, row in wants.sampling])
    return StepResult(sampled=sampled, scored=scored, routes=[])


def routes_from(experts: np.ndarray, weights: np.ndarray) -> RoutedExperts:
    rows, layers, top_k = experts.shape
    data, factors = experts.astype("<i2").tobytes(), weights.astype("<f4").tobytes()
    return RoutedExperts(shape=(rows, layers, top_k), data=data, weights=factors)


@record
class Sizes:
    vocabulary: int
    max_positions: int
    block_size: int
    num_blocks: int
    num_states: int | None  # recurrent-state slots of a hybrid model

    @classmethod
    def of(cls, decoder: Decoder, ops: Ops, *, num_blocks: int, limits: ScheduleLimits) -> Self:
        return cls(
            vocabulary=decoder.vocabulary, max_positions=decoder.max_positions, block_size=ops.block_size, num_blocks=num_blocks,
            num_states=states_for(decoder, limits),
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        return min(self.max_positions, (self.num_blocks - 1) * self.block_size)


class LocalRunner:
    """`dead`: why the runner can do no more."""

    dead: str | None = None

    def __init__(
        self, model: Any, decoder: Decoder, ops: Ops, contract: Contract, *, num_blocks: int, limits: ScheduleLimits
    ) -> None:
        self.model = model
        self.contract = contract
        self.sizes = Sizes.of(decoder, ops, num_blocks=num_blocks, limits=limits)
        self.forward = Forward(decoder, ops, num_blocks=num_blocks, num_states=self.sizes.num_states)
        self.captures = self.forward.device.type == "cuda"
        width = -(-self.sizes.capacity // ops.block_size)
        self.prefills = PrefillGraphs(self.forward, width=width) if self.captures else None

    def step(self, inputs: StepInputs, wants: StepWants) -> StepResult:
        forward = self.forward
        if wants.routing:
            with forward.routes() as chosen:
                result = answer(forward, forward.step(inputs, wants.rows), wants)
                return replace(result, routes=[routes_from(*chosen(*part)) for part in wants.routing])
        replayed = self.prefills.step(inputs, wants.rows) if self.prefills is not None else None
        logits = forward.step(inputs, wants.rows) if replayed is None else replayed
        return answer(forward, logits, wants)

    def prove(self, steps: Sequence[StepInputs]) -> None:
        prove(self.forward, self.model, steps)

    def load(self, weights: Weights) -> None:
        load_weights(self.model, weights)
        self.forward.refresh()

    def set_adapter(self, adapter: Adapter, proof_steps: Sequence[StepInputs]) -> None:
        """Raises unless the adapter fits the model and its products are exact here."""
        bank = self.forward.bank
        check_adapter(adapter, self.forward.decoder, self.forward.ops)
        before = bank.adapters.get(adapter.name)
        bank.set(adapter)
        try:
            prove(self.forward, self.model, proof_steps, adapter)
        except BaseException:
            if before is None:
                bank.remove(adapter.name)
            else:
                bank.set(before)
            raise

    def unload_adapter(self, name: str) -> None:
        self.forward.bank.remove(name)

    def clean(self) -> None:
        self.forward.clean()

    def close(self) -> None:
        if self.prefills is not None:
            self.prefills.forget()
        self.forward.caches.clear()
        self.forward.states = ()


def states_for(decoder: Decoder, limits: ScheduleLimits) -> int | None:
    """For hybrid models: a slot for every running request, and as many snapshots."""
    hybrid = any(isinstance(layer.mixer, GatedDelta) for layer in decoder.layers)
    return 2 * limits.max_requests + 2 if hybrid else None


# ---- the proof at load: the paged forward equals the model's own, bit for bit, on prefill, chunk and decode
PIECES = (77, 61, 1, 1, 1)


def prove(forward: Forward, model: Any, steps: Sequence[StepInputs], adapter: Adapter | None = None) -> None:
    """Raises ExactnessError with the first difference. `steps`: pieces of one sequence."""
    with torch.inference_mode():
        with nullcontext() if adapter is None else attach_adapter(model, forward.ops, adapter):
            wanted = model_logits(model, steps, forward.device)
        found = paged_logits(forward, steps)
    if same_bits(found, wanted):
        return
    if adapter is not None:
        raise ExactnessError(f"adapter {adapter.name!r}: engine and trainer forwards differ in bits")
    where = difference_of(forward, model, steps)
    raise ExactnessError(f"{type(model).__name__} has a part without an exact form; {where}")


def model_logits(model: Any, steps: Sequence[StepInputs], device: torch.device) -> Tensor:
    ids = [token for step in steps for token in step.ids]
    images = steps[0].images[0].seen(len(ids)) if steps[0].images and steps[0].images[0] is not None else None
    return logits_of(model, torch.tensor([ids], device=device), images=images)[0]


def paged_logits(forward: Forward, steps: Sequence[StepInputs]) -> Tensor:
    return torch.cat([forward.step(step, range(step.rows)) for step in steps])


@record
class Difference:
    """`operator`: `layers.2.attention`, `layers.2.mlp` or `logits`."""

    token: int
    operator: str
    engine: float
    trainer: float
    differing_tokens: int

    def __str__(self) -> str:
        values = f"engine {self.engine!r}, trainer {self.trainer!r} ({self.differing_tokens} tokens differ there)"
        return f"first difference: token {self.token}, operator {self.operator}: {values}"


def difference_of(forward: Forward, model: Any, steps: Sequence[StepInputs]) -> Difference | None:
    """Where the paged forward parts from the model's own (inside `exact` or not)."""
    engine: dict[str, Tensor] = {}
    trainer: dict[str, Tensor] = {}

    def collect(name: str, tensor: Tensor) -> None:
        engine[name] = torch.cat((engine[name], tensor)) if name in engine else tensor.clone()

    def keep(name: str, module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        trainer[name] = (output[0] if isinstance(output, tuple) else output)[0].clone()

    forward.trace = collect
    try:
        paged_logits(forward, steps)
    finally:
        forward.trace = None
    with ExitStack() as undo, torch.inference_mode():
        points = {"logits": model.get_output_embeddings()}
        for index, layer in enumerate(body_of(model).layers):
            for child, module in layer.named_children():
                if child in MIXERS or child == "mlp":
                    points[f"layers.{index}.{'mlp' if child == 'mlp' else 'attention'}"] = module
        for name, module in points.items():
            undo.callback(module.register_forward_hook(partial(keep, name)).remove)
        model_logits(model, steps, forward.device)
    for name, found in engine.items():
        wanted = trainer[name]
        differs = found.view(torch.uint8).ne(wanted.contiguous().view(torch.uint8)).any(-1)
        if bool(differs.any()):
            token = int(differs.nonzero()[0])
            unequal = (found[token] != wanted[token]).nonzero()
            at = int(unequal[0]) if len(unequal) else 0
            return Difference(
                token=token, operator=name, engine=float(found[token, at]), trainer=float(wanted[token, at]),
                differing_tokens=int(differs.sum()),
            )  # fmt: skip
    return None
