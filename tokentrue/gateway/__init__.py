"""HTTP in four dialects in front of `turn`; no token logic here."""

from typing import Any

from tokentrue.gateway.config import GatewayConfig, GatewayLimits

__all__ = ["Gateway", "GatewayConfig", "GatewayLimits"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name != "Gateway":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # On first use: every command's --help needs the configuration, and no web server.
    from tokentrue.gateway.app import Gateway

    return Gateway
