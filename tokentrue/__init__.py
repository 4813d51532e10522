"""tokentrue: every token that the model sampled reaches the trainer bit for bit, exactly once.

Importing this package imports neither torch nor the network; names are loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokentrue.types import Completion, Extension, Refusal, Sample, Sampling

if TYPE_CHECKING:  # type checkers and editors do not follow `__getattr__`
    from tokentrue.client import AsyncClient, Client
    from tokentrue.comparison import Mismatch, compare
    from tokentrue.providers import check_logprobs_close
    from tokentrue.renderers import Verification, load_renderer, verify
    from tokentrue.turn import Session, rollout

_LAZY = {
    "AsyncClient": "tokentrue.client",
    "Client": "tokentrue.client",
    "Mismatch": "tokentrue.comparison",
    "Session": "tokentrue.turn",
    "Verification": "tokentrue.renderers",
    "check_logprobs_close": "tokentrue.providers",
    "compare": "tokentrue.comparison",
    "load_renderer": "tokentrue.renderers",
    "rollout": "tokentrue.turn",
    "verify": "tokentrue.renderers",
}
_SUBPACKAGES = [
    "comparison",
    "engine",
    "integrations",
    "mismatch",
    "numerics",
    "providers",
    "renderers",
    "samples",
    "sessions",
    "train",
]

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "Extension",
    "Mismatch",
    "Refusal",
    "Sample",
    "Sampling",
    "Session",
    "Verification",
    "__version__",
    "check_logprobs_close",
    "compare",
    "load_renderer",
    "rollout",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _SUBPACKAGES:
        return import_module(f"tokentrue.{name}")
    raise AttributeError(f"module 'tokentrue' has no attribute {name!r}")
