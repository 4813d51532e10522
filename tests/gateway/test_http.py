"""HTTP/1.1 as clients really send it, byte for byte over raw sockets, on both event loops: uvicorn with
`serving/server.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
import uvicorn

from tests.gateway.world import wait_until
from tokentrue.gateway.asgi import ClientGone, HttpError, read_body, send_bytes, send_json
from tokentrue.gateway.config import GatewayLimits
from tokentrue.gateway.serving.server import bounded_http

LOG = logging.getLogger("uvicorn.error")
LIMIT = 3_000_000
IDLE_S = 2
LIMITS = GatewayLimits(head_s=IDLE_S, body_s=IDLE_S, write_s=IDLE_S, head_bytes=100_000)
HUGE = 20_000_000


class Application:
    """Answers by path, and keeps what it saw."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.gone = 0
        self.sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        try:
            await getattr(self, path.strip("/") or "echo")(scope, receive, send)
        except HttpError as error:
            await send_json(send, error.status, {"code": error.code})
        except ClientGone:
            self.gone += 1

    async def echo(self, scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(scope, receive, LIMIT)
        self.bodies.append(body)
        self.headers = scope["headers"]
        await send_bytes(
            send, 200, body, [(b"x-method", scope["method"].encode()), (b"x-query", scope["query_string"])]
        )

    async def slow(self, scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(scope, receive, LIMIT)
        await asyncio.sleep(0.2)
        await send_bytes(send, 200, body, [])

    async def linger(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(IDLE_S * 0.9)
        await send_bytes(send, 200, b"", [])

    async def stream(self, scope: Any, receive: Any, send: Any) -> None:
        await read_body(scope, receive, LIMIT)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def flood(self, scope: Any, receive: Any, send: Any) -> None:
        """Far more than sockets hold: only a client that reads gets on."""
        await read_body(scope, receive, LIMIT)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % HUGE)]})
        for _ in range(HUGE // 100_000):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            self.sent += 100_000
        await send({"type": "http.response.body", "body": b""})

    async def wait(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers only when the client has left."""
        await read_body(scope, receive, LIMIT)
        assert (await receive())["type"] == "http.disconnect"
        self.gone += 1

    async def unread(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.3)
        await send_bytes(send, 200, b"unread", [])

    async def fail(self, scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("made to fail")

    async def fail_late(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("made to fail")

    async def split(self, scope: Any, receive: Any, send: Any) -> None:
        await send_bytes(send, 200, b"", [(b"x-evil", unquote_to_bytes(scope["query_string"]))])

    async def nothing(self, scope: Any, receive: Any, send: Any) -> None:
        return

    async def empty(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


class Running:
    def __init__(self, loop: str, limits: GatewayLimits = LIMITS) -> None:
        self.app = Application()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                http=bounded_http(limits),
                loop=loop,  # pyright: ignore[reportArgumentType]
                lifespan="off",
                ws="none",
                log_config=None,
                server_header=False,
                date_header=False,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=2,
            )
        )
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not end"


@pytest.fixture(params=["asyncio", "uvloop"])
def at(request: pytest.FixtureRequest) -> Iterator[Running]:
    running = Running(request.param)
    yield running
    running.stop()


@pytest.fixture(params=["asyncio", "uvloop"])
def patient(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server whose deadlines are far away, so that nothing but a byte limit ends a request."""
    running = Running(request.param, replace(LIMITS, head_s=120, body_s=120))
    yield running
    running.stop()


class Client(socket.socket):
    def __init__(self, at: Running) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.settimeout(10)
        self.connect(("127.0.0.1", at.port))
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = bytearray()  # appending to bytes copies all of a long body for each piece

    def until(self, mark: bytes) -> bytes:
        while mark not in self._held:
            data = self.recv(1 << 16)
            assert data, f"closed after {self._held!r}"
            self._held += data
        found, _, self._held = self._held.partition(mark)
        return bytes(found)

    def exactly(self, length: int) -> bytes:
        while len(self._held) < length:
            data = self.recv(1 << 16)
            assert data, "closed in mid-body"
            self._held += data
        body, self._held = bytes(self._held[:length]), self._held[length:]
        return body

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = self.until(b"\r\n\r\n").decode()
        first, *lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        if "content-length" in headers:
            return int(first.split()[1]), headers, self.exactly(int(headers["content-length"]))
        assert headers.get("transfer-encoding") == "chunked", head
        body = b""
        while size := int(self.until(b"\r\n"), 16):
            body += self.exactly(size)
            assert self.until(b"\r\n") == b""
        assert self.until(b"\r\n") == b""
        return int(first.split()[1]), headers, body

    def rest(self) -> bytes:
        """Everything up to the end of the connection, which is a reset where the server had not read all."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.recv(1 << 16):
                self._held += data
        return bytes(self._held)


def request(body: bytes, path: str = "/", *, head: str = "", method: str = "POST", version: str = "1.1") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def still_serves(client: Client) -> None:
    client.sendall(request(b"again"))
    assert client.answer()[2] == b"again"


def test_a_connection_serves_many_requests(at: Running) -> None:
    with Client(at) as client:
        for size in (0, 1, 70_000, 300_000, 1_500_000, 5):
            body = bytes(range(256)) * (size // 256 + 1)
            client.sendall(request(body[:size], "/?a=1&b=%20"))
            status, headers, answer = client.answer()
            assert status == 200 and answer == body[:size]
            assert headers["x-method"] == "POST" and headers["x-query"] == "a=1&b=%20" and "connection" not in headers
    wait_until(lambda: not at.server.server_state.tasks)
    assert at.server.server_state.total_requests == 6


def test_one_byte_at_a_time(at: Running) -> None:
    with Client(at) as client:
        for byte in request(b'{"a": 1}', head="X-Long: " + "y" * 50 + "\r\n"):
            client.sendall(bytes([byte]))
        assert client.answer()[2] == b'{"a": 1}'
        still_serves(client)


def test_chunked_bodies(at: Running) -> None:
    with Client(at) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        time.sleep(0.05)
        client.sendall(b"1\r\n \r\n5;ext=1\r\nworld\r\n0\r\nX-Trailer: z\r\n\r\n")
        assert client.answer()[2] == b"hello world"
        still_serves(client)
        client.sendall(
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Api-Key: forged\r\n\r\n"
        )
        assert client.answer()[2] == b"x"
    assert [name for name, _ in at.app.headers] == [b"host", b"transfer-encoding"]  # a trailer is no header


def test_chunked_answers(at: Running) -> None:
    with Client(at) as client:
        client.sendall(request(b"", "/stream"))
        assert client.answer()[2] == b"onetwo"
        still_serves(client)


def test_pipelined_requests_are_answered_in_order(at: Running) -> None:
    with Client(at) as client:
        client.sendall(
            b"".join(
                (
                    request(b"first", "/slow"),
                    request(b"second"),
                    request(b"third", "/stream"),
                    request(b"fourth" * 50_000),
                )
            )
        )
        assert [client.answer()[2][:6] for _ in range(4)] == [b"first", b"second", b"onetwo", b"fourth"]
        still_serves(client)


def test_pipelined_requests_without_end_are_not_parsed(at: Running) -> None:
    """A read holds thousands of them, and parsing them all would stop every other request meanwhile."""
    with Client(at) as client:
        with contextlib.suppress(OSError):  # it may be cut off while it sends
            client.sendall(request(b"first", "/slow") + request(b"x") * 5000)
        answers = b""
        with contextlib.suppress(OSError):
            while part := client.recv(1 << 16):
                answers += part
        assert 1 <= answers.count(b"HTTP/1.1 200") <= 100
    with Client(at) as client:
        still_serves(client)


def test_two_requests_in_one_packet_and_the_rest_of_the_second_later(at: Running) -> None:
    with Client(at) as client:
        both = request(b"one") + request(b"two and more")
        client.sendall(both[:-5])
        assert client.answer()[2] == b"one"
        client.sendall(both[-5:])
        assert client.answer()[2] == b"two and more"


def test_a_declared_length_beyond_the_limit_is_refused_unread(at: Running) -> None:
    with Client(at) as client:
        client.sendall(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {LIMIT + 1}\r\n\r\n".encode())
        assert client.answer()[0] == 413  # before a byte of it was sent
        sent = 0
        while sent <= LIMIT:
            sent += client.send(b"x" * min(100_000, LIMIT + 1 - sent))
        still_serves(client)


def test_an_undeclared_length_beyond_the_limit_is_refused(at: Running) -> None:
    with Client(at) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(LIMIT // 100_000 + 12):  # more than the limit, by more than one piece
            client.sendall(b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
        assert client.answer()[0] == 413
        client.sendall(b"0\r\n\r\n")
        still_serves(client)


def test_nothing_is_gathered_for_an_application_that_does_not_read(at: Running) -> None:
    with Client(at) as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        body, sent, end = request(b"x" * HUGE, "/unread"), 0, time.monotonic() + 0.25
        while time.monotonic() < end:
            try:
                sent += client.send(body[sent : sent + 1_000_000])
            except BlockingIOError:
                time.sleep(0.01)
        assert sent < len(body), "all of it was taken in though nobody reads it"
        client.settimeout(10)
        client.sendall(body[sent:])  # the answer does not wait for it, and what comes in behind the answer is dropped
        assert client.answer()[2] == b"unread"
        still_serves(client)


def test_expect_continue(at: Running) -> None:
    with Client(at) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\nContent-Length: 4\r\n\r\n")
        assert client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
        client.sendall(b"body")
        assert client.answer()[2] == b"body"
        client.sendall(
            f"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {LIMIT + 1}\r\n\r\n".encode()
        )
        assert client.answer()[0] == 413  # and it is not told to go on


@pytest.mark.parametrize("head", ["", "Connection: keep-alive\r\n"])
def test_http_1_0(at: Running, head: str) -> None:
    with Client(at) as client:
        client.sendall(request(b"old", head=head, version="1.0"))
        assert b"connection: close" in client.until(b"\r\n\r\n") and client.rest() == b"old"


def test_connection_close(at: Running) -> None:
    with Client(at) as client:
        client.sendall(request(b"last", head="Connection: close\r\n") + request(b"never"))
        status, headers, body = client.answer()
        assert (status, headers["connection"], body, client.rest()) == (200, "close", b"last", b"")
    assert at.app.bodies == [b"last"]


def test_head_and_empty_answers_have_no_body(at: Running) -> None:
    with Client(at) as client:
        client.sendall(
            request(b"", "/stream", method="HEAD") + request(b"", "/empty", method="GET") + request(b"behind")
        )
        assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert client.until(b"\r\n\r\n") == b"HTTP/1.1 204 No Content"
        assert client.answer()[2] == b"behind"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged of HTTP, though some library of another test may have switched that logger off or cut it from the
    root."""
    monkeypatch.setattr(LOG, "disabled", False)
    caplog.set_level("WARNING", LOG.name)
    LOG.addHandler(caplog.handler)
    yield caplog
    LOG.removeHandler(caplog.handler)


def test_a_failing_application(at: Running, logged: pytest.LogCaptureFixture) -> None:
    for path in ("/fail", "/nothing"):
        with Client(at) as client:
            client.sendall(request(b"", path))
            status, headers, body = client.answer()
            assert (status, headers["connection"], body, client.rest()) == (500, "close", b"Internal Server Error", b"")
            assert headers.keys() == {"content-type", "content-length", "connection"}
    for path in ("/split?a%0d%0aset-cookie:%20b", "/split?a%0ab:c", "/split?a%0db:c", "/split?a%00"):
        with Client(at) as client:
            client.sendall(request(b"", path))
            assert client.rest() == b"", "a line break in a header's value went out"
    with Client(at) as client:
        client.sendall(request(b"", "/fail_late"))
        assert client.rest().endswith(b"4\r\nhalf\r\n")  # no end: the client sees that it broke
    assert "made to fail" in logged.text


def test_errors_of_ours_leave_the_connection_usable(at: Running) -> None:
    with Client(at) as client:
        client.sendall(request(b"x" * 10, head=f"X: {LIMIT}\r\n"))
        assert client.answer()[0] == 200
        client.sendall(
            f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {LIMIT + 1}\r\n\r\n".encode() + b"x" * (LIMIT + 1)
        )
        assert client.answer()[0] == 413
        still_serves(client)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"rubbish\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 400_000,
    ],
)
def test_what_is_not_http_is_refused(at: Running, rubbish: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with Client(at) as client:
        client.sendall(rubbish)
        status, headers, _ = client.answer()
        assert (status, headers["connection"], client.rest()) == (400, "close", b"")
    with Client(at) as client:  # what was asked before it is still answered
        client.sendall(request(b"good", "/slow") + b"rubbish\r\n\r\n")
        assert client.answer()[::2] == (200, b"good")
        assert client.rest() == b""
    assert at.app.bodies == [] and "Exception" not in caplog.text


@pytest.mark.parametrize(
    "upgrade",
    ["Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n", "Connection: Upgrade\r\nUpgrade: websocket\r\n"],
)
def test_an_upgrade_is_answered_in_http_1_1_and_ends_it(at: Running, upgrade: str) -> None:
    """The parser takes what stands behind such a head for bytes of the other protocol: they must not become a
    request."""
    with Client(at) as client:
        client.sendall(request(b"plain", head=upgrade))
        client.sendall(request(b"smuggled"))
        status, headers, body = client.answer()
        assert (status, headers["connection"], body, client.rest()) == (200, "close", b"", b"")
    assert at.app.bodies == [b""]


def test_a_client_that_leaves_in_mid_body(at: Running) -> None:
    with Client(at) as client:
        client.sendall(request(b"x" * 1000)[:-10])
        time.sleep(0.05)
    wait_until(lambda: at.app.gone == 1 and not at.server.server_state.tasks and not at.server.server_state.connections)
    assert at.app.bodies == []


def test_a_client_that_leaves_before_its_answer(at: Running) -> None:
    with Client(at) as client:
        client.sendall(request(b"x", "/wait"))
        time.sleep(0.05)
        assert at.app.gone == 0
    wait_until(lambda: at.app.gone == 1 and not at.server.server_state.tasks)


def test_a_client_that_leaves_in_mid_answer(at: Running) -> None:
    with Client(at) as client:
        client.sendall(request(b"x", "/flood"))
        client.recv(1000)
    wait_until(lambda: not at.server.server_state.tasks and not at.server.server_state.connections)


def test_a_slow_reader_holds_the_answer_back(at: Running) -> None:
    with Client(at) as client:
        client.sendall(request(b"x", "/flood"))
        time.sleep(0.5)
        held = at.app.sent
        assert 0 < held < HUGE, "everything was put into memory"
        assert client.answer()[2] == b"x" * HUGE
        still_serves(client)


def test_an_idle_connection_is_closed_and_a_used_one_is_not(at: Running) -> None:
    with Client(at) as used, Client(at) as idle, Client(at) as half:
        half.sendall(b"POST / HT")
        for _ in range(6):
            still_serves(used)
            time.sleep(IDLE_S / 4)
        assert idle.rest() == b"" and half.rest() == b""
        still_serves(used)


def test_a_connection_is_idle_from_its_last_answer_on(at: Running) -> None:
    with Client(at) as client:
        client.sendall(request(b"x", "/linger"))
        assert client.answer()[0] == 200
        time.sleep(IDLE_S * 0.4)  # longer than IDLE_S after the request, not after its answer
        still_serves(client)


def test_shutting_down_finishes_what_is_being_answered() -> None:
    at = Running("uvloop")
    with Client(at) as busy, Client(at) as idle:
        busy.sendall(request(b"last words", "/slow"))
        time.sleep(0.05)
        at.server.should_exit = True
        status, headers, body = busy.answer()
        assert (status, headers["connection"], body) == (200, "close", b"last words")
        assert busy.rest() == b"" and idle.rest() == b""
    at.stop()


def test_shutting_down_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    at = Running("asyncio")
    with Client(at) as client:
        client.sendall(request(b"x", "/wait"))
        time.sleep(0.05)
        at.stop()
        assert client.answer()[0] == 500


# Limits that stock uvicorn does not have.


def is_closed(client: Client) -> bool:
    try:
        return client.rest().count(b"HTTP/1.1 200") == 0
    except ConnectionError:
        return True


def trickle(client: Client, part: bytes, seconds: float) -> bool:
    """Sends `part` again and again; True where the server ends that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            client.sendall(part)
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if not client.recv(1000):
                    return True
            client.setblocking(True)
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    "parts",
    [
        (b"GET / HTTP/1.1\r\nX: ", b"y" * 10_000),
        (b"GET / HTTP/1.1\r\n", b"X-Header: " + b"y" * 10_000 + b"\r\n"),
        (b"GET /", b"y" * 10_000),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n",
            b"X-Trailer: " + b"y" * 10_000 + b"\r\n",
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Trailer: ", b"y" * 10_000),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;ext=", b"y" * 10_000),
    ],
    ids=["header", "headers", "url", "trailers", "trailer", "extension"],
)
def test_a_head_and_its_framing_have_a_byte_limit(patient: Running, parts: tuple[bytes, bytes]) -> None:
    first, more = parts
    with Client(patient) as client:
        client.sendall(first)
        assert trickle(client, more, 20), "it takes in bytes without end"


def test_a_head_that_comes_at_once_has_the_same_limit(at: Running) -> None:
    with Client(at) as client:
        client.sendall(request(b"", head="X: " + "y" * 99_000 + "\r\n"))
        assert client.answer()[0] == 200
        client.sendall(request(b"", head="X: " + "y" * 101_000 + "\r\n"))
        assert client.answer()[0] == 400


def test_small_chunks_are_no_abuse(at: Running) -> None:
    with Client(at) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(60):
            client.sendall(b"1\r\nx\r\n" * 1000)
        client.sendall(b"0\r\n\r\n")
        assert client.answer()[2] == b"x" * 60_000


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\nhalf"],
    ids=["idle", "head", "body"],
)
def test_a_request_has_a_deadline(at: Running, sent: bytes) -> None:
    with Client(at) as client:
        client.sendall(sent)
        part = b"" if not sent else b"x" if sent.endswith(b"half") else b"X"
        assert trickle(client, part, 20 * IDLE_S) or is_closed(client)


def test_a_client_that_never_reads_is_cut_off(at: Running) -> None:
    with Client(at) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(request(b"x", "/flood"))
        wait_until(
            lambda: not at.server.server_state.tasks and not at.server.server_state.connections, seconds=4 * IDLE_S
        )
