"""The reference forward: the trainer's model in float32, and copies of it with one known fault each.

A variant predicts what an engine with that fault would report. The engine's own numbers are compared with every
prediction, so that a fault is named by what it does to the log-probabilities, not by their size alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tokentrue.engine.adapters import merge_low_rank, read_directory, read_pairs
from tokentrue.errors import ConfigError
from tokentrue.hub import load_causal_model, load_config
from tokentrue.json_types import JsonMapping
from tokentrue.numerics import KeptRows, remove_filtered
from tokentrue.records import record
from tokentrue.types import Completion

Change: TypeAlias = Callable[[Any], Any]
"""Takes a copy of the reference model; returns the model to run."""

THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)


@record
class Observation:
    """`logprobs[k]` is the engine's log-probability of `token_ids[positions[k]]`, given everything before it."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int = 0  # of `token_ids`, how many were sent rather than sampled
    temperatures: tuple[float, ...] = ()  # that each position was sampled at, where it is known; else 1
    kept: tuple[tuple[int, ...], ...] = ()  # ids that filters kept at each position; an empty one keeps all

    @staticmethod
    def from_completion(prompt_ids: Sequence[int], completion: Completion) -> Observation:
        ids, sent = (*prompt_ids, *completion.token_ids), len(prompt_ids)
        positions = tuple(range(sent, len(ids)))
        return Observation(token_ids=ids, positions=positions, logprobs=completion.logprobs, prompt_tokens=sent)

    @staticmethod
    def from_prompt(prompt_ids: Sequence[int], logprobs: Sequence[float]) -> Observation:
        """`logprobs` are of `prompt_ids[1:]`."""
        ids, sent = tuple(prompt_ids), len(prompt_ids)
        return Observation(token_ids=ids, positions=tuple(range(1, sent)), logprobs=tuple(logprobs), prompt_tokens=sent)


@dataclass(frozen=True, slots=True)
class Variant:
    """One known fault of weights or arithmetic; `fault` is its name in `findings.CAUSES`."""

    fault: str
    label: str
    change: Change
    kv_dtype: torch.dtype | None = None


class Reference:
    """A model in float32 on the CPU; `source` is the directory or the hub id that it was loaded from."""

    def __init__(self, model: Any, *, source: str | Path | None = None, adapter: Path | None = None) -> None:
        self.model: Any = model.eval()
        self.config: Any = model.config
        self.source, self.adapter = source, adapter
        # What engines serve by default; a loaded model's configuration has the dtype of loading instead.
        saved = getattr(self.config if source is None else load_config(source), "dtype", None)
        self.dtype = str(saved or "float32").removeprefix("torch.")

    @staticmethod
    def load(source: str | Path, *, adapter: Path | None = None) -> Reference:
        """With `adapter`, the policy is the model with that adapter merged in."""
        model = load_model(source)
        return Reference(model if adapter is None else merge_adapter(model, adapter), source=source, adapter=adapter)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", 2048))

    def logprobs(self, observations: Sequence[Observation]) -> Tensor:
        """At the temperature that each token was sampled at, over the ids that were kept."""
        return score(self.model, observations)[0]

    def predict(self, variant: Variant, observations: Sequence[Observation]) -> Tensor:
        changed = variant.change(copy.deepcopy(self.model)).eval()
        return score(changed, observations, kv_dtype=variant.kv_dtype)[0]


def load_model(source: str | Path) -> Any:
    return load_causal_model(source, dtype="float32").eval()


@torch.no_grad()
def score(
    model: Any,
    observations: Sequence[Observation],
    temperatures: Sequence[float | None] = (None,),
    *,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    """`[temperatures, tokens]`, from one forward pass; None is the temperature that each token was sampled at."""
    found: list[Tensor] = [torch.zeros(len(temperatures), 0, dtype=torch.float64)]
    for seen in observations:
        ids, at = torch.tensor([seen.token_ids]), torch.tensor(seen.positions) - 1
        cache = {} if kv_dtype is None else {"past_key_values": quantising_cache(kv_dtype), "use_cache": True}
        logits = model(ids, **cache).logits[0].index_select(0, at).double()
        if any(seen.kept):
            offsets = torch.tensor([0, *(len(row) for row in seen.kept)]).cumsum(0)
            kept = torch.tensor([one for row in seen.kept for one in row])
            logits = remove_filtered(logits, KeptRows(token_ids=kept, offsets=offsets))
        chosen = ids[0, at + 1].unsqueeze(1)
        own = torch.tensor(seen.temperatures or [1.0] * len(seen.positions), dtype=torch.float64).unsqueeze(1)
        scaled = [logits / (own if temperature is None else temperature) for temperature in temperatures]
        found.append(torch.stack([one.log_softmax(dim=-1).gather(1, chosen).squeeze(1) for one in scaled]))
    return torch.cat(found, dim=1)


def quantising_cache(dtype: torch.dtype) -> Any:
    from transformers import DynamicCache

    class QuantisingCache(DynamicCache):
        """Keys and values lose precision on their way into the cache, as in an engine with a quantised one."""

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            keys, values = (states.to(dtype).to(states.dtype) for states in (key_states, value_states))
            return super().update(keys, values, layer_idx, *args, **kwargs)

    return QuantisingCache()


def dtype_variant(name: str) -> Variant:
    return Variant(f"dtype_{name}", name, lambda model: model.to(getattr(torch, name)))


def list_variants(reference: Reference, *, previous: str | Path | None = None) -> Iterator[Variant]:
    """The faults of weights that can be simulated for this model, the likeliest first."""
    model, config, base = reference.model, reference.config, reference.source
    if previous is not None:
        yield Variant("stale_weights", f"weights of {Path(previous).name}", lambda _: load_model(previous))
    if reference.adapter is not None and base is not None:
        yield Variant("adapter_missing", f"without adapter {reference.adapter.name}", lambda _: load_model(base))
    for name in ("float16", "bfloat16"):
        yield dtype_variant(name)
    yield Variant("int8_weights", "int8 per channel", lambda m: quantise(m, to_int8))
    yield Variant("fp8_weights", "float8_e4m3 per tensor", lambda m: quantise(m, to_fp8))
    yield Variant("fp8_kv_cache", "KV cache in float8_e4m3", lambda m: m, kv_dtype=torch.float8_e4m3fn)
    if any(isinstance(module, nn.Linear) and module.bias is not None for module in model.modules()):
        yield Variant("bias_dropped", "biases set to 0", drop_biases)
    if not getattr(config, "tie_word_embeddings", True):
        yield Variant("tied_head", "output layer = embedding", tie_head)
    rope: JsonMapping = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" in rope:
        theta = float(rope["rope_theta"])
        for other in sorted({*THETAS, theta * 10, theta / 10} - {theta}):
            yield Variant("rope", f"rope_theta {other:g} instead of {theta:g}", rope_change(rope_theta=other))
        if rope.get("rope_type", "default") != "default":
            yield Variant("rope", "no rope scaling", rope_change(rope_type="default"))
            return
        for factor in (2.0, 4.0):
            change = rope_change(rope_type="linear", factor=factor)
            yield Variant("rope", f"linear rope scaling by {factor:g}", change)


def rope_change(**changes: Any) -> Change:
    """The same weights in a model whose rotary embedding is built from other settings."""

    def change(model: Any) -> Any:
        config = copy.deepcopy(model.config)
        config.rope_parameters = {**config.rope_parameters, **changes}
        other = type(model)(config)
        other.load_state_dict(model.state_dict())
        return other

    return change


def quantise(model: Any, rounding: Callable[[Tensor], Tensor]) -> Any:
    """Every linear layer but the output layer, as weight-only quantisation does it."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.weight.data = rounding(module.weight.data)
    return model


def to_int8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


def to_fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax().clamp(min=1e-12) / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def drop_biases(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()
    return model


def tie_head(model: Any) -> Any:
    model.get_output_embeddings().weight.data = model.get_input_embeddings().weight.data
    return model


def merge_adapter(model: Any, directory: Path) -> Any:
    modules = dict(model.named_modules())
    for name, low in read_pairs(directory.name, *read_directory(directory)).items():
        target = modules.get(name)
        if not isinstance(target, nn.Linear):
            raise ConfigError(f"--adapter: {name} is no linear layer of the model")
        target.weight.data = merge_low_rank(target.weight.data, low)
    return model
