"""The connections to an engine, against a server that does what engines, routers and failing machines do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tokentrue.errors import ConfigError, EngineContractError, EngineRejected, EngineTimeout, EngineUnreachable
from tokentrue.providers.remote import EngineHttp

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
async def at() -> AsyncIterator[tuple[Server, EngineHttp]]:
    server = Server()
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    http = EngineHttp(f"http://127.0.0.1:{port}/base", timeout_s=2, connect_s=5, retries=1, api_key="k")
    yield server, http
    await http.close()
    listening.close()


async def test_one_connection_serves_many_requests(at: tuple[Server, EngineHttp]) -> None:
    server, http = at
    server.answers = [OK, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{~\r\n1\r\n}\r\n0\r\n\r\n", OK]
    for body in (b"1", b"2" * 300_000, b""):
        assert await http.read("POST", "/x", body) == b"{}"
    assert server.connections == 1 and [len(body) for body in server.bodies] == [1, 300_000, 0]
    assert (
        server.heads[0].startswith(b"POST /base/x HTTP/1.1\r\nHost: 127.0.0.1")
        and b"authorization: Bearer k\r\n" in server.heads[0]
    )


async def test_requests_at_the_same_time_have_connections_of_their_own(at: tuple[Server, EngineHttp]) -> None:
    server, http = at
    await asyncio.gather(*(http.read("POST", "/x", b"1") for _ in range(5)))
    assert server.connections == 5
    await http.read("POST", "/x", b"1")
    assert server.connections == 5


async def test_an_idle_connection_that_the_server_closed_costs_no_attempt(at: tuple[Server, EngineHttp]) -> None:
    server, http = at
    await http.read("POST", "/x", b"1")
    server.answers = [None, OK]  # closed when the second request comes
    assert await http.read("POST", "/x", b"2", retry=False) == b"{}"
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (None, EngineUnreachable, "no engine is reachable"),
        (b"rubbish\r\n\r\n", EngineContractError, "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n{", EngineUnreachable, "broke off"),
        (b"HTTP/1.1 307 Elsewhere\r\nlocation: /y\r\ncontent-length: 0\r\n\r\n", EngineRejected, "307"),
        (b"HTTP/1.1 400 Bad\r\ncontent-length: 8\r\n\r\ntoo long", EngineRejected, "too long"),
        (b"HTTP/1.1 504 Slow\r\ncontent-length: 0\r\n\r\n", EngineTimeout, "504"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{" + b"~" * 320, EngineTimeout, "sent nothing"),
        (b"~" * 320, EngineTimeout, "did not answer"),
    ],
)
async def test_what_goes_wrong_is_said(
    at: tuple[Server, EngineHttp], answer: bytes | None, error: type[Exception], words: str
) -> None:
    server, http = at
    server.answers = [answer] * (2 if answer is None else 1)  # one closed connection may have been an idle one
    with pytest.raises(error, match=words):
        await http.read("POST", "/x", b"1", retry=False)
    assert await http.read("POST", "/x", b"2") == b"{}"  # and the next request is none the worse


async def test_a_reader_that_waits_is_not_an_engine_that_is_silent(at: tuple[Server, EngineHttp]) -> None:
    """The limit counts while a read waits: a client that does not read holds its stream for longer."""
    server, http = at
    quick = EngineHttp(http.url, timeout_s=0.5, connect_s=5, retries=0)
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\nx: no-length\r\n\r\n"
    server.answers = [head + b"data: 1\n\n~data: 2\n\n~data: 3\n\ndata: [DONE]\n\n", head + b"data: 1\n\n" + b"~" * 200]
    seen: list[bytes] = []
    async for events in quick.answers("/x", b"1"):
        seen += events
        await asyncio.sleep(0.8 if len(seen) == 1 else 0.0)
    assert seen == [b"1", b"2", b"3"]
    with pytest.raises(EngineTimeout, match="sent nothing"):  # the limit of one read
        async for events in quick.answers("/x", b"1"):
            seen += events
    assert seen[3:] == [b"1"]
    await quick.close()


async def test_an_answer_without_a_length_ends_with_its_connection(at: tuple[Server, EngineHttp]) -> None:
    server, http = at
    server.answers = [b"HTTP/1.1 200 OK\r\nx: no-length\r\n\r\n[1,~2]", b"HTTP/1.1 100 Continue\r\n\r\n" + OK]
    assert await http.read("POST", "/x", b"1") == b"[1,2]"
    assert await http.read("POST", "/x", b"1") == b"{}"
    assert server.connections == 2


async def test_an_answer_that_breaks_behind_its_head_is_not_asked_for_again(at: tuple[Server, EngineHttp]) -> None:
    """The engine may have sampled by then."""
    server, http = at
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n~"]
    with pytest.raises(EngineUnreachable, match="broke off"):
        await http.read("POST", "/x", b"1")
    assert len(server.bodies) == 1


async def test_503_is_asked_again(at: tuple[Server, EngineHttp]) -> None:
    server, http = at
    server.answers = [b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", OK]
    assert await http.read("POST", "/x", b"1") == b"{}" and len(server.bodies) == 2 and server.connections == 1


async def test_events_of_any_shape(at: tuple[Server, EngineHttp], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentrue.providers.remote.END_S", 5.0)  # a slow machine must not decide it
    server, http = at
    body = b'data: {"a"~: 1}\n\n: ping\n\ndata:[2]\r\n\r\nda~ta: 3\n\ndata: [DONE]\n\n'
    chunks = b"".join(b"%x\r\n%s\r\n~" % (len(part), part) for part in body.split(b"~"))
    server.answers = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"~0\r\n\r\n"]
    reads = [read async for read in http.answers("/x", b"1")]
    assert [event for read in reads for event in read] == [b'{"a": 1}', b"[2]", b"3"]
    await http.read("POST", "/x", b"1")  # the end of the body comes behind [DONE], and the connection is kept
    assert server.connections == 1


async def test_events_that_arrive_together_are_one_list(at: tuple[Server, EngineHttp]) -> None:
    """[DONE] may come with the last event, and an event in two reads: it belongs to the one that completes it."""
    server, http = at
    parts = [b"data: 1\n\ndata: 2\n\nda", b"ta: 3\n\ndata: 4\n\ndata: [DONE]\n\ndata: 5\n\n"]
    chunks = b"~~".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    server.answers = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n~" + chunks + b"0\r\n\r\n"]
    assert [read async for read in http.answers("/x", b"1")] == [[b"1", b"2"], [b"3", b"4"]]


async def test_the_end_of_the_answer_ends_its_last_line(at: tuple[Server, EngineHttp]) -> None:
    server, http = at
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\ndata: 1\n\nda~ta: 2"]
    assert [read async for read in http.answers("/x", b"1")] == [[b"1"], [b"2"]]


async def test_a_reader_that_leaves_closes_its_connection(at: tuple[Server, EngineHttp]) -> None:
    server, http = at
    server.answers = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"9\r\ndata: 1\n\n\r\n~" * 50]
    events = http.answers("/x", b"1")
    assert await anext(events) == [b"1"]
    await events.aclose()
    task = asyncio.ensure_future(http.read("POST", "/x", b"1"))
    server.answers = [b"~" * 40]
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await http.read("POST", "/x", b"1") == b"{}" and server.connections == 3


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://"])
def test_what_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of an engine"):
        EngineHttp(url, timeout_s=1, connect_s=1, retries=0)
