"""The connections to an engine, against a server that does what engines, routers and failing machines do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tokentrue.errors import ConfigError, EngineContractError, EngineRejected, EngineTimeout, EngineUnreachable
from tokentrue.providers.wire import Wire

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Server:
    """Answers each request on each connection with the next of `answers`; None closes the connection instead."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.connections = 0
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(length))
                answer = self.answers.pop(0) if self.answers else OK
                if answer is None:
                    return
                for part in answer.split(b"~"):  # ~ is a pause
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if b"connection: close" in answer or b"\r\n\r\n" not in answer or b"no-length" in answer:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@pytest_asyncio.fixture
async def at() -> AsyncIterator[tuple[Server, Wire]]:
    server = Server()
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    wire = Wire(f"http://127.0.0.1:{port}/base", timeout_s=0.5, connect_s=1, retries=1, headers={"authorization": "Bearer k"})
    yield server, wire
    await wire.close()
    listening.close()


async def test_one_connection_serves_many_requests(at: tuple[Server, Wire]) -> None:
    server, wire = at
    server.answers = [OK, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{~\r\n1\r\n}\r\n0\r\n\r\n", OK]
    for body in (b"1", b"2" * 300_000, b""):
        assert await wire.json("POST", "/x", body) == {}
    assert server.connections == 1 and [len(body) for body in server.bodies] == [1, 300_000, 0]
    assert server.heads[0].startswith(b"POST /base/x HTTP/1.1\r\nhost: 127.0.0.1") and b"authorization: Bearer k\r\n" in server.heads[0]


async def test_requests_at_the_same_time_have_connections_of_their_own(at: tuple[Server, Wire]) -> None:
    server, wire = at
    await asyncio.gather(*(wire.json("POST", "/x", b"1") for _ in range(5)))
    assert server.connections == 5
    await wire.json("POST", "/x", b"1")
    assert server.connections == 5


async def test_an_idle_connection_that_the_server_closed_costs_no_attempt(at: tuple[Server, Wire]) -> None:
    server, wire = at
    await wire.json("POST", "/x", b"1")
    server.answers = [None, OK]  # closed when the second request comes; a new connection is made at once
    assert await wire.json("POST", "/x", b"2", retry=False) == {}
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (None, EngineUnreachable, "closed"),
        (b"rubbish\r\n\r\n", EngineUnreachable, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n{", EngineUnreachable, "broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{,}", EngineContractError, "not JSON"),
        (b"HTTP/1.1 307 Elsewhere\r\nlocation: /y\r\ncontent-length: 0\r\n\r\n", EngineRejected, "307"),
        (b"HTTP/1.1 400 Bad\r\ncontent-length: 8\r\n\r\ntoo long", EngineRejected, "too long"),
        (b"HTTP/1.1 504 Slow\r\ncontent-length: 0\r\n\r\n", EngineTimeout, "504"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{" + b"~" * 80, EngineTimeout, "fell silent"),
        (b"~" * 80, EngineTimeout, "did not answer"),
    ],
)
async def test_what_goes_wrong_is_said(at: tuple[Server, Wire], answer: bytes | None, error: type[Exception], words: str) -> None:
    server, wire = at
    server.answers = [answer]
    with pytest.raises(error, match=words):
        await wire.json("POST", "/x", b"1", retry=False)
    assert await wire.json("POST", "/x", b"2") == {}  # and the next request is none the worse


async def test_an_answer_without_a_length_ends_with_its_connection(at: tuple[Server, Wire]) -> None:
    server, wire = at
    server.answers = [b"HTTP/1.1 200 OK\r\nx: no-length\r\n\r\n[1,~2]", b"HTTP/1.1 100 Continue\r\n\r\n" + OK]
    assert await wire.json("POST", "/x", b"1") == [1, 2]
    assert await wire.json("POST", "/x", b"1") == {}
    assert server.connections == 2


async def test_an_answer_that_breaks_behind_its_head_is_not_asked_for_again(at: tuple[Server, Wire]) -> None:
    """The engine may have sampled by then."""
    server, wire = at
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n~"]
    with pytest.raises(EngineUnreachable, match="broke off"):
        await wire.json("POST", "/x", b"1")
    assert len(server.bodies) == 1


async def test_bytes_behind_an_answer_are_nobodys(at: tuple[Server, Wire]) -> None:
    server, wire = at
    server.answers = [OK + b"HTTP/1.1 500 Not yours\r\ncontent-length: 3\r\n\r\nbad", OK + b"HTTP/1.1 2"]
    for _ in range(3):
        assert await wire.json("POST", "/x", b"1") == {}
    assert server.connections == 3


async def test_silence_is_measured_from_the_last_request(at: tuple[Server, Wire]) -> None:
    """One timer serves a connection's requests; it neither cuts a later one short nor forgets it."""
    server, wire = at
    loop = asyncio.get_running_loop()
    await wire.json("POST", "/x", b"1")
    await asyncio.sleep(0.3)
    server.answers = [b"~" * 80]
    asked = loop.time()
    with pytest.raises(EngineTimeout, match="did not answer"):
        await wire.json("POST", "/x", b"2", retry=False)
    assert server.connections == 1 and 0.45 < loop.time() - asked < 2
    await wire.json("POST", "/x", b"3")
    (idle,) = wire._connections._idle
    await asyncio.sleep(0.7)
    assert idle._timer is None and idle.usable(loop), "an idle connection waits for nothing"


async def test_parts_are_sent_one_behind_the_other(at: tuple[Server, Wire]) -> None:
    server, wire = at
    for parts in ([b"a", b"", b"bc"], [b"1" * 70_000, b"2" * 70_000, b"3"], []):
        assert await wire.json("POST", "/x", parts) == {}
        assert server.bodies[-1] == b"".join(parts)


async def test_503_is_asked_again(at: tuple[Server, Wire]) -> None:
    server, wire = at
    server.answers = [b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", OK]
    assert await wire.json("POST", "/x", b"1") == {} and len(server.bodies) == 2 and server.connections == 1


async def test_events_of_any_shape(at: tuple[Server, Wire]) -> None:
    server, wire = at
    body = b'data: {"a"~: 1}\n\n: ping\n\ndata:[2]\r\n\r\nda~ta: 3\n\ndata: [DONE]\n\n'
    chunks = b"".join(b"%x\r\n%s\r\n~" % (len(part), part) for part in body.split(b"~"))
    server.answers = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"~0\r\n\r\n"]
    assert [event async for together in wire.events("/x", b"1") for event in together] == [{"a": 1}, [2], 3]
    await asyncio.sleep(0.1)  # the end of the body comes behind [DONE], and the connection is kept
    await wire.json("POST", "/x", b"1")
    assert server.connections == 1


async def test_the_end_of_the_answer_ends_its_last_line(at: tuple[Server, Wire]) -> None:
    server, wire = at
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\ndata: 1\n\nda~ta: 2"]
    assert [events async for events in wire.events("/x", b"1")] == [[1], [2]]


async def test_what_came_together_comes_together_and_before_what_went_wrong(at: tuple[Server, Wire]) -> None:
    server, wire = at
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 43\r\n\r\ndata: 1\n\n~data: 2\n\ndata: 3\n\ndata: {no\n\ndata: 4"]
    events = wire.events("/x", b"1")
    assert [await anext(events), await anext(events)] == [[1], [2, 3]]
    with pytest.raises(EngineContractError, match="not JSON"):
        await anext(events)


async def test_data_that_is_empty_is_not_json(at: tuple[Server, Wire]) -> None:
    server, wire = at
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\ndata:\n\n"]
    with pytest.raises(EngineContractError, match="not JSON"):
        await anext(wire.events("/x", b"1"))


async def test_a_reader_that_leaves_closes_its_connection(at: tuple[Server, Wire]) -> None:
    server, wire = at
    server.answers = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"9\r\ndata: 1\n\n\r\n~" * 50]
    events = wire.events("/x", b"1")
    assert await anext(events) == [1]
    await events.aclose()
    task = asyncio.ensure_future(wire.json("POST", "/x", b"1"))
    server.answers = [b"~" * 40]
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await wire.json("POST", "/x", b"1") == {} and server.connections == 3


UNENDED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"e\r\ndata: [DONE]\n\n\r\n" + b"~" * 300  # [DONE], and then no end


@pytest.mark.parametrize("answer", [OK, UNENDED])
async def test_closing_leaves_no_socket_behind(at: tuple[Server, Wire], answer: bytes) -> None:
    server, wire = at
    server.answers = [answer]
    if answer is OK:
        await wire.json("POST", "/x", b"1")
    else:
        assert [event async for event in wire.events("/x", b"1")] == []
    connections = wire._connections
    (kept,) = (*connections._idle, *connections._leaving)
    assert kept._transport is not None
    await wire.close()
    assert kept._transport is None and not connections._idle and not connections._leaving


async def test_a_connection_whose_end_never_comes_is_forgotten(at: tuple[Server, Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    server, wire = at
    monkeypatch.setattr("tokentrue.providers.connection.LEFT_S", 0.02)
    server.answers = [UNENDED]
    assert [event async for event in wire.events("/x", b"1")] == []
    assert len(wire._connections._leaving) == 1
    await asyncio.sleep(0.1)
    assert not wire._connections._leaving and not wire._connections._idle


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        Wire(url, timeout_s=1, connect_s=1, retries=0)


def test_no_header_can_be_smuggled_in() -> None:
    with pytest.raises(ConfigError, match="line break"):
        Wire("http://x", timeout_s=1, connect_s=1, retries=0, headers={"authorization": "Bearer a\r\nx: y"})
