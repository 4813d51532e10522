"""Exact operators for CUDA, in Triton."""

from tokentrue.numerics.triton.ops import TritonOps

__all__ = ["TritonOps"]
