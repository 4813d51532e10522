"""uvicorn's HTTP/1.1 protocol within `GatewayLimits`.

uvicorn does not limit a head or trailers, merges trailers into the headers, and waits forever for a head, a body and
a client that reads. What exceeds a limit gets 400 or a closed connection."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokentrue.gateway.config import GatewayLimits

MOST_PIPELINED = 64  # requests waiting for an earlier reply; all of one read are parsed at once
FRAMING_PER_BODY_BYTE = 8  # a chunk of one byte has at least five bytes of framing


class BoundedHttp(HttpToolsProtocol):
    limits: ClassVar[GatewayLimits]
    _timer: asyncio.TimerHandle | None = None  # timeout of the head or body being received
    _write_timer: asyncio.TimerHandle | None = None
    _began = False  # a request began in the bytes that are being parsed
    _in_body = False
    _overhead = 0  # bytes of this request that are no body
    _body_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_time(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit_time(None)
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None:  # the first bytes of the next request
            self._limit_time(self.limits.head_s)
        self._began, before = False, self._body_bytes
        super().data_received(data)
        if not self._began:  # else its complete head was measured, and its next part will be
            self._overhead += len(data) - (self._body_bytes - before)
        most = self.limits.head_bytes + FRAMING_PER_BODY_BYTE * self._body_bytes
        if self._overhead > most and not self.transport.is_closing():
            self.send_400_response("Request head or framing too large.")

    def on_message_begin(self) -> None:
        self._began, self._in_body, self._overhead, self._body_bytes = True, False, 0, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # a trailer is not a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.limits.head_bytes:
            raise ValueError("the head of the request is too large")  # the parser reports it as an invalid request
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError("too many pipelined requests")
        self._in_body = True
        self._limit_time(self.limits.body_s)
        super().on_headers_complete()
        if self.parser is not None and self.parser.should_upgrade():
            self.cycle.keep_alive = False  # another protocol may follow: close the connection after this reply

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._limit_time(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _limit_time(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._time_out)

    @property
    def _current(self) -> RequestResponseCycle | None:
        """uvicorn has None before the first."""
        return self.cycle

    def _time_out(self) -> None:
        self._timer = None
        current = self._current
        if self._in_body or current is None or current.response_complete:
            self.transport.abort()
        else:  # a reply is being sent; the bytes of the next request wait
            self._limit_time(self.limits.head_s)

    def send_400_response(self, msg: str) -> None:
        """A complete request before what is not HTTP still gets its reply."""
        current = self._current
        if current is None or current.response_complete or (self._in_body and not current.response_started):
            super().send_400_response(msg)
        elif self._in_body:
            self.transport.abort()
        else:
            current.keep_alive = False
            self.flow.pause_reading()


def bounded_http(limits: GatewayLimits) -> type[BoundedHttp]:
    return type("BoundedHttp", (BoundedHttp,), {"limits": limits})
