"""`python -m tests.hostile.run --minutes 20`: a gateway under mixed abuse, and agents that go on working meanwhile.

Rounds of quiet and attack in turn, so that a host that is busy elsewhere slows both: the turns of eight agents are
timed, and the gateway's resident memory is read twice a second. The report says how much of the CPU time the host
withheld (steal), and has the same figures for the
turns during which it withheld next to nothing: they must pass, too.
Attackers run in a process of their own with the lowest priority, because elsewhere they have machines of their own.
Exit code 1 where memory exceeds the ceiling that the limits promise, an agent gets an error, or the p99 of the agents
is more than three times the quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateway.test_load import memory_mb
from tests.gateway.test_workers import Engine
from tests.gateway.world import Server, model_dir
from tests.hostile.attacks import Target, attack_until

AGENTS = 8
ROUND_S = 60.0  # of attack; a quiet phase takes a quarter of it
MOST_RATIO = 3.0  # p99 under attack to p99 quiet
STOLEN = 0.05  # share of the CPU time of half a second; turns in such a half second, or a better one, are compared by themselves, too
SETTLE_S = 5.0  # not measured: what the attackers left is given up meanwhile
LIMITS = {
    "bodies_bytes": 128 << 20,
    "message_caches_bytes": 64 << 20,
    "live_sessions_bytes": 128 << 20,
    "connections": 1024,
    "head_s": 10,
    "body_s": 20,
    "write_s": 10,
}
Turn = tuple[float, float]  # when it began and ended
CEILING_MB = (
    900.0  # what the process has at rest, and three times the limits above: bytes, text and parsed values of a body
)


async def agent(
    client: aiohttp.ClientSession, server: Server, name: str, end: float, turns: list[Turn], errors: list[str]
) -> None:
    made = (await asyncio.to_thread(server.ask, "POST", "/sessions", {"session_id": name}))[1]
    headers = {"authorization": f"Bearer {made['api_key']}"}
    messages: list[Any] = [{"role": "user", "content": name}]
    while time.monotonic() < end:
        began = time.monotonic()
        async with client.post(
            f"{server.url}/v1/chat/completions", json={"model": "m", "messages": messages}, headers=headers
        ) as answer:
            said = await answer.json(content_type=None)
            if answer.status != 200:
                errors.append(f"{answer.status} {said}")
                await asyncio.sleep(1)
                continue
        turns.append((began, time.monotonic()))
        message = said["choices"][0]["message"]
        call = message["tool_calls"][0]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "line"}]
        if len(messages) > 40:
            messages = messages[:1]
        await asyncio.sleep(0.2)


def read_cpu() -> tuple[float, float]:
    """(stolen, all) CPU time of this machine so far, in ticks."""
    fields = [float(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[7], sum(fields)


class Phase:
    """What agents saw in all rounds of one kind."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, name
        self.rounds = 0
        self.turns: list[Turn] = []
        self.memory: list[float] = []
        self.stolen: list[tuple[float, float, float]] = []  # from, to, share of the CPU time that was withheld
        self.errors: list[str] = []

    async def work(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.rounds += 1
        names = [f"{self.name}{self.rounds}-{number}" for number in range(AGENTS)]
        async with aiohttp.ClientSession() as client:
            agents = [agent(client, self.server, name, end, self.turns, self.errors) for name in names]
            await asyncio.gather(self._watch(end), *agents)

    async def _watch(self, end: float) -> None:
        while time.monotonic() < end:
            began, (stolen, ticks) = time.monotonic(), read_cpu()
            await asyncio.sleep(0.5)
            now_stolen, now_ticks = read_cpu()
            self.stolen.append((began, time.monotonic(), (now_stolen - stolen) / (now_ticks - ticks)))
            self.memory.append(memory_mb(self.server))

    def undisturbed(self) -> list[Turn]:
        """The turns during which the host withheld next to nothing."""
        kept: list[Turn] = []
        for began, ended in self.turns:
            shares = [share for start, stop, share in self.stolen if start < ended and began < stop]
            if shares and max(shares) <= STOLEN:
                kept.append((began, ended))
        return kept


def p_ms(turns: list[Turn], share: float) -> float:
    times = sorted(ended - began for began, ended in turns)
    return round(times[min(len(times) - 1, int(share * len(times)))] * 1000, 1) if times else math.nan


def compare(quiet: list[Turn], attacked: list[Turn]) -> dict[str, Any]:
    figures = {name: {"turns": len(turns), "p50_ms": p_ms(turns, 0.5), "p99_ms": p_ms(turns, 0.99)} for name, turns in
               (("quiet", quiet), ("attacked", attacked))}  # fmt: skip
    return {**figures, "p99_ratio": round(p_ms(attacked, 0.99) / p_ms(quiet, 0.99), 2)}


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
        flags = (
            "--engine",
            "sglang",
            "--url",
            engine.url,
            "--model",
            str(model_dir()),
            "--store",
            f"sqlite:{folder}/journal.sqlite",
        )
        limits = [flag for name, value in LIMITS.items() for flag in ("--set", f"limits.{name}={value}")]
        server = Server(
            *flags, *limits, "--set", "server.log=off", folder=Path(folder), admin_key="hostile-admin-key-0123"
        )
        try:
            return measure(server, minutes=minutes)
        finally:
            server.stop()
            engine.stop()


def measure(server: Server, *, minutes: float) -> dict[str, Any]:
    unmeasured, quiet, attacked = Phase(server, "unmeasured"), Phase(server, "quiet"), Phase(server, "attacked")
    asyncio.run(unmeasured.work(SETTLE_S))
    target = Target("127.0.0.1", server.port, server.session(session_id="abuse").api_key)
    counts: Counter[str] = Counter()
    rounds = max(1, round(minutes * 60 / ROUND_S))
    seconds = minutes * 60 / rounds
    for _ in range(rounds):
        asyncio.run(quiet.work(seconds / 4))
        counts.update(attack_while(target, seconds, attacked))
        asyncio.run(unmeasured.work(SETTLE_S))
    asyncio.run(quiet.work(seconds / 4))
    return summarize(quiet, attacked, counts)


def attack_while(target: Target, seconds: float, attacked: Phase) -> dict[str, int]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    attackers = context.Process(target=attack, args=(target, seconds, results))
    attackers.start()
    asyncio.run(attacked.work(seconds))
    counts = results.get(timeout=60)
    attackers.join()
    return counts


def summarize(quiet: Phase, attacked: Phase, counts: Counter[str]) -> dict[str, Any]:
    every = compare(quiet.turns, attacked.turns)
    undisturbed = compare(quiet.undisturbed(), attacked.undisturbed())
    highest = max(attacked.memory)
    errors = quiet.errors + attacked.errors
    wrong = [f"memory {highest:.0f} MB > {CEILING_MB:.0f} MB"] if highest > CEILING_MB else []
    for name, found in (("every turn", every), ("undisturbed turns", undisturbed)):
        wrong += [f"{name}: p99 is {found['p99_ratio']} times the quiet one"] if found["p99_ratio"] > MOST_RATIO else []
    return {
        **every,
        "undisturbed": undisturbed,
        "stolen": {
            phase.name: round(statistics.mean(share for *_, share in phase.stolen), 3) for phase in (quiet, attacked)
        },
        "mb": {"quiet": round(max(quiet.memory)), "attacked": round(highest), "at_last": round(quiet.memory[-1])},
        "attacks": counts,
        "errors": len(errors),
        "wrong": [*wrong, *errors[:5]],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    found = run(minutes=parser.parse_args().minutes)
    print(json.dumps(found, indent=1))
    raise SystemExit(1 if found["wrong"] else 0)
