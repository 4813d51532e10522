"""The client's end of a streamed turn: its event stream, what it has been sent, and whether it is still there."""

from tokentrue.gateway.streaming.accumulator import StreamedMessage
from tokentrue.gateway.streaming.disconnect import cancel_on_disconnect
from tokentrue.gateway.streaming.event_stream import EventStream

__all__ = ["EventStream", "StreamedMessage", "cancel_on_disconnect"]
