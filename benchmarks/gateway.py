"""What the gateway adds to a turn, against a bare reverse proxy in the same run: `python -m benchmarks.gateway`.

Processes on one machine: this client, an engine stand-in (SGLang's wire format, answers at once), the gateway, and a
proxy on the same server and client libraries. Agents run conversations with one tool call per turn; each turn goes to
the gateway and to the proxy, one after the other, so that both see the same noise. CPU time is the kernel's own account
of each process. `--set key=value` starts a second gateway with that setting (a cache switched off, say) and measures it
in the same run.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from benchmarks import Report, parser_for, print_reports
from benchmarks.conversations import (
    PATH,
    Agent,
    HttpClient,
    message_from_answer,
    message_from_stream,
    open_session,
    read_pages,
)
from benchmarks.servers import ServerProcess, bench_model, others_cpu_s, standin_settings

# Conversations up to this turn are played by more agents than longer ones, which take most of the time.
SHORT, LONG_AGENTS = 32, 2
WINDOW = 4  # turns on either side of a mark that count for it
QUIET = 0.1  # cores that other processes may keep busy before the figures are doubtful
CONCURRENT_AGENTS, CONCURRENT_TURNS = 64, 12


@dataclass(slots=True)
class Figures:
    """Seconds by mark, of one server."""

    whole: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    first: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    turns_per_s: float = 0.0


def run(*, quick: bool = False, settings: Sequence[str] = ()) -> list[Report]:
    marks = (8, 32) if quick else (8, 32, 128, 256)
    with (
        tempfile.TemporaryDirectory(prefix="tokentrue-bench-") as folder,
        start_servers(Path(folder), settings) as servers,
    ):
        started, before = time.perf_counter(), others_cpu_s(servers)
        figures, tokens = asyncio.run(measure(servers, marks, agents=4 if quick else 6))
        busy = (others_cpu_s(servers) - before) / (time.perf_counter() - started)
    note = f"other processes kept {busy:.2f} of {os.cpu_count()} cores busy" + (
        "; measure again when it is quiet" if busy > QUIET else ""
    )
    return [report_latency(figures, marks, tokens, note), report_first_byte(figures), report_throughput(figures)]


@contextmanager
def start_servers(folder: Path, settings: Sequence[str]) -> Iterator[dict[str, ServerProcess]]:
    """The engine stand-in, the proxy, the gateway, and a second gateway with `settings` where any are given."""
    model, key = bench_model(), secrets.token_hex(16)
    standin = folder / "standin.json"
    standin.write_text(json.dumps(standin_settings(model)))
    servers: dict[str, ServerProcess] = {}
    try:
        servers["engine"] = ServerProcess("benchmarks.standin", str(standin))
        url = f"http://127.0.0.1:{servers['engine'].port}"
        servers["proxy"] = ServerProcess("benchmarks.bare_proxy", url)
        for name, extra in {"gateway": (), **({"changed": tuple(settings)} if settings else {})}.items():
            store = f"sqlite:{folder / name}.sqlite"
            flags = ["--engine", "sglang", "--url", url, "--model", model, "--port", "0", "--store", store]
            sets = [word for setting in extra for word in ("--set", setting)]
            servers[name] = ServerProcess("tokentrue", "serve", *flags, *sets, admin_key=key)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


async def measure(
    servers: dict[str, ServerProcess], marks: Sequence[int], *, agents: int
) -> tuple[dict[str, Figures], dict[int, int]]:
    """Figures of every server, and the prompt tokens at each mark."""
    measured = {name: server for name, server in servers.items() if name != "engine"}
    await play(measured, marks[:1], {name: Figures() for name in measured}, {})  # warm-up: not counted
    figures, tokens = {name: Figures() for name in measured}, dict[int, int]()
    short, long = [mark for mark in marks if mark <= SHORT], [mark for mark in marks if mark > SHORT]
    for _ in range(agents):
        await play(measured, short, figures, tokens)
        await play_streamed(measured, short, figures)
    for _ in range(LONG_AGENTS if long else 0):
        await play(measured, long, figures, tokens)
        await play_streamed(measured, [mark for mark in long if mark <= 128], figures)
    for name, server in measured.items():
        figures[name].turns_per_s = await measure_throughput(server)
    return figures, tokens


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One agent at one server. The proxy keeps no sessions: it is sent what the gateway is sent."""

    client: HttpClient
    key: str
    agent: Agent


async def open_conversation(server: ServerProcess) -> Conversation:
    client, key = await open_session(server.port, server.admin_key)
    return Conversation(client=client, key=key, agent=Agent(read_pages()))


async def play(
    servers: dict[str, ServerProcess], marks: Sequence[int], figures: dict[str, Figures], tokens: dict[int, int]
) -> None:
    talks = {name: await open_conversation(server) for name, server in servers.items()}
    for turn in range(1, max(marks) + WINDOW + 1):
        mark = mark_near(turn, marks)
        for name, talk in talks.items():
            body = talks["gateway"].agent.body() if name == "proxy" else talk.agent.body()
            if name == "proxy" and mark is None:
                continue
            before = servers[name].cpu_s()
            response = await talk.client.post(PATH, body, talk.key)
            if mark is not None:
                figures[name].cpu[mark].append(servers[name].cpu_s() - before)
                figures[name].whole[mark].append(response.whole_s)
            if name != "proxy":
                talk.agent.append(message_from_answer(response.body))
            if name == "gateway" and turn in marks:
                tokens[turn] = orjson.loads(response.body)["usage"]["prompt_tokens"]
    for talk in talks.values():
        talk.client.close()


async def play_streamed(servers: dict[str, ServerProcess], marks: Sequence[int], figures: dict[str, Figures]) -> None:
    talks = {name: await open_conversation(server) for name, server in servers.items()}
    for turn in range(1, max(marks) + WINDOW + 1):
        mark = mark_near(turn, marks)
        for name, talk in talks.items():
            body = talks["gateway"].agent.body(streamed=True) if name == "proxy" else talk.agent.body(streamed=True)
            if name == "proxy" and mark is None:
                continue
            response = await talk.client.post(PATH, body, talk.key)
            if mark is not None:
                figures[name].first[mark].append(response.first_s)
            if name != "proxy":
                talk.agent.append(message_from_stream(response.body))
    for talk in talks.values():
        talk.client.close()


async def measure_throughput(server: ServerProcess) -> float:
    """Turns per second of many agents at once."""
    talks = [await open_conversation(server) for _ in range(CONCURRENT_AGENTS)]

    async def play_one(talk: Conversation) -> None:
        for _ in range(CONCURRENT_TURNS):
            response = await talk.client.post(PATH, talk.agent.body(), talk.key)
            talk.agent.append(message_from_answer(response.body))

    started = time.perf_counter()
    await asyncio.gather(*map(play_one, talks))
    seconds = time.perf_counter() - started
    for talk in talks:
        talk.client.close()
    return CONCURRENT_AGENTS * CONCURRENT_TURNS / seconds


def mark_near(turn: int, marks: Sequence[int]) -> int | None:
    return next((mark for mark in marks if abs(turn - mark) <= WINDOW), None)


def p50_p99_ms(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered) * 1e3, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3


def gateways_in(figures: dict[str, Figures]) -> list[str]:
    return [name for name in figures if name != "proxy"]


def report_latency(figures: dict[str, Figures], marks: Sequence[int], tokens: dict[int, int], note: str) -> Report:
    rows: list[Sequence[Any]] = []
    counts = ", ".join(f"{len(figures['gateway'].whole[mark])} at {mark}" for mark in marks)
    notes = [f"turns measured: {counts}; engine stand-in answers at once", note]
    for name in gateways_in(figures):
        cpu = {mark: statistics.median(figures[name].cpu[mark]) * 1e3 for mark in marks}
        for mark in marks:
            ours, theirs = p50_p99_ms(figures[name].whole[mark]), p50_p99_ms(figures["proxy"].whole[mark])
            proxy_cpu = statistics.median(figures["proxy"].cpu[mark]) * 1e3
            rows.append((name, mark, tokens[mark], *ours, *theirs, ours[0] / theirs[0], cpu[mark], proxy_cpu))
        if 256 in cpu:
            notes.append(f"{name}: CPU per turn at 256 ÷ at 8: {cpu[256] / cpu[8]:.2f}")
    columns = (
        "server",
        "turn",
        "prompt tokens",
        "p50 ms",
        "p99 ms",
        "proxy p50",
        "proxy p99",
        "ratio",
        "CPU ms",
        "proxy CPU",
    )
    return Report(title="time per turn, gateway against bare proxy", columns=columns, rows=rows, notes=notes)


def report_first_byte(figures: dict[str, Figures]) -> Report:
    rows: list[Sequence[Any]] = []
    for name in gateways_in(figures):
        for mark, values in figures[name].first.items():
            ours, theirs = p50_p99_ms(values), p50_p99_ms(figures["proxy"].first[mark])
            rows.append((name, mark, *ours, *theirs, ours[0] / theirs[0]))
    columns = ("server", "turn", "p50 ms", "p99 ms", "proxy p50", "proxy p99", "ratio")
    return Report(title="first streamed byte, gateway against bare proxy", columns=columns, rows=rows)


def report_throughput(figures: dict[str, Figures]) -> Report:
    proxy = figures["proxy"].turns_per_s
    ours = {name: figures[name].turns_per_s for name in gateways_in(figures)}
    rows = [(name, value, proxy, value / proxy) for name, value in ours.items()]
    title = f"turns per second, {CONCURRENT_AGENTS} agents at once, {CONCURRENT_TURNS} turns each"
    return Report(title=title, columns=("server", "turns/s", "proxy turns/s", "ratio"), rows=rows)


def main() -> None:
    parser = parser_for("gateway", __doc__ or "")
    parser.add_argument("--set", action="append", default=[], help="measure a second gateway with this setting, too")
    options = parser.parse_args()
    print_reports(run(quick=options.quick, settings=options.set), as_json=options.json)


if __name__ == "__main__":
    main()
