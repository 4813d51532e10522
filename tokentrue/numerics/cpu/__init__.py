"""The exact operators of a CPU, in plain torch."""

from tokentrue.numerics.cpu.ops import CpuOps

__all__ = ["CpuOps"]
