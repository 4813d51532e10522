"""The client side of a streamed turn: its event stream and disconnection."""

from tokentrue.gateway.streaming.disconnect import cancel_on_disconnect
from tokentrue.gateway.streaming.event_stream import EventStream

__all__ = ["EventStream", "cancel_on_disconnect"]
