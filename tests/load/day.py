"""`python -m tests.load.day`: twenty-four hours of sessions compressed into one run of minutes.

Each hour is a round of sessions of several turns, ended by a reward and DELETE as a rollout ends them. Sessions leave
the memory after the compressed form of `limits.idle_session_s`, so every hour takes the same time, however fast the
machine is meanwhile. After each hour the gateway's memory and the size of the journal are read. Exit code 1 where a
turn failed, memory of the last six hours exceeds that of hours 7 to 12 by more than 5%, or the journal's size at the
end differs by more than 2% from what hours 1 to 4 predict.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateway.test_load import Heard, acknowledged, memory_mb
from tests.gateway.test_workers import Engine
from tests.gateway.world import Server, model_dir

HOURS = 24
AT_ONCE = 16
IDLE_S = 20.0  # of a compressed hour
KEY = "day-admin-key-0123456789"


async def play_hour(server: Server, hour: int, sessions: int, turns: int) -> int:
    """One hour's sessions; how many turns were retried."""
    gate = asyncio.Semaphore(AT_ONCE)
    admin = {"authorization": f"Bearer {KEY}"}

    async def run(client: aiohttp.ClientSession, number: int) -> int:
        async with gate:
            heard = Heard(f"hour{hour:02d}-{number:05d}")
            async with client.post(
                f"{server.url}/sessions", json={"session_id": heard.session_id}, headers=admin
            ) as answer:
                made = await answer.json()
            messages: list[Any] = [{"role": "user", "content": f"Task {number:05d} of hour {hour:02d}."}]
            for turn in range(turns):
                message = await acknowledged(client, server.url, made["api_key"], messages, f"turn-{turn}", heard)
                result = {
                    "role": "tool",
                    "tool_call_id": message["tool_calls"][0]["id"],
                    "content": f"line {number % 10}{turn}\n" * 40,
                }
                messages += [message, result]
            path = f"{server.url}/sessions/{heard.session_id}"
            for request in (
                client.post(f"{path}/reward", json={"reward": 1.0}, headers=admin),
                client.delete(path, headers=admin),
            ):
                async with request as answer:
                    assert answer.status == 200, await answer.text()
            return heard.retries

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        return sum(await asyncio.gather(*(run(client, number) for number in range(sessions))))


def journal_mb(path: Path) -> float:
    """Of its pages as a reader sees them. The files hold the write-ahead log as well, which grows to a few megabytes
    and is used again."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        pages, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return pages * size / 1e6


def run(*, sessions: int, turns: int, hour_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tokentrue-day-") as name:
        folder = Path(name)
        engine, store = Engine(folder), folder / "journal.sqlite"
        flags = ("--engine", "sglang", "--url", engine.url, "--model", str(model_dir()), "--store", f"sqlite:{store}")
        server = Server(
            *flags, "--set", f"limits.idle_session_s={IDLE_S}", "--set", "server.log=off", folder=folder, admin_key=KEY
        )
        memory: list[float] = []
        sizes: list[float] = [journal_mb(store)]
        retries, began = 0, time.monotonic()
        try:
            for hour in range(HOURS):
                retries += asyncio.run(play_hour(server, hour, sessions, turns))
                time.sleep(max(0.0, began + hour_s * (hour + 1) - time.monotonic()))
                memory.append(memory_mb(server))
                sizes.append(journal_mb(store))
                print(
                    json.dumps({"hour": hour + 1, "mb": round(memory[-1]), "journal_mb": round(sizes[-1], 1)}),
                    flush=True,
                )
        finally:
            server.stop()
            engine.stop()
        return summarize(memory, sizes, retries, sessions * turns * HOURS, time.monotonic() - began)


def summarize(memory: list[float], sizes: list[float], retries: int, turns: int, seconds: float) -> dict[str, Any]:
    predicted = sizes[4] + (sizes[4] - sizes[1]) / 3 * (HOURS - 4)
    before, late = max(memory[6:12]), max(memory[18:])
    wrong = [f"memory grew from {before:.0f} to {late:.0f} MB"] if late > 1.05 * before else []
    wrong += (
        [f"the journal has {sizes[-1]:.1f} MB, predicted {predicted:.1f}"]
        if abs(sizes[-1] / predicted - 1) > 0.02
        else []
    )
    wrong += [f"{retries} turns were retried"] if retries else []
    return {
        "turns": turns,
        "seconds": round(seconds),
        "turns_per_s": round(turns / seconds, 1),
        "mb_hours_7_to_12": round(before),
        "mb_hours_19_to_24": round(late),
        "journal_mb": round(sizes[-1], 1),
        "journal_mb_predicted": round(predicted, 1),
        "journal_bytes_per_turn": round((sizes[-1] - sizes[0]) * 1e6 / turns),
        "wrong": wrong,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=250, help="of each hour")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--hour-s", type=float, default=20.0, help="how long a compressed hour takes at least")
    found = run(**vars(parser.parse_args()))
    print(json.dumps(found, indent=1))
    raise SystemExit(1 if found["wrong"] else 0)
