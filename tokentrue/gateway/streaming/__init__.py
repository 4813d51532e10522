"""The client's end of a streamed turn: its event stream, and whether it is still there."""

from tokentrue.gateway.streaming.disconnect import cancel_on_disconnect
from tokentrue.gateway.streaming.event_stream import EventStream

__all__ = ["EventStream", "cancel_on_disconnect"]
