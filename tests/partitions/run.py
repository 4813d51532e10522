"""`python -m tests.partitions.run --seconds 600 --sessions 200`: three gateways on one PostgreSQL, agents that ask any
of them, and faults.

Faults come one after the other, at random: SIGKILL of a gateway, SIGSTOP for longer than its lease, a cut between it
and the database, restart of the database (in order, or at once). With `--namespaces` (as root) each gateway is in a
network namespace of its own, and a cut
takes its link down: to the database alone, or to everything. Without it a proxy passes nothing on and then resets the
connections. Agents retry under an idempotency key until a turn is acknowledged, and write what they were told to
history.jsonl, which `tests.partitions.check` compares with the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateway.test_load import NUMBER
from tests.gateway.test_workers import Engine
from tests.gateway.world import Server, model_dir
from tests.partitions.check import check
from tests.partitions.namespaces import BACK, FRONT, Namespace, make_namespaces
from tests.sessions.postgres_server import Server as Database
from tests.sessions.postgres_server import free_port, run_server

LEASE_S = 3.0
KEY = "partitions-admin-key-0123456789"


class CutProxy:
    """Between one gateway and the database. Cut: bytes stay where they are, as in a network that drops packets."""

    def __init__(self, target: int) -> None:
        self.port, self._target = free_port(), target
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(back)
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    def place(self, url: str) -> tuple[str, dict[str, Any]]:
        """The store as its gateway sees it, and where that gateway runs."""
        return url.replace(f":{self._target}/", f":{self.port}/"), {}

    async def cut(self, seconds: float, rng: random.Random) -> str:
        self._open.clear()
        await asyncio.sleep(seconds)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self._open.set()
        return "cut by a proxy"


class CutLink:
    """The same with a link of a network namespace."""

    def __init__(self, space: Namespace) -> None:
        self._space = space

    async def start(self) -> None: ...

    def place(self, url: str) -> tuple[str, dict[str, Any]]:
        return url, {"prefix": self._space.prefix, "host": self._space.address}

    async def cut(self, seconds: float, rng: random.Random) -> str:
        front = rng.random() < 0.5
        self._space.cut(front=front)
        await asyncio.sleep(seconds)
        self._space.mend()
        return "cut off from everything" if front else "cut off from the database"


class World:
    def __init__(
        self, folder: Path, database: Database, cuts: Sequence[CutProxy | CutLink], sessions: int, seed: int, host: str
    ) -> None:
        self.folder, self.database, self.sessions = folder, database, sessions
        self.rng = random.Random(seed)
        self.engine = Engine(folder, host=host)
        self.url = database.new_database("record", connect_timeout=5)
        self.cuts = cuts
        self.servers: list[Server] = []
        self.faults: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.told = 0
        self.history = (folder / "history.jsonl").open("w")

    async def start(self) -> None:
        for index, cut in enumerate(self.cuts):
            await cut.start()
            folder = self.folder / f"gateway{index}"
            folder.mkdir()
            store, place = cut.place(self.url)
            host = place.pop("host", "127.0.0.1")
            flags = (
                "--host",
                host,
                "--engine",
                "sglang",
                "--url",
                self.engine.url,
                "--model",
                str(model_dir()),
                "--store",
                store,
            )
            settings = ("--set", "server.log=off", "--set", f"server.lease_s={LEASE_S}")
            self.servers.append(
                await asyncio.to_thread(partial(Server, *flags, *settings, folder=folder, admin_key=KEY, **place))
            )

    async def play(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            agents = [asyncio.create_task(self._agent(client, f"s{number}", end)) for number in range(self.sessions)]
            faults = asyncio.create_task(self._break_things(end - 15))
            await asyncio.gather(*agents)
            await faults
        self.history.close()

    async def _agent(self, client: aiohttp.ClientSession, name: str, end: float) -> None:
        made = await self._ask(client, end, "/sessions", {"session_id": name}, KEY, "")
        key = "" if made is None else made.get("api_key", "")
        messages: list[Any] = [{"role": "user", "content": f"Task {name}."}]
        turn = 0
        while key and time.monotonic() < end:
            said = await self._ask(
                client, end + 60, "/v1/chat/completions", {"model": "m", "messages": messages}, key, f"turn-{turn}"
            )
            if said is None:
                return
            message = said["choices"][0]["message"]
            (number,) = NUMBER.findall(message["tool_calls"][0]["function"]["arguments"])
            print(
                json.dumps({"session": name, "turn": turn, "number": number, "node": said["node"]}),
                file=self.history,
                flush=True,
            )
            self.told += 1
            messages += [
                message,
                {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"line {turn}"},
            ]
            turn += 1
            await asyncio.sleep(self.rng.random() * 2)

    async def _ask(self, client: aiohttp.ClientSession, end: float, path: str, body: Any, key: str, name: str) -> Any:
        """To a gateway at random, again and again; None where time is up. A session that exists after all was made by a
        lost answer."""
        headers = {
            "authorization": f"Bearer {key}",
            "idempotency-key": name or "create",
            "content-type": "application/json",
        }
        while time.monotonic() < end:
            url = self.rng.choice(self.servers).url + path
            try:
                async with client.post(
                    url, data=json.dumps(body), headers=headers, timeout=aiohttp.ClientTimeout(total=20)
                ) as answer:
                    said = await answer.json(content_type=None)
                    self.statuses[f"{answer.status} {said.get('error', {}).get('code', '')}".strip()] += 1
                    if answer.status in (200, 201):
                        return {**said, "node": answer.headers.get("x-tokentrue-node")}
                    if answer.status == 409 and path == "/sessions":
                        return None
                    assert answer.status in (409, 429, 500, 502, 503, 504), (answer.status, said)
            except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError, AttributeError) as error:
                self.statuses[type(error).__name__] += 1
            await asyncio.sleep(0.2 + self.rng.random())
        return None

    async def _break_things(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(self.rng.uniform(2, 6))
            index = self.rng.randrange(len(self.servers))
            kind = self.rng.choice(["kill", "stop", "cut", "stop", "cut", "database"])
            self.faults[await getattr(self, f"_{kind}")(index)] += 1

    async def _kill(self, index: int) -> str:
        server = self.servers[index]
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(self.rng.uniform(0, LEASE_S + 2))
        await asyncio.to_thread(server.start)
        return "killed"

    async def _stop(self, index: int) -> str:
        process = self.servers[index].process
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S + self.rng.uniform(1, 4))
        process.send_signal(signal.SIGCONT)
        return "paused past the lease"

    async def _cut(self, index: int) -> str:
        return await self.cuts[index].cut(LEASE_S + self.rng.uniform(1, 8), self.rng)

    async def _database(self, _: int) -> str:
        await asyncio.to_thread(self.database.stop, self.rng.choice([signal.SIGINT, signal.SIGQUIT]))
        await asyncio.sleep(self.rng.uniform(0, 3))
        await asyncio.to_thread(self.database.start)
        return "database restarted"

    def close(self) -> None:
        for server in self.servers:
            server.process.send_signal(signal.SIGCONT)
            server.kill()
        self.engine.stop()


def run(*, seconds: float, sessions: int, gateways: int = 3, seed: int = 0, namespaces: bool = False) -> dict[str, Any]:
    """Raises AssertionError with what the checker found."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tokentrue-partitions-"))
        spaces = stack.enter_context(make_namespaces(gateways)) if namespaces else []
        database = stack.enter_context(run_server(fsync=True, host=f"{BACK}.1" if namespaces else "127.0.0.1"))
        cuts = [CutLink(space) for space in spaces] or [CutProxy(database.port) for _ in range(gateways)]
        world = World(Path(folder), database, cuts, sessions, seed, f"{FRONT}.1" if namespaces else "127.0.0.1")

        async def whole() -> None:
            await world.start()
            await world.play(seconds)

        try:
            asyncio.run(whole())
        finally:
            world.close()
        found, wrong = check(Path(folder) / "history.jsonl", world.url, model_dir() / "tokenizer.json")
        report = {**found, "faults": dict(world.faults), "answers": dict(world.statuses.most_common(12))}
        assert not wrong, (report, wrong[:20])
        return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag, default in (("--seconds", 600), ("--sessions", 200), ("--gateways", 3), ("--seed", 0)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument(
        "--namespaces", action="store_true", help="cut links of network namespaces; needs root and iproute2"
    )
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))
