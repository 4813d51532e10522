"""Routing replay for mixture-of-experts models of transformers: record which experts each token took, and make a later pass take them.

R3: recorded at the rollout (`Completion.routed_experts`), replayed in the trainer. R2: recorded in the trainer's own pass for the old
policy, replayed in its updates. Only the choice is replayed: the experts' weights come from the current router, with gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tokentrue.errors import InputError
from tokentrue.types import RoutedExperts, Sample

FREE = -1
"""In a replay tensor: this token's experts are the router's own choice."""


def routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The top-k routers of a model, in the order of its layers."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Router") and isinstance(getattr(module, "top_k", None), int) and hasattr(module, "num_experts")
    ]
    if not found:
        raise InputError(f"{type(model).__name__} has no top-k router that can be recorded; is it a mixture of experts of transformers?")
    return found


@dataclass(slots=True, eq=False)
class RoutingRecord:
    """Filled while its `with` block runs."""

    layers: list[list[Tensor]] = field(default_factory=list[list[Tensor]])

    @property
    def experts(self) -> Tensor:
        """int16 `[tokens, layers, top_k]`; tokens in the order in which the model saw them, batch rows end to end."""
        if not self.layers or any(not calls for calls in self.layers):
            raise InputError("nothing was recorded: run the model inside the block")
        return torch.stack([torch.cat(calls) for calls in self.layers], dim=1).to(torch.int16)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Records every router's choice. Generate one sequence at a time: decoding steps of a batch are recorded step by step."""
    found = routers(model)
    record = RoutingRecord(layers=[[] for _ in found])
    handles = [router.register_forward_hook(_recorder(router, calls)) for (_, router), calls in zip(found, record.layers, strict=True)]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _recorder(router: nn.Module, calls: list[Tensor]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        indices = output[-1] if isinstance(output, tuple) else None
        if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.shape[-1] != router.top_k:
            raise InputError(f"{type(module).__name__} does not return the chosen experts last; this family cannot be recorded")
        calls.append(indices.detach().reshape(-1, indices.shape[-1]).cpu())

    return hook


@contextmanager
def replay_routing(model: nn.Module, experts: Tensor) -> Iterator[None]:
    """Makes each router take `experts[:, layer]`: `[tokens, layers, top_k]`, for all tokens of a pass, batch rows end to end.

    A token whose entries are `FREE` chooses for itself. Recomputed passes (gradient checkpointing) replay the same.
    """
    found = routers(model)
    if experts.dim() != 3 or experts.shape[1] != len(found):
        raise InputError(f"experts: shape {list(experts.shape)} for a model with {len(found)} routers; pass [tokens, layers, top_k]")
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for layer, (name, router) in enumerate(found):
            replayer = _replayer(name, router, experts[:, layer].long())
            replaced.append((router, router.__dict__.get("forward")))  # one of the object's own, where `exact` is active
            router.forward = replayer  # type: ignore[method-assign]
        yield
    finally:
        for router, own in replaced:
            if own is None:
                del router.forward  # the class's own shows again
            else:
                router.forward = own  # type: ignore[method-assign]


def _replayer(name: str, router: Any, chosen: Tensor) -> Any:
    original = router.forward
    if chosen.shape[-1] != router.top_k or int(chosen.max()) >= router.num_experts or int(chosen.min()) < FREE:
        raise InputError(f"experts: do not fit router {name} with {router.num_experts} experts, {router.top_k} a token")

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Choice(router.top_k, router.num_experts, chosen) as choice:
            output = original(*args, **kwargs)
        if choice.made != 1:
            raise InputError(f"router {name} chose its experts {choice.made} times in one pass; this family cannot be replayed")
        return output

    return forward


class _Choice(TorchFunctionMode):
    """Inside a router: the one topk over all experts returns the recorded ones, with the values that this router gives them."""

    def __init__(self, top_k: int, num_experts: int, chosen: Tensor) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.chosen, self.made = top_k, num_experts, chosen, 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, indices = args[0], result[1]
        if scores.dim() != 2 or scores.shape[-1] != self.num_experts or indices.shape[-1] != self.top_k:
            return result  # a choice of expert groups, not of experts
        if scores.shape[0] != self.chosen.shape[0]:
            raise InputError(f"experts: {self.chosen.shape[0]} tokens recorded, {scores.shape[0]} in this pass")
        self.made += 1
        chosen = self.chosen.to(indices.device)
        taken = torch.where((chosen == FREE).any(dim=-1, keepdim=True), indices, chosen)
        return torch.return_types.topk((scores.gather(-1, taken), taken))


def to_routed(experts: Tensor) -> RoutedExperts:
    """`[tokens, layers, top_k]` as it is kept in completions and samples."""
    tokens, layers, top_k = experts.shape
    plain = experts.to(torch.int16).contiguous().cpu().numpy()
    return RoutedExperts(shape=(tokens, layers, top_k), data=(plain if sys.byteorder == "little" else plain.byteswap()).tobytes())


def from_routed(routed: RoutedExperts) -> Tensor:
    """int16 `[tokens, layers, top_k]`."""
    if len(routed.data) != 2 * routed.shape[0] * routed.shape[1] * routed.shape[2]:
        raise InputError(f"routed experts: {len(routed.data)} bytes do not make int16 of shape {routed.shape}")
    flat = torch.frombuffer(bytearray(routed.data), dtype=torch.int16) if routed.data else torch.zeros(0, dtype=torch.int16)
    return flat.view(routed.shape)


def routing_of(sample: Sample) -> Tensor:
    """A sample's routing for `replay_routing`: `[len(token_ids), layers, top_k]`.

    The engine's row for a sampled token is the routing of the position that predicted it, one before the token's own; every
    other position is `FREE`.
    """
    if sample.routed_experts is None:
        raise InputError(f"sample {sample.sample_id}: has no routed experts; ask the engine for them when rolling out")
    rows = from_routed(sample.routed_experts)
    sampled = [index for index, value in enumerate(sample.rollout_logprobs) if value is not None]
    if len(sampled) != rows.shape[0] or (sampled and sampled[0] == 0):
        raise InputError(f"sample {sample.sample_id}: {rows.shape[0]} rows of routing for {len(sampled)} sampled tokens")
    whole = torch.full((len(sample.token_ids), *rows.shape[1:]), FREE, dtype=torch.int16)
    whole[torch.tensor(sampled, dtype=torch.long) - 1] = rows
    return whole
