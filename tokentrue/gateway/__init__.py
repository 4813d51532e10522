"""The door: HTTP in three dialects on top of the corridor; no token logic here."""

from tokentrue.gateway.app import Gateway
from tokentrue.gateway.config import GatewayConfig, Limits
from tokentrue.gateway.peers import owner_of

__all__ = ["Gateway", "GatewayConfig", "Limits", "owner_of"]
