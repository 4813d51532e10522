"""Is the device there that a command names? Checked before a model is loaded."""

from __future__ import annotations

from typing import cast

from tokentrue.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def require_device(device: str) -> None:
    """Raises ConfigError where torch knows no such device, or this machine has none."""
    import torch

    try:
        kind, index = torch.device(device).type, cast("int | None", torch.device(device).index)
    except RuntimeError as error:
        raise ConfigError(f"device: {device!r} is no device of torch; use cpu, cuda or cuda:N") from error
    if kind not in {"cpu", "cuda"}:
        raise ConfigError(f"device: {device!r} is not supported; use cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        why = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(f"device: {device!r} is not available: torch {torch.__version__} {why}; use cpu")
    if kind == "cuda" and index is not None and index >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {device!r} is not available: GPUs here: {torch.cuda.device_count()}, counted from 0"
        )


def require_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
