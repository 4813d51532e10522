"""HTTP in four dialects in front of `turn`; no token logic here."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokentrue.gateway.config import GatewayConfig, GatewayLimits

if TYPE_CHECKING:
    from tokentrue.gateway.app import Gateway
    from tokentrue.gateway.serving.forwarding import find_owner

# On first use: the configuration, and with it every command's --help, needs no web server.
_LAZY = {"Gateway": "tokentrue.gateway.app", "find_owner": "tokentrue.gateway.serving.forwarding"}
__all__ = ["Gateway", "GatewayConfig", "GatewayLimits", "find_owner"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
