"""HTTP in four dialects in front of `turn`; no token logic here."""

from tokentrue.gateway.app import Gateway
from tokentrue.gateway.config import GatewayConfig, GatewayLimits
from tokentrue.gateway.workers.forwarding import owner_of

__all__ = ["Gateway", "GatewayConfig", "GatewayLimits", "owner_of"]
