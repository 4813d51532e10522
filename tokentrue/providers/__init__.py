"""Adapters from engines to the `Provider` protocol; each is imported only when it is named."""

from tokentrue.providers.closeness import Closeness, check_logprobs_close
from tokentrue.providers.registry import ENGINES, EngineKind, load

__all__ = ["ENGINES", "Closeness", "EngineKind", "check_logprobs_close", "load"]
