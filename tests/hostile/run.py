"""`python -m tests.hostile.run --minutes 20`: a gateway under mixed abuse, and agents that go on working meanwhile.

Quiet, under attack, and quiet again: the turns of eight agents are timed, and the gateway's resident memory is read twice a second.
Attackers run in a process of their own with the lowest priority, because elsewhere they have machines of their own. Exit code 1 where
memory exceeds the ceiling that the limits promise, an agent gets an error, or the p99 of the agents is more than three times the quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateway.test_load import memory_mb
from tests.gateway.test_workers import Engine
from tests.gateway.world import Server, model_dir
from tests.hostile.attacks import Target, attack_until

AGENTS = 8
LIMITS = {
    "bodies_bytes": 128 << 20,
    "message_caches_bytes": 64 << 20,
    "live_sessions_bytes": 128 << 20,
    "connections": 1024,
    "head_s": 10,
    "body_s": 20,
    "write_s": 10,
}
CEILING_MB = 900.0  # what the process has at rest, and three times the limits above: bytes, text and parsed values of a body


async def agent(client: aiohttp.ClientSession, server: Server, name: str, end: float, times: list[float], errors: list[str]) -> None:
    made = (await asyncio.to_thread(server.ask, "POST", "/sessions", {"session_id": name}))[1]
    headers = {"authorization": f"Bearer {made['api_key']}"}
    messages: list[Any] = [{"role": "user", "content": name}]
    while time.monotonic() < end:
        began = time.monotonic()
        async with client.post(f"{server.url}/v1/chat/completions", json={"model": "m", "messages": messages}, headers=headers) as answer:
            said = await answer.json(content_type=None)
            if answer.status != 200:
                errors.append(f"{answer.status} {said}")
                await asyncio.sleep(1)
                continue
        times.append(time.monotonic() - began)
        message = said["choices"][0]["message"]
        call = message["tool_calls"][0]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "line"}]
        if len(messages) > 40:
            messages = messages[:1]
        await asyncio.sleep(0.2)


async def watch_memory(server: Server, end: float, seen: list[float]) -> None:
    while time.monotonic() < end:
        seen.append(memory_mb(server))
        await asyncio.sleep(0.5)


async def work(server: Server, name: str, seconds: float) -> tuple[list[float], list[float], list[str]]:
    end = time.monotonic() + seconds
    times: list[float] = []
    seen: list[float] = []
    errors: list[str] = []
    async with aiohttp.ClientSession() as client:
        agents = [agent(client, server, f"{name}{number}", end, times, errors) for number in range(AGENTS)]
        await asyncio.gather(watch_memory(server, end, seen), *agents)
    return sorted(times), seen, errors


def attack(target: Target, seconds: float, results: Any) -> None:
    os.nice(19)
    counts: dict[str, int] = {}

    async def whole() -> None:
        await attack_until(target, asyncio.get_running_loop().time() + seconds, counts)

    asyncio.run(whole())
    results.put(counts)


def run(*, minutes: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tokentrue-hostile-") as folder:
        engine = Engine(Path(folder))
        flags = ("--engine", "sglang", "--url", engine.url, "--model", str(model_dir()), "--store", f"sqlite:{folder}/journal.sqlite")
        limits = [flag for name, value in LIMITS.items() for flag in ("--set", f"limits.{name}={value}")]
        server = Server(*flags, *limits, "--set", "server.log=off", folder=Path(folder), admin_key="hostile-admin-key-0123")
        try:
            asyncio.run(work(server, "warm", 5))
            seconds = minutes * 60
            quiet_s = min(60.0, seconds / 3)
            before, at_rest, errors = asyncio.run(work(server, "before", quiet_s))
            target = Target("127.0.0.1", server.port, server.session(session_id="abuse").api_key)
            context = multiprocessing.get_context("spawn")
            results = context.Queue()
            attackers = context.Process(target=attack, args=(target, seconds, results))
            attackers.start()
            attacked, memory, more = asyncio.run(work(server, "attacked", seconds))
            counts = results.get(timeout=60)
            attackers.join()
            later = round(asyncio.run(work(server, "later", 20))[1][-1])
            after, _, at_last = asyncio.run(work(server, "after", quiet_s))
            report = summarize(sorted(before + after), attacked, at_rest, memory, [*errors, *more, *at_last], counts)
            report["mb_20_s_later"] = later
            return report
        finally:
            server.stop()
            engine.stop()


def summarize(
    quiet: list[float], attacked: list[float], at_rest: list[float], memory: list[float], errors: list[str], counts: dict[str, int]
) -> dict[str, Any]:
    def at(times: list[float], share: float) -> float:
        return round(times[min(len(times) - 1, int(share * len(times)))] * 1000, 1)

    ratio = round(at(attacked, 0.99) / at(quiet, 0.99), 2)
    wrong = [f"memory {max(memory):.0f} MB > {CEILING_MB:.0f} MB"] if max(memory) > CEILING_MB else []
    wrong += [f"p99 is {ratio} times the quiet one"] if ratio > 3 else []
    wrong += errors[:5]
    return {
        "quiet": {"turns": len(quiet), "p50_ms": at(quiet, 0.5), "p99_ms": at(quiet, 0.99), "mb": round(max(at_rest))},
        "attacked": {"turns": len(attacked), "p50_ms": at(attacked, 0.5), "p99_ms": at(attacked, 0.99), "mb": round(max(memory))},
        "p99_ratio": ratio,
        "attacks": counts,
        "errors": len(errors),
        "wrong": wrong,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    found = run(minutes=parser.parse_args().minutes)
    print(json.dumps(found, indent=1))
    raise SystemExit(1 if found["wrong"] else 0)
