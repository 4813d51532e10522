"""Load: 500 concurrent sessions × 20 turns on two cores; then the same with a failing, hanging engine and a gateway
that is killed.

Every generation of the stand-in engine carries a number of its own, so "nothing acknowledged is lost, nothing is
duplicated" is checked
token by token: what the clients heard, in order, is what the samples train. `make test-load` runs the full size.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gateway.test_workers import Engine
from tests.gateway.world import Server, model_dir, renderer, wait_until

NUMBER = re.compile(r"module_(\d+)")
RETRIED = {429, 500, 502, 503, 504}
GIVE_UP_S = 900.0
PATIENCE_S = 300.0  # 500 agents on two cores wait in line; an impatient client would only add work


@dataclass(slots=True)
class Heard:
    """What one agent was told: the engine's number of each turn."""

    session_id: str
    numbers: list[str] = field(default_factory=list)
    retries: int = 0


async def agent(client: aiohttp.ClientSession, url: str, made: dict[str, Any], turns: int, heard: Heard) -> Heard:
    messages: list[Any] = [
        {"role": "system", "content": "You mend programs."},
        {"role": "user", "content": f"Task {made['session_id']}."},
    ]
    for turn in range(turns):
        message = await acknowledged(client, url, made["api_key"], messages, f"turn-{turn}", heard)
        call = message["tool_calls"][0]
        heard.numbers.append(find_number(message))
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": f"line {turn}\n" * 20}]
    return heard


def find_number(message: dict[str, Any]) -> str:
    """The engine's own number of the generation that a message was made of."""
    found = NUMBER.search(message["tool_calls"][0]["function"]["arguments"])
    assert found is not None
    return found.group(1)


async def acknowledged(
    client: aiohttp.ClientSession, url: str, key: str, messages: list[Any], name: str, heard: Heard
) -> dict[str, Any]:
    """Retries as an SDK does, under one idempotency key, until the turn is acknowledged."""
    body = json.dumps({"model": "m", "messages": messages})
    headers = {"authorization": f"Bearer {key}", "idempotency-key": name, "content-type": "application/json"}
    end = time.monotonic() + GIVE_UP_S
    while True:
        try:
            async with client.post(
                f"{url}/v1/chat/completions",
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
            ) as answer:
                said = await answer.json(content_type=None)
                if answer.status == 200:
                    return said["choices"][0]["message"]
                assert answer.status in RETRIED, (answer.status, said)
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
            pass
        assert time.monotonic() < end, "a turn was never acknowledged"
        heard.retries += 1
        await asyncio.sleep(min(2.0, 0.1 * 2 ** min(heard.retries, 5)))


async def crowd(server: Server, sessions: int, turns: int, *, name: str = "load", during: Any = None) -> list[Heard]:
    """`during(works, heard)` runs beside the agents."""
    made = [
        await asyncio.to_thread(server.ask, "POST", "/sessions", {"session_id": f"{name}{n}"}) for n in range(sessions)
    ]
    heard = [Heard(answer["session_id"]) for _, answer in made]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        works = [
            asyncio.create_task(agent(client, server.url, answer, turns, one))
            for (_, answer), one in zip(made, heard, strict=True)
        ]
        if during is not None:
            await during(works, heard)
        return list(await asyncio.gather(*works))


def check(server: Server, heard: Sequence[Heard], turns: int, *, exact_coverage: bool) -> None:
    """Each session: one chain of exactly the turns that its agent heard, each trained once, in order."""
    for one in heard:
        answer = server.samples(one.session_id)
        if exact_coverage:
            assert answer["coverage"]["ratio"] == 1.0, answer["coverage"]
        main = max(answer["samples"], key=lambda sample: len(sample["token_ids"]))
        trained = [token for token, mask in zip(main["token_ids"], main["loss_mask"], strict=True) if mask]
        assert NUMBER.findall(renderer().decode(trained)) == one.numbers, one.session_id
        assert len(one.numbers) == turns
        every = [
            n
            for s in answer["samples"]
            for n in NUMBER.findall(
                renderer().decode([t for t, m in zip(s["token_ids"], s["loss_mask"], strict=True) if m])
            )
        ]
        assert len(every) == len(set(every)), "a sampled turn is trained twice"
        assert set(one.numbers) <= set(every)
    assert len({number for one in heard for number in one.numbers}) == len(heard) * turns, (
        "two turns share one generation"
    )


def memory_mb(server: Server) -> float:
    pages = int(Path(f"/proc/{server.serving_pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def serving(folder: Path, engine: Engine, *flags: str) -> Server:
    store = f"sqlite:{folder / 'journal.sqlite'}"
    base = ("--engine", "sglang", "--url", engine.url, "--model", str(model_dir()), "--store", store)
    return Server(*base, "--set", "server.log=off", *flags, folder=folder)


def calm(folder: Path, sessions: int, turns: int, *, rounds: int = 1) -> list[dict[str, float]]:
    """No error, full coverage, and memory that holds the live sessions and nothing else: a round more does not add to
    it."""
    engine = Engine(folder)
    server = serving(folder, engine, "--set", f"limits.live_sessions={sessions}")
    measured: list[dict[str, float]] = []
    try:
        for number in range(rounds):
            used = {"mb_at_0%": memory_mb(server)}
            started = time.monotonic()
            heard = asyncio.run(
                crowd(server, sessions, turns, name=f"round{number}-", during=weighed(server, sessions * turns, used))
            )
            seconds = time.monotonic() - started
            assert sum(one.retries for one in heard) == 0, "there were errors"
            used["mb_at_100%"] = memory_mb(server)
            check(server, heard, turns, exact_coverage=True)
            measured.append({"turns_per_s": sessions * turns / seconds, "seconds": seconds, **used})
            print({name: round(value, 1) for name, value in measured[-1].items()})
        assert "tokentrue_errors_total{" not in server.ask("GET", "/metrics")[1]
        return measured
    finally:
        assert server.stop() == 0
        engine.stop()


def weighed(server: Server, total: int, used: dict[str, float]) -> Any:
    """Notes the memory at each quarter of the way."""

    async def watch(works: list[asyncio.Task[Heard]], heard: Sequence[Heard]) -> None:
        for quarter in (25, 50, 75):
            while sum(len(one.numbers) for one in heard) < total * quarter / 100 and not all(
                work.done() for work in works
            ):
                await asyncio.sleep(0.1)
            used[f"mb_at_{quarter}%"] = memory_mb(server)

    return watch


def storm(folder: Path, sessions: int, turns: int, kills: int) -> dict[str, float]:
    """The engine fails 5% of calls and hangs on 1%; the gateway is killed with SIGKILL while it works."""
    engine = Engine(folder, fails=0.05, hangs=0.01, hang_s=30.0, seed=7)
    server = serving(folder, engine, "--set", "engine.options.timeout_s=4", "--set", "engine.options.retries=0")

    async def kill(works: list[asyncio.Task[Heard]], _: Sequence[Heard]) -> None:
        for _ in range(kills):
            await asyncio.sleep(4)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(wait_until, lambda: server.ask("GET", "/health")[0] == 200, seconds=60)
        assert not all(work.done() for work in works), "the kills came too late to matter"

    try:
        heard = asyncio.run(crowd(server, sessions, turns, during=kill))
        check(server, heard, turns, exact_coverage=True)
        return {"retries": float(sum(one.retries for one in heard))}
    finally:
        server.stop()
        engine.stop()


def test_a_small_crowd(tmp_path: Path) -> None:
    calm(tmp_path, sessions=10, turns=3)


@pytest.mark.load
@pytest.mark.timeout(1200)
def test_500_sessions_of_20_turns(tmp_path: Path) -> None:
    """Three rounds: each fills the memory with 500 live sessions, which take the place of the 500 before."""
    first, *later = calm(tmp_path, sessions=500, turns=20, rounds=3)
    for one in later:
        assert one["mb_at_100%"] <= 1.25 * first["mb_at_100%"], "memory grows with every round"
    assert later[-1]["mb_at_100%"] <= 1.08 * later[0]["mb_at_100%"], "memory grows with every round"


@pytest.mark.load
@pytest.mark.timeout(1800)
def test_500_sessions_in_a_storm(tmp_path: Path) -> None:
    print(storm(tmp_path, sessions=500, turns=20, kills=3))
