"""What computes the core's steps: this process (`LocalRunner`), or the stages of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tokentrue.engine.execute import StepResult, StepWants, execute
from tokentrue.engine.model.adapters import Adapter, check_products, check_shapes, linear_modules
from tokentrue.engine.model.decoder import Decoder
from tokentrue.engine.model.forward import Forward
from tokentrue.engine.model.step import StepInputs
from tokentrue.engine.model.weights import Weights, load_weights
from tokentrue.engine.proof import prove
from tokentrue.engine.scheduling.schedule import ScheduleLimits
from tokentrue.numerics import Contract, Ops
from tokentrue.numerics.delta import GatedDelta

if TYPE_CHECKING:
    from tokentrue.engine.scheduling.prefills import PrefillGraphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the scheduler must know of the model and its caches."""

    vocabulary: int
    max_positions: int
    block_size: int
    num_blocks: int
    num_states: int | None  # recurrent-state slots of a hybrid model


class Runner(Protocol):
    """Steps are finished in the order in which they were started; at most `depth` are in flight."""

    depth: int
    sizes: Sizes
    contract: Contract
    dead: str | None
    """Why no step can be computed any more, for good."""

    def start(self, inputs: StepInputs, wants: StepWants) -> None: ...
    def finish(self) -> StepResult: ...
    def prove(self, steps: Sequence[StepInputs]) -> None: ...
    def load(self, weights: Weights) -> None: ...
    def set_adapter(self, adapter: Adapter, proof_steps: Sequence[StepInputs]) -> None: ...
    def unload_adapter(self, name: str) -> None: ...
    def clean(self) -> None: ...
    def close(self) -> None: ...


class LocalRunner:
    """One process, one device."""

    depth = 1
    dead: str | None = None

    def __init__(
        self, model: Any, decoder: Decoder, ops: Ops, contract: Contract, *, num_blocks: int, limits: ScheduleLimits
    ) -> None:
        num_states = states_for(decoder, limits)
        self.model = model
        self.contract = contract
        self.forward = Forward(decoder, ops, num_blocks=num_blocks, num_states=num_states)
        self.sizes = Sizes(
            vocabulary=decoder.vocabulary, max_positions=decoder.max_positions, block_size=ops.block_size, num_blocks=num_blocks,
            num_states=num_states,
        )  # fmt: skip
        self.prefills = prefills_of(self.forward, self.sizes)
        self._results: deque[StepResult] = deque()

    def start(self, inputs: StepInputs, wants: StepWants) -> None:
        self._results.append(execute(self.forward, inputs, wants, self.prefills))

    def finish(self) -> StepResult:
        return self._results.popleft()

    def prove(self, steps: Sequence[StepInputs]) -> None:
        prove(self.forward, self.model, steps)

    def load(self, weights: Weights) -> None:
        load_weights(self.model, weights)
        self.forward.refresh()

    def set_adapter(self, adapter: Adapter, proof_steps: Sequence[StepInputs]) -> None:
        """Raises unless the adapter fits the model and its products are exact here."""
        check_adapter(adapter, self.model, self.forward)
        bank = self.forward.bank
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
        self.forward.recurrent.clear()


def check_adapter(adapter: Adapter, model: Any, forward: Forward, first: int = 0) -> None:
    check_shapes(adapter, forward.decoder, linear_modules(model), first)
    check_products(adapter, forward.ops)


def states_for(decoder: Decoder, limits: ScheduleLimits) -> int | None:
    """For hybrid models: a slot for every running request, and as many snapshots."""
    hybrid = any(isinstance(layer.mixer, GatedDelta) for layer in decoder.layers)
    return 2 * limits.max_requests + 2 if hybrid else None


def prefills_of(forward: Forward, sizes: Sizes) -> PrefillGraphs | None:
    """Captured prefills, on CUDA alone; recurrent states are not captured."""
    if forward.device.type != "cuda" or sizes.num_states is not None:
        return None
    from tokentrue.engine.scheduling.prefills import PrefillGraphs

    capacity = min(sizes.max_positions, (sizes.num_blocks - 1) * sizes.block_size)
    return PrefillGraphs(forward, width=-(-capacity // sizes.block_size))
