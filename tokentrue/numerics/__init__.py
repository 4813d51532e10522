"""Batch-invariant operators and THE ONE log-probability function, shared by engine and trainer."""

from tokentrue.numerics.exact import Contract, exact, on_device, ops_for
from tokentrue.numerics.logprob import (
    KeptRows,
    filter_logits,
    logits_of,
    logprobs_of,
    remove_filtered,
    scale_logits,
    score,
    scores_of,
)
from tokentrue.numerics.ops import (
    AttentionSpec,
    ClampedSwiglu,
    ExpertWeights,
    HeadNorm,
    LowRank,
    LowRankStack,
    Norm,
    NormForm,
    Ops,
    Packed,
    PagedBatch,
    RowSlots,
    same_bits,
)
from tokentrue.numerics.tree import Array, TokenTree, score_tree, shares_prefixes, sort_by_prefix
from tokentrue.numerics.vision import SeenImages, see_rows

__all__ = [
    "Array", "AttentionSpec", "ClampedSwiglu", "Contract", "ExpertWeights", "HeadNorm", "KeptRows", "LowRank",
    "LowRankStack", "Norm", "NormForm", "Ops", "Packed", "PagedBatch", "RowSlots", "SeenImages", "TokenTree", "exact",
    "filter_logits", "logits_of", "logprobs_of", "on_device", "ops_for", "remove_filtered", "same_bits", "scale_logits",
    "score", "score_tree", "scores_of", "see_rows", "shares_prefixes", "sort_by_prefix",
]  # fmt: skip
