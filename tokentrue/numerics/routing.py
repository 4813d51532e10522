"""Routing replay for mixture-of-experts models: records which experts each token took, and makes a later pass take
them.

The experts' weights come from the current router, with gradient; where the rollout's weights are given too, they are
the values, and the gradient is still the router's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tokentrue.errors import InputError
from tokentrue.json_types import JsonObject
from tokentrue.numerics.modules import replace_attribute
from tokentrue.routing_replay import FREE
from tokentrue.types import RoutedExperts, Sample


def routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """In the order of the layers."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Router")
        and isinstance(getattr(module, "top_k", None), int)
        and hasattr(module, "num_experts")
    ]
    if not found:
        raise InputError(
            f"{type(model).__name__} has no top-k router that can be recorded; is it a mixture of experts of "
            "transformers?"
        )
    return found


@dataclass(slots=True, eq=False)
class RoutingRecord:
    """Filled while its `with` block runs."""

    layers: list[list[Tensor]] = field(default_factory=list[list[Tensor]])

    @property
    def experts(self) -> Tensor:
        """int16 `[tokens, layers, top_k]`, batch rows end to end."""
        if not self.layers or any(not calls for calls in self.layers):
            raise InputError("nothing was recorded: run the model inside the block")
        return torch.stack([torch.cat(calls) for calls in self.layers], dim=1).to(torch.int16)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Records every router's choice, of one sequence at a time where the model decodes."""
    found = routers(model)
    record = RoutingRecord(layers=[[] for _ in found])

    def record_choice(router: nn.Module, inputs: object, output: object, *, calls: list[Tensor]) -> None:
        indices = output[-1] if isinstance(output, tuple) else None
        if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.shape[-1] != router.top_k:
            raise InputError(
                f"{type(router).__name__} does not return the chosen experts last; this family cannot be recorded"
            )
        calls.append(indices.detach().reshape(-1, indices.shape[-1]).cpu())

    with ExitStack() as hooks:
        for (_, router), calls in zip(found, record.layers, strict=True):
            hooks.enter_context(router.register_forward_hook(partial(record_choice, calls=calls)))
        yield record


@contextmanager
def replay_routing(model: nn.Module, experts: Tensor, weights: Tensor | None = None) -> Iterator[None]:
    """Makes each router take `experts[:, layer]`, `[tokens, layers, top_k]`, batch rows end to end; a token whose
    entries are `FREE` chooses for itself. `weights` of the same shape replace the router's values."""
    found = routers(model)
    if experts.dim() != 3 or experts.shape[1] != len(found):
        raise InputError(
            f"experts: shape {list(experts.shape)} for a model with {len(found)} routers; pass [tokens, layers, top_k]"
        )
    if weights is not None and weights.shape != experts.shape:
        raise InputError(f"weights: shape {list(weights.shape)} for experts of shape {list(experts.shape)}")
    with ExitStack() as undo:
        for layer, (name, router) in enumerate(found):
            replayer = _replayer(name, router, experts[:, layer].long(), None if weights is None else weights[:, layer])
            replace_attribute(router, "forward", replayer, undo)
        yield


def _replayer(name: str, router: Any, chosen: Tensor, weights: Tensor | None) -> Any:
    original = router.forward
    if chosen.shape[-1] != router.top_k or int(chosen.max()) >= router.num_experts or int(chosen.min()) < FREE:
        raise InputError(f"experts: do not fit router {name} with {router.num_experts} experts, {router.top_k} a token")

    def forward(*args: object, **kwargs: object) -> object:
        with _Choice(router.top_k, router.num_experts, chosen) as choice:
            output = original(*args, **kwargs)
        if choice.made != 1:
            raise InputError(
                f"router {name} chose its experts {choice.made} times in one pass; this family cannot be replayed"
            )
        if weights is None:
            return output
        if not isinstance(output, tuple) or len(output) != 3 or output[1].shape != chosen.shape:
            raise InputError(
                f"router {name} does not return (logits, weights, experts); its weights cannot be replayed"
            )
        logits, own, indices = output
        is_free = (chosen == FREE).any(dim=-1, keepdim=True).to(own.device)
        taken = torch.where(is_free, own.detach(), weights.to(own.device, own.dtype))
        # taken - own.detach() is not exactly what own lacks; adding zero with a gradient keeps the recorded bits.
        return logits, taken + (own - own.detach()), indices

    return forward


class _Choice(TorchFunctionMode):
    """Inside a router: the one topk over all experts returns the recorded ones."""

    def __init__(self, top_k: int, num_experts: int, chosen: Tensor) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.chosen, self.made = top_k, num_experts, chosen, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: JsonObject | None = None
    ) -> Any:
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


def from_routed(routed: RoutedExperts) -> Tensor:
    """int16 `[tokens, layers, top_k]`."""
    return torch.tensor(np.frombuffer(routed.data, dtype=np.int16)).view(routed.shape)


def routing_of(sample: Sample) -> Tensor:
    """For `replay_routing`; the last token is no input, its row is `FREE`."""
    rows = from_routed(_required_routing(sample))
    return torch.cat((rows, torch.full((1, *rows.shape[1:]), FREE, dtype=torch.int16)))


def routing_weights_of(sample: Sample) -> Tensor | None:
    """float32 `[tokens, layers, top_k]`; None where the engine did not report them."""
    routed = _required_routing(sample)
    if routed.weights is None:
        return None
    rows = torch.tensor(np.frombuffer(routed.weights, dtype=np.float32)).view(routed.shape)
    return torch.cat((rows, torch.zeros(1, *rows.shape[1:])))


def _required_routing(sample: Sample) -> RoutedExperts:
    routed, length = sample.routed_experts, len(sample.token_ids)
    if routed is None:
        raise InputError(f"sample {sample.sample_id}: has no routed experts; ask the engine for them when rolling out")
    if (routed.start, routed.end) != (0, length - 1):
        where = f"positions [{routed.start}, {routed.end})"
        raise InputError(f"sample {sample.sample_id}: routing of {where} for {length} tokens; record it again")
    return routed
