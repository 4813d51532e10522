"""The parent of several workers gives a connection to the owner of its session."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import wait

import pytest

from tokentrue.gateway.auth import new_session_key
from tokentrue.gateway.serving.forwarding import find_owner
from tokentrue.gateway.serving.processes import Dispatcher

WORKERS = 3


@pytest.fixture
def public() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def dispatcher(public: socket.socket) -> Iterator[Dispatcher]:
    made = Dispatcher(public, WORKERS)
    yield made
    made.close()


def connect(public: socket.socket, head: bytes) -> socket.socket:
    client = socket.create_connection(public.getsockname())
    client.sendall(head)
    return client


def run(dispatcher: Dispatcher, seconds: float = 0.3) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        timeout_s = dispatcher.timeout_s
        dispatcher.dispatch(wait(dispatcher.waits_for, left if timeout_s is None else min(left, timeout_s)))


def received(dispatcher: Dispatcher) -> list[tuple[int, bytes]]:
    """Worker and first bytes of every connection that was passed on."""
    found = []
    for number, receiver in enumerate(dispatcher.receivers):
        while True:
            try:
                _, descriptors, _, _ = socket.recv_fds(receiver, 1, 1)
            except BlockingIOError:
                break
            with socket.socket(fileno=descriptors[0]) as connection:
                connection.setblocking(False)
                try:
                    found.append((number, connection.recv(1 << 16)))
                except BlockingIOError:
                    found.append((number, b""))
    return found


HEADS = {
    "path": "POST /sessions/{id}/v1/chat/completions HTTP/1.1\r\nhost: a\r\n\r\n",
    "path without a slash": "GET /sessions/{id}?x=1 HTTP/1.1\r\n\r\n",
    "bearer": "POST /v1/responses HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\r\n",
    "x-api-key": "POST /v1/messages HTTP/1.1\r\nHost: a\r\nX-Api-Key:{key}\r\ncontent-length: 3\r\n\r\nabc",
    "google": "POST /v1beta/models/m:generateContent HTTP/1.1\r\nx-goog-api-key: {key}\r\n\r\n",
    "header": "POST /v1/responses HTTP/1.1\r\nauthorization: Bearer the-admin-key\r\nX-Session-ID: {id}\r\n\r\n",
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_connection_goes_to_the_owner_of_its_session(
    public: socket.socket, dispatcher: Dispatcher, kind: str
) -> None:
    ids = [f"session-{n}" for n in range(12)]
    heads = [HEADS[kind].format(id=each, key=new_session_key(each)).encode() for each in ids]
    clients = [connect(public, head) for head in heads]
    run(dispatcher)
    expected = sorted((find_owner(each, WORKERS), head) for each, head in zip(ids, heads, strict=True))
    assert sorted(received(dispatcher)) == expected
    assert len({number for number, _ in expected}) == WORKERS
    for client in clients:
        client.close()


def test_connections_that_name_no_session_go_round(public: socket.socket, dispatcher: Dispatcher) -> None:
    """Nor does one wait for ever that sends nothing, sends no HTTP, or closes at once."""
    heads = [b"POST /sessions HTTP/1.1\r\n\r\n", b"", b"\x16\x03\x01", b"GET /health HTTP/1.1\r\n\r\n", b"\r\n:", b""]
    clients = [connect(public, head) for head in heads]
    clients[-1].close()
    run(dispatcher, 1.2)
    found = received(dispatcher)
    assert sorted(body for _, body in found) == sorted(heads)
    assert sorted(number for number, _ in found) == [0, 0, 1, 1, 2, 2]
    for client in clients:
        client.close()


def test_before_a_fork_nothing_is_held(public: socket.socket, dispatcher: Dispatcher) -> None:
    with connect(public, b""):
        run(dispatcher, 0.1)
        assert len(dispatcher.waits_for) == 2
        dispatcher.pass_on_all()
        assert dispatcher.waits_for == [public]
        assert len(received(dispatcher)) == 1


def test_a_worker_that_takes_no_connection_does_not_stop_the_others(
    public: socket.socket, dispatcher: Dispatcher
) -> None:
    of_first = next(f"s{n}" for n in range(99) if find_owner(f"s{n}", WORKERS) == 0)
    of_second = next(f"s{n}" for n in range(99) if find_owner(f"s{n}", WORKERS) == 1)
    for _ in range(600):
        connect(public, f"GET /sessions/{of_first} HTTP/1.1\r\n\r\n".encode()).close()
        run(dispatcher, 0.001)
    client = connect(public, f"GET /sessions/{of_second} HTTP/1.1\r\n\r\n".encode())
    run(dispatcher)
    assert 1 in [number for number, _ in received(dispatcher)]
    client.close()
