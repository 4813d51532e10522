"""Exact operators for CUDA, in Triton. Needs torch, triton and numpy alone."""

from tokentrue.numerics.triton.ops import InexactOps, TritonOps

__all__ = ["InexactOps", "TritonOps"]
