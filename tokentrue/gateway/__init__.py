"""HTTP in four dialects in front of `turn`; no token logic here."""

from tokentrue.gateway.app import Gateway
from tokentrue.gateway.config import GatewayConfig, GatewayLimits
from tokentrue.gateway.serving.forwarding import find_owner

__all__ = ["Gateway", "GatewayConfig", "GatewayLimits", "find_owner"]
