"""What one step did, in numbers that people watch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tokentrue.train.data.rows import Row, is_truncated
from tokentrue.train.exactness import Agreement

MEASURED: Mapping[str, str] = {  # what a step reports of `diagnose`
    "delta_abs_mean": "delta/abs_mean",
    "delta_min": "delta/min",
    "delta_max": "delta/max",
    "k1": "corr/k1",
    "k3": "corr/k3",
    "chi2": "chi2/token",
    "ratio_mean": "ratio/raw/mean",
    "ess": "ratio/sequence/ess",
    "log_ppl_trainer": "log_ppl/trainer",
    "skew_positive": "contribution/rollout/positive/skew",
    "skew_negative": "contribution/rollout/negative/skew",
    "pull_positive": "contribution/rollout/positive/mean",
    "pull_negative": "contribution/rollout/negative/mean",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """`metrics` are the same whenever the step is repeated; `seconds` and `speeds` are not."""

    step: int
    version: int  # of the weights that the step produced
    metrics: Mapping[str, float]
    agreement: Agreement
    advantages: Sequence[float] = ()  # by row of the batch
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    speeds: Mapping[str, float] = field(default_factory=dict[str, float])


class Clock:
    """Seconds by name. Nested names count in both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def step_speeds(report: StepReport, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of a whole step, and each part's share of its time."""
    whole = max(seconds["step"], 1e-9)
    shares = {f"share/{name}": value / whole for name, value in seconds.items() if name != "step"}
    tokens, trained = report.metrics["tokens"], report.metrics["tokens_trained"]
    return {"speed/tokens_per_s": tokens / whole, "speed/trained_tokens_per_s": trained / whole, **shares}


def batch_metrics(rows: Sequence[Row], advantages: Sequence[float], *, version: int) -> dict[str, float]:
    """Of the rollouts; `version` sampled the freshest of them."""
    rewards = torch.tensor(
        list({(row.group, row.sample.session_id): row.reward for row in rows}.values()), dtype=torch.float64
    )
    lengths = torch.tensor([int(row.mask.sum()) for row in rows], dtype=torch.float64)
    ages = torch.cat([version - row.versions[row.sampled] for row in rows]).double().clamp(min=0)
    groups: dict[str, bool] = {}
    for row, advantage in zip(rows, advantages, strict=True):
        groups[row.group] = groups.get(row.group, False) or advantage != 0.0
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()) if rewards.numel() > 1 else 0.0,
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "rows": len(rows),
        "sessions": rewards.numel(),
        "groups": len(groups),
        "groups_without_signal": sum(not taught for taught in groups.values()),
        "tokens": sum(row.length for row in rows),
        "tokens_trained": int(lengths.sum()),
        "completion_length_mean": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "truncated": sum(map(is_truncated, rows)) / len(rows),
        "staleness_mean": float(ages.mean()) if ages.numel() else 0.0,
        "staleness_max": float(ages.max()) if ages.numel() else 0.0,
    }


COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Weights that each token is multiplied with; `attention` is layers · heads · head_dim.

    A product with n weights is 2n operations; causal attention of T tokens is 2·T²·heads·head_dim a layer.
    """

    weights: float
    attention: float

    def forward(self, lengths: Sequence[int]) -> float:
        return sum(2.0 * self.weights * length + 2.0 * self.attention * length * length for length in lengths)


def count_flops(model: nn.Module) -> ModelFlops | None:
    """None where the configuration does not say enough."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    kinds = getattr(config, "layer_types", None) or ()
    if not layers or not heads or any(kind != "full_attention" for kind in kinds):
        return None
    share = expert_share(config)
    weights = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or is_lookup(model, name):
            continue
        if ".experts." in name:
            if share is None:
                return None
            weights += parameter.numel() * share
        else:
            weights += parameter.numel()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelFlops(weights=weights, attention=float(layers * heads * head_dim))


def expert_share(config: Any) -> float | None:
    """The share of the experts that a token takes."""
    taken = getattr(config, "num_experts_per_tok", None)
    total = next((getattr(config, name) for name in COUNTS_OF_EXPERTS if getattr(config, name, None)), None)
    return None if not taken or not total else taken / total


def is_lookup(model: nn.Module, name: str) -> bool:
    """An embedding is read, not multiplied; where it is also the head, it counts as the head."""
    owner = name.rpartition(".")[0]
    is_embedding = isinstance(model.get_submodule(owner), nn.Embedding)
    config: Any = getattr(model, "config", None)
    return is_embedding and not getattr(config, "tie_word_embeddings", False)
