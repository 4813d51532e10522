"""Loads torch and transformers on demand, silences them, and checks the device and the model of samples."""

import os
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tokentrue.errors import ConfigError, RenderError
from tokentrue.hub import load_config
from tokentrue.providers.registry import ENGINES
from tokentrue.samples.files import require_model
from tokentrue.types import Sample

DTYPES = ("float32", "bfloat16", "float16")


def quiet_libraries(threads: int | None = None) -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(min(threads, os.cpu_count() or 1))


@contextmanager
def without_torch(engine: str) -> Generator[None]:
    """If `engine` runs elsewhere and torch is not loaded already. Afterwards transformers has no models in this
    process."""
    # A tokenizer needs transformers, which imports torch if it is installed: seconds of start-up and hundreds of
    # megabytes. transformers has no switch for that; it checks once and caches the result.
    kind = ENGINES.get(engine)
    if kind is None or kind.needs_torch or "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say: not importable
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found": as intended
    try:
        yield
    finally:
        del sys.modules["torch"]


def require_device(device: str) -> None:
    require_device_name(device)
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        why = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(f"device: {device!r} is not available: torch {torch.__version__} {why}; use cpu")
    if int(number or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device: {device!r} is not available: GPUs here: {count}, counted from 0")


def require_device_name(device: str) -> None:
    if not re.fullmatch(r"(cpu|cuda)(:\d{1,4})?", device):
        raise ConfigError(f"device: {device!r} is not supported; use cpu, cuda or cuda:N")


def require_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")


def require_samples_of(samples: Sequence[Sample], model: str) -> None:
    from tokentrue.renderers import load_renderer

    try:
        tokenizer = load_renderer(model).tokenizer_hash
    except RenderError:  # a model without tokenizer or template still has a vocabulary
        tokenizer = None
    require_model(samples, model=model, tokenizer=tokenizer, vocabulary=read_vocabulary_size(model))


def read_vocabulary_size(model: str) -> int:
    return int(load_config(model).get_text_config().vocab_size)
