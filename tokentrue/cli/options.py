"""Errors about what an option names."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from tokentrue.errors import ConfigError, InputError, RenderError

SUBJECT = "model: "  # what `tokentrue.hub` and `load_renderer` begin with


@contextmanager
def name_option(option: str) -> Generator[None, None, None]:
    """An error about a model names the option that the model was given by."""
    try:
        yield
    except (InputError, RenderError) as error:
        if not str(error).startswith(SUBJECT):
            raise
        raise ConfigError(f"{option}: {str(error).removeprefix(SUBJECT)}") from error
