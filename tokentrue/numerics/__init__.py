"""Batch-invariant operators and THE ONE log-probability function, shared by engine and trainer."""

from tokentrue.numerics.exact import SWITCHES, Contract, exact, on_device, ops_for
from tokentrue.numerics.logprob import KeptRows, filter_logits, logprobs_of, remove_filtered, scale_logits
from tokentrue.numerics.ops import (
    AttentionSpec,
    ClampedSwiglu,
    ExpertWeights,
    HeadNorm,
    LowRank,
    LowRankStack,
    NormForm,
    Ops,
    Packed,
    PagedBatch,
    RowSlots,
    same_bits,
)
from tokentrue.numerics.score import deterministic_grad, logits_of, score, score_with_entropy

__all__ = [
    "SWITCHES",
    "AttentionSpec",
    "ClampedSwiglu",
    "Contract",
    "ExpertWeights",
    "HeadNorm",
    "KeptRows",
    "LowRank",
    "LowRankStack",
    "NormForm",
    "Ops",
    "Packed",
    "PagedBatch",
    "RowSlots",
    "deterministic_grad",
    "exact",
    "filter_logits",
    "logits_of",
    "logprobs_of",
    "on_device",
    "ops_for",
    "remove_filtered",
    "same_bits",
    "scale_logits",
    "score",
    "score_with_entropy",
]
