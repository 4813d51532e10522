"""Attackers as coroutines over raw sockets: each one connects, misbehaves in its own way, and begins again until time
is up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Attack = Callable[["Target", random.Random], Awaitable[None]]
CHUNK = b"x" * (64 << 10)


@dataclass(frozen=True, slots=True)
class Target:
    """The gateway, and the key of a session that the attackers own."""

    host: str
    port: int
    key: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    def head(
        self, length: int | None, *, key: str | None = None, path: str = "/v1/chat/completions", method: str = "POST"
    ) -> bytes:
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        return f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key or self.key}\r\n{framing}\r\n\r\n".encode()


async def send_until_closed(writer: asyncio.StreamWriter, piece: bytes, count: int) -> None:
    for _ in range(count):
        writer.write(piece)
        await writer.drain()


async def endless_trailers(target: Target, rng: random.Random) -> None:
    _, writer = await target.connect()
    writer.write(target.head(None) + b"0\r\n")
    await send_until_closed(writer, b"x-a: " + b"y" * 1000 + b"\r\n", 20_000)


async def large_body_without_key(target: Target, rng: random.Random) -> None:
    _, writer = await target.connect()
    writer.write(target.head(60 << 20, key="tt-nobody-" + "0" * 40))
    await send_until_closed(writer, CHUNK, 960)


async def large_body_with_key(target: Target, rng: random.Random) -> None:
    """Each body is different, so that nothing is joined and everything could be remembered."""
    reader, writer = await target.connect()
    content = f"{rng.random()} " + "word " * 400_000
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    writer.write(target.head(len(body)) + body)
    await writer.drain()
    await reader.read(100)
    await asyncio.sleep(1)


async def large_head(target: Target, rng: random.Random) -> None:
    _, writer = await target.connect()
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    await send_until_closed(writer, b"x-a: " + b"y" * 8000 + b"\r\n", 100)


async def slow_head(target: Target, rng: random.Random) -> None:
    _, writer = await target.connect()
    await _drip(writer, b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")


async def slow_body(target: Target, rng: random.Random) -> None:
    _, writer = await target.connect()
    await _drip(writer, target.head(1 << 20) + b'{"model": "m", "messages": [')


async def _drip(writer: asyncio.StreamWriter, first: bytes) -> None:
    writer.write(first)
    for _ in range(120):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.5)


async def never_reads(target: Target, rng: random.Random) -> None:
    _, writer = await target.connect()
    body = json.dumps(
        {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"go {rng.random()}"}]}
    ).encode()
    writer.write(target.head(len(body)) + body)
    await writer.drain()
    await asyncio.sleep(20)


async def pipelines(target: Target, rng: random.Random) -> None:
    _, writer = await target.connect()
    await asyncio.wait_for(send_until_closed(writer, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 500, 200), 10)


async def connects_and_resets(target: Target, rng: random.Random) -> None:
    for _ in range(20):
        _, writer = await target.connect()
        writer.write(b"POST ")
        writer.transport.abort()
        await asyncio.sleep(0.02)


async def garbage(target: Target, rng: random.Random) -> None:
    reader, writer = await target.connect()
    writer.write(rng.randbytes(4096) + b"\r\n\r\n")
    await reader.read(1000)


async def wrong_keys(target: Target, rng: random.Random) -> None:
    reader, writer = await target.connect()
    for _ in range(20):
        writer.write(target.head(2, key=f"tt-s{rng.randrange(99)}-{rng.randbytes(20).hex()}") + b"{}")
        await reader.read(4096)
        await asyncio.sleep(0.05)


async def deep_json(target: Target, rng: random.Random) -> None:
    reader, writer = await target.connect()
    body = b'{"model": "m", "messages": ' + b"[" * 500_000
    writer.write(target.head(len(body)) + body)
    await writer.drain()
    await reader.read(1000)


ATTACKS: dict[Attack, int] = {  # and how many of each at once
    endless_trailers: 2,
    large_body_without_key: 4,
    large_body_with_key: 1,
    large_head: 2,
    slow_head: 100,
    slow_body: 50,
    never_reads: 20,
    pipelines: 1,
    connects_and_resets: 2,
    garbage: 2,
    wrong_keys: 4,
    deep_json: 1,
}


async def attack_until(target: Target, end: float, counts: dict[str, int]) -> None:
    async def repeat(attack: Attack, rng: random.Random) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < end:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                await asyncio.wait_for(attack(target, rng), 60)
            counts[attack.__name__] = counts.get(attack.__name__, 0) + 1
            await asyncio.sleep(0.3 + rng.random())

    tasks = [
        asyncio.create_task(repeat(attack, random.Random(number)))
        for attack, many in ATTACKS.items()
        for number in range(many)
    ]
    await asyncio.wait(tasks, timeout=max(0.0, end - asyncio.get_running_loop().time()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
