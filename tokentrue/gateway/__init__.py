"""HTTP in four dialects in front of `turn`; no token logic here."""

from importlib import import_module
from typing import Any

from tokentrue.gateway.config import GatewayConfig, GatewayLimits

# On first use: the configuration, and with it every command's --help, needs no web server.
_LAZY = {"Gateway": "tokentrue.gateway.app", "find_owner": "tokentrue.gateway.serving.forwarding"}
__all__ = ["GatewayConfig", "GatewayLimits", *_LAZY]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
