"""The proof at load: this engine's forward over pages equals the model's own forward, bit for bit, on prefill, chunk and decode."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokentrue.engine.model.adapters import Adapter, attach_adapter
from tokentrue.engine.scheduling.request import Request
from tokentrue.engine.scheduling.schedule import Work
from tokentrue.engine.trace import Difference, engine_trace, first_difference, model_trace
from tokentrue.errors import ExactnessError
from tokentrue.numerics import logits_of, same_bits
from tokentrue.types import Sampling

if TYPE_CHECKING:
    from tokentrue.engine.core import Core

LENGTH = 141  # past one block of 128 keys
PIECES = (77, 61, 1, 1, 1)


def prove(core: Core) -> None:
    """Raise ExactnessError with the first position that differs."""
    decoder = core.forward.decoder
    length = min(LENGTH, core.capacity)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, decoder.vocabulary, (length,), generator=generator)
    with torch.inference_mode():
        wanted = logits_of(core.model, ids[None].to(core.forward.device))[0]
        found = paged_logits(core, ids.tolist())
    if not same_bits(found, wanted):
        where = compare(core, ids.tolist())
        raise ExactnessError(f"{type(core.model).__name__} has a part without an exact form; {where}")


def prove_adapter(core: Core, adapter: Adapter) -> None:
    """The same with an adapter, against the model's own forward with that adapter attached."""
    length = min(LENGTH, core.capacity)
    ids = torch.randint(0, core.forward.decoder.vocabulary, (length,), generator=torch.Generator().manual_seed(6))
    core.free_blocks(length)
    with torch.inference_mode():
        with attach_adapter(core.model, core.forward.ops, adapter):
            wanted = logits_of(core.model, ids[None].to(core.forward.device))[0]
        found = paged_logits(core, ids.tolist(), adapter=adapter)
    if not same_bits(found, wanted):
        raise ExactnessError(f"adapter {adapter.name!r}: engine and trainer forwards differ in bits")


def compare(core: Core, ids: list[int], model: Any = None, pieces: tuple[int, ...] = PIECES) -> Difference | None:
    """The first operator whose bits differ between pages and the forward of `model` (the engine's own, unless given), over these ids."""
    with engine_trace(core) as engine:
        paged_logits(core, ids, pieces)
    return first_difference(engine, model_trace(model or core.model, ids))


def paged_logits(core: Core, ids: list[int], pieces: tuple[int, ...] = PIECES, adapter: Adapter | None = None) -> Tensor:
    """Logits of every position, computed piece by piece (again from the first when they run out) through the pages."""
    name = None if adapter is None else adapter.name
    request = Request(prompt_ids=tuple(ids), sampling=Sampling(), seed=0, stop_ids=frozenset(), max_tokens=1, adapter=name)
    adapters = {} if adapter is None else {adapter.name: adapter}
    core.scheduler.grow(request, len(ids))
    rows, start = [], 0
    for piece in itertools.cycle(pieces):
        count = min(piece, len(ids) - start)
        if count == 0:
            break
        rows.append(core.forward.step([Work(request, start, count)], range(count), adapters))
        start += count
    core.scheduler.free(request)
    return torch.cat(rows)
