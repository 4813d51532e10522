"""`python -m tests.load.many_gateways --sessions 2000`: concurrent sessions on one gateway with SQLite, then on two
with PostgreSQL.

The engine is the stand-in of `python -m benchmarks.gateway`, which answers at once; agents, gateways, engine and database
share the machine. Every agent sends its next turn as soon as it has the answer; with `--anywhere` to a gateway at
random, so that half of the requests are forwarded to the gateway that owns the session. Exit code 1 where a turn was
retried, or where one of a hundred sessions does not train exactly what its agent heard.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateway.test_load import Heard, acknowledged, check, find_number, memory_mb
from tests.gateway.test_workers import Engine
from tests.gateway.world import Server, model_dir
from tests.sessions.postgres_server import run_server

KEY = "load-admin-key-0123456789"
CREATED_AT_ONCE = 32
CHECKED = 100  # sessions whose samples are compared with what their agents heard


def cpu_s(server: Server) -> float:
    """Processor time of a gateway so far."""
    fields = Path(f"/proc/{server.serving_pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def play(
    servers: Sequence[Server], sessions: int, turns: int, *, anywhere: bool
) -> tuple[list[Heard], dict[str, Any]]:
    rng = random.Random(0)
    times: list[float] = []
    memory = [0.0] * len(servers)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        gate = asyncio.Semaphore(CREATED_AT_ONCE)

        async def create(number: int) -> dict[str, Any]:
            url = servers[number % len(servers)].url + "/sessions"
            async with (
                gate,
                client.post(
                    url, json={"session_id": f"load{number}"}, headers={"authorization": f"Bearer {KEY}"}
                ) as answer,
            ):
                assert answer.status == 201, await answer.text()
                return await answer.json()

        async def run(number: int, made: dict[str, Any]) -> Heard:
            heard = Heard(made["session_id"])
            messages: list[Any] = [
                {"role": "system", "content": "You mend programs."},
                {"role": "user", "content": f"Task {heard.session_id}."},
            ]
            for turn in range(turns):
                server = rng.choice(servers) if anywhere else servers[number % len(servers)]
                began = time.monotonic()
                message = await acknowledged(client, server.url, made["api_key"], messages, f"turn-{turn}", heard)
                times.append(time.monotonic() - began)
                heard.numbers.append(find_number(message))
                result = {
                    "role": "tool",
                    "tool_call_id": message["tool_calls"][0]["id"],
                    "content": f"line {turn}\n" * 20,
                }
                messages += [message, result]
            return heard

        async def watch() -> None:
            while True:
                memory[:] = [max(most, memory_mb(server)) for most, server in zip(memory, servers, strict=True)]
                await asyncio.sleep(0.5)

        made = await asyncio.gather(*(create(number) for number in range(sessions)))
        watching = asyncio.create_task(watch())
        began, spent = time.monotonic(), sum(map(cpu_s, servers))
        heard = await asyncio.gather(*(run(number, one) for number, one in enumerate(made)))
        seconds = time.monotonic() - began
        spent = sum(map(cpu_s, servers)) - spent
        watching.cancel()
    ordered = sorted(times)
    figures = {
        "turns_per_s": round(len(times) / seconds, 1),
        "p50_ms": round(ordered[len(ordered) // 2] * 1000),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1000),
        "turns_per_core_s": round(len(times) / spent, 1),
        "mb_per_gateway": [round(most) for most in memory],
        "retries": sum(one.retries for one in heard),
    }
    return heard, figures


def measure(store: str, gateways: int, folder: Path, sessions: int, turns: int, *, anywhere: bool) -> dict[str, Any]:
    engine = Engine(folder)
    servers: list[Server] = []
    try:
        for number in range(gateways):
            own = folder / f"gateway{number}"
            own.mkdir(parents=True)
            flags = ("--engine", "sglang", "--url", engine.url, "--model", str(model_dir()), "--store", store)
            limits = ("--set", f"limits.in_flight={2 * sessions}", "--set", f"limits.connections={4 * sessions}")
            servers.append(Server(*flags, *limits, "--set", "server.log=off", folder=own, admin_key=KEY))
        at_rest = [round(memory_mb(server)) for server in servers]
        heard, figures = asyncio.run(play(servers, sessions, turns, anywhere=anywhere))
        check(servers[0], random.Random(1).sample(heard, min(CHECKED, len(heard))), turns, exact_coverage=True)
        grown = sum(figures["mb_per_gateway"]) - sum(at_rest)
        return {
            "store": store.partition(":")[0],
            "gateways": gateways,
            **figures,
            "mb_at_rest": at_rest,
            "kb_per_session": round(1000 * grown / sessions),
        }
    finally:
        for server in servers:
            server.stop()
        engine.stop()


def run(*, sessions: int, turns: int, anywhere: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokentrue-load-")))
        (folder / "one").mkdir()
        found.append(measure(f"sqlite:{folder}/journal.sqlite", 1, folder / "one", sessions, turns, anywhere=anywhere))
        database = stack.enter_context(run_server(fsync=True))
        (folder / "two").mkdir()
        found.append(measure(database.new_database("record"), 2, folder / "two", sessions, turns, anywhere=anywhere))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--anywhere", action="store_true")
    rows = run(**vars(parser.parse_args()))
    for row in rows:
        print(json.dumps(row))
    raise SystemExit(1 if any(row["retries"] for row in rows) else 0)
