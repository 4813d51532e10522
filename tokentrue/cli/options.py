"""Errors about what an option names or holds."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from tokentrue.errors import ConfigError, InputError, RenderError
from tokentrue.plain_json import is_utf8

SUBJECT = "model: "  # what `tokentrue.hub` and `load_renderer` begin with


def require_utf8(option: str, text: str) -> None:
    """Bytes of the command line that are not UTF-8 arrive as lone surrogates; no name of a session or a group holds
    any."""
    if not is_utf8(text):
        raise ConfigError(f"{option}: {text!r} is not UTF-8 text")


@contextmanager
def name_option(option: str) -> Generator[None, None, None]:
    """An error about a model names the option that the model was given by."""
    try:
        yield
    except (InputError, RenderError) as error:
        if not str(error).startswith(SUBJECT):
            raise
        raise ConfigError(f"{option}: {str(error).removeprefix(SUBJECT)}") from error
