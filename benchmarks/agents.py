"""What agents feel: `python -m benchmarks.agents`.

*As agents*: N coding agents work through one gateway process, and straight at the same engine stand-in. An opening has
20,000 to 50,000 tokens, a conversation 31 turns at the median; the engine samples 200 tokens a turn at 50 a second, in
pieces of 10; each turn has one call and one tool result, after a pause. Streamed and not. `--turns` and `--opening`
scale it down. An opening is what coding agents send: a harness's prompt and tools, the same for all; in the system
message, too, the context of the agent's repository, one of 12; and a task of the agent's own, as the user's message.

*By turn*: one agent, one request at a time, an engine that answers at once with 150 tokens in 150 events; each turn goes
to every server, one after the other. Added time is over the engine by itself; CPU time is the kernel's account of the
server's process. Beside a proxy that does nothing and one that relays ids; `--peer NAME=PYTHON` adds other gateways.

*By workers*: agents without pauses at an engine that answers at once; turns a second of one and of `--workers` gateway
processes. It needs a core for each of them, one for the engine and one for the agents.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import secrets
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import Report, parser_for, print_reports
from benchmarks.conversations import (
    PATH,
    RULES,
    TOOL,
    Agent,
    HttpClient,
    message_from_answer,
    message_from_stream,
    open_session,
    read_pages,
)
from benchmarks.gateway_peers import PEERS, PeerProcess
from benchmarks.servers import ServerProcess, bench_model, others_cpu_s, standin_settings

GATEWAY, DIRECT = "tokentrue", "engine alone"
TOKENS, TOKENS_PER_S, PIECE = 200, 50.0, 10
EVENTS = 150
CHARACTERS = 3.6  # of a token, in the pages that agents read
PAUSE_S = 1.0  # mean time of a tool
TOOLS = 10  # opencode 1.18 sends 10 tools and 31 KB, qwen-code 0.15 11 and 68 KB, Claude Code 2.1 24 and 76 KB
REPOSITORIES = 12  # as in SWE-bench
TASK_SHARE = 0.10, 0.16  # of an opening: an issue, and files that it names
MARKS, WINDOW = (8, 32, 128), 4
LENGTH = 24  # turns of a conversation without pauses
CLIENTS = 4  # processes of agents without pauses


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`turns` is the median of the agents' turns, `opening` the range of their first prompts, in tokens."""

    turns: int = 31
    opening: tuple[int, int] = (20_000, 50_000)
    token_delay_s: float = 1 / TOKENS_PER_S
    pause_s: float = PAUSE_S

    @property
    def turn_s(self) -> float:
        return TOKENS * self.token_delay_s + self.pause_s

    def plan(self, number: int) -> AgentPlan:
        """The same for an agent of this number, whichever server it works at."""
        draw = random.Random(number)
        turns = self.turns
        if turns > 6:  # a few agents of hundreds would else decide how long the benchmark takes
            turns = min(3 * turns, max(2, round(turns * draw.lognormvariate(0.0, 0.5))))
        tokens = random.Random(number % REPOSITORIES).randint(*self.opening)
        pauses = tuple(draw.expovariate(1 / self.pause_s) for _ in range(turns))
        return AgentPlan(
            harness_tokens=self.opening[0] // 2,
            context_tokens=int(tokens * (1 - TASK_SHARE[1])) - self.opening[0] // 2,
            task_tokens=int(tokens * draw.uniform(*TASK_SHARE)),
            repository=number % REPOSITORIES,
            pauses_s=pauses,
            start_s=draw.random() * self.turn_s,
            skip=draw.randrange(2000),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """Of its opening: the harness's tokens, those of its repository's context, and those of its own task."""

    harness_tokens: int
    context_tokens: int
    task_tokens: int
    repository: int
    pauses_s: Sequence[float]
    start_s: float  # agents start within the time of one turn
    skip: int  # pages of other agents


@dataclass(slots=True)
class Felt:
    """What N agents measured at one server."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    agent_s: float = 0.0  # from an agent's first request to its last answer, over all agents
    cpu_s: float = 0.0


# ---- as agents -------------------------------------------------------------------------------------------------------
def play_agents(port: int, admin_key: str, count: int, load: Workload, streamed: bool) -> Felt:
    """Runs in a process of its own."""

    async def play() -> Felt:
        felt = Felt()
        plans = map(load.plan, range(count))
        await asyncio.gather(*(play_agent(port, admin_key, plan, felt, streamed=streamed) for plan in plans))
        return felt

    return asyncio.run(play())


async def play_agent(port: int, admin_key: str, plan: AgentPlan, felt: Felt, *, streamed: bool) -> None:
    await asyncio.sleep(plan.start_s)
    client, key = await open_session(port, admin_key)
    agent = open_conversation(plan)
    began = time.perf_counter()
    for pause_s in plan.pauses_s:
        answer = await client.post(PATH, agent.body(streamed=streamed), key)
        felt.first_s.append(answer.first_s)
        felt.whole_s.append(answer.whole_s)
        agent.append(message_from_stream(answer.body) if streamed else message_from_answer(answer.body))
        await asyncio.sleep(pause_s)
    felt.agent_s += time.perf_counter() - began
    client.close()


def open_conversation(plan: AgentPlan) -> Agent:
    of_repository, own = read_pages(skip=100 * plan.repository), read_pages(skip=plan.skip)
    rules, description = (repeat(RULES, plan.harness_tokens / 2), repeat(RULES, plan.harness_tokens / 2 / TOOLS))
    context = cut_pages(of_repository, plan.context_tokens)
    tools = [
        {**TOOL, "name": name, "description": description} for name in ("read", *map("tool_{}".format, range(1, TOOLS)))
    ]
    task = f"Mend what this issue names.\n\n{cut_pages(own, plan.task_tokens)}"
    return Agent(own, opening=f"{rules}\n\n# This repository\n\n{context}", task=task, tools=tools)


def repeat(text: str, tokens: float) -> str:
    return text * max(1, int(tokens * CHARACTERS / len(text)))


def cut_pages(pages: Iterator[str], tokens: int) -> str:
    text = ""
    while len(text) < tokens * CHARACTERS:
        text += next(pages)
    return text[: int(tokens * CHARACTERS)]


def report_felt(counts: Sequence[int], kinds: Sequence[str], load: Workload, folder: Path, *, together: bool) -> Report:
    """`together`: the agents work through the gateway and at another engine at the same time."""
    rows: list[Sequence[Any]] = []
    others = 0.0
    settings: dict[str, Any] = {"sampled": TOKENS, "token_delay_s": load.token_delay_s, "piece": PIECE}
    with (
        engine_and_gateway(folder, **settings) as servers,
        ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool,
    ):
        gateway = servers[GATEWAY]
        if together:
            servers["another engine"] = ServerProcess("benchmarks.standin", str(folder / "standin.json"))
        engine = servers["another engine" if together else DIRECT]
        warm = Workload(turns=2, opening=(2_000, 2_000), token_delay_s=load.token_delay_s, pause_s=0.1)
        both = [pool.submit(play_agents, each.port, each.admin_key, 2, warm, True) for each in (engine, gateway)]
        for future in both:
            future.result()
        for count, kind in itertools.product(counts, kinds):
            started, before, cpu_s = time.perf_counter(), others_cpu_s(servers), gateway.cpu_s()
            how = count, load, kind == "streamed"
            direct = pool.submit(play_agents, engine.port, engine.admin_key, *how)
            if not together:
                direct.result()
            felt = pool.submit(play_agents, gateway.port, gateway.admin_key, *how).result()
            felt.cpu_s = gateway.cpu_s() - cpu_s
            others = max(others, (others_cpu_s(servers) - before) / (time.perf_counter() - started))
            rows.append(felt_row(count, load, direct.result(), felt, kind))
    columns = (
        "agents",
        "answers",
        "turns",
        "throughput kept %",
        "added p50 ms",
        "added p99 ms",
        "first byte p50 ms",
        "CPU ms a turn",
        "one process carries, agents",
    )
    low, high = load.opening
    notes = (
        f"an opening: {low // 2:,} tokens of prompt and {TOOLS} tools of the harness, the rest of one of {REPOSITORIES} "
        f"repositories but {TASK_SHARE[0]:.0%} to {TASK_SHARE[1]:.0%}, the agent's own task",
        f"openings of {low:,} to {high:,} tokens, {load.turns} turns at the median and {3 * load.turns} at most, "
        f"{TOKENS} tokens a turn at {1 / load.token_delay_s:.0f} a second in pieces of {PIECE}, pauses of {load.pause_s:g} s on average",
        "kept: time that the agents take at the engine alone ÷ through the gateway; added: over the engine alone",
        "one process carries: the time of a turn ÷ its CPU time, extrapolated",
        f"other processes, the agents' among them, kept up to {others:.2f} of {os.cpu_count()} cores busy",
        *(("through the gateway and at an engine of their own at the same time",) if together else ()),
    )
    return Report(title="agents through one gateway process", columns=columns, rows=rows, notes=notes)


def felt_row(count: int, load: Workload, direct: Felt, felt: Felt, kind: str) -> Sequence[Any]:
    added = [1e3 * (quantile(felt.whole_s, q) - quantile(direct.whole_s, q)) for q in (0.5, 0.99)]
    first = 1e3 * (quantile(felt.first_s, 0.5) - quantile(direct.first_s, 0.5))
    cpu_ms = 1e3 * felt.cpu_s / len(felt.whole_s)
    kept = 100 * direct.agent_s / felt.agent_s
    carries = round(load.turn_s / (cpu_ms / 1e3))
    return (count, kind, len(felt.whole_s), f"{kept:.1f}", *added, first, cpu_ms, carries)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


# ---- by turn ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class ByTurn:
    """Seconds by mark, of one server."""

    whole: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    first: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


async def play_turns(
    servers: Mapping[str, ServerProcess], marks: Sequence[int], figures: Mapping[str, ByTurn], *, streamed: bool
) -> None:
    """One conversation. Servers that keep no sessions are asked near the marks alone, with the gateway's own body."""
    talks: dict[str, tuple[HttpClient, str, str]] = {
        name: (*await open_session(server.port, server.admin_key), server.new_path())
        for name, server in servers.items()
    }
    agent = Agent(read_pages())
    for turn in range(1, max(marks) + WINDOW + 1):
        mark = next((each for each in marks if abs(turn - each) <= WINDOW), None)
        body, said = agent.body(streamed=streamed), b""
        for name, (client, key, path) in talks.items():
            if mark is None and name != GATEWAY and name not in PEERS:
                continue
            before = servers[name].cpu_s()
            answer = await client.post(path, body, key)
            if mark is not None:
                figures[name].cpu[mark].append(servers[name].cpu_s() - before)
                figures[name].whole[mark].append(answer.whole_s)
                figures[name].first[mark].append(answer.first_s)
            if name == GATEWAY:
                said = answer.body
        agent.append(message_from_stream(said) if streamed else message_from_answer(said))
    for client, *_ in talks.values():
        client.close()


def report_turns(marks: Sequence[int], peers: Mapping[str, str], folder: Path, *, rounds: int) -> list[Report]:
    reports: list[Report] = []
    with engine_and_gateway(folder, peers=peers, proxies=True, sampled=EVENTS) as servers:
        for streamed in (False, True):
            figures = {name: ByTurn() for name in servers}
            asyncio.run(play_turns(servers, marks[:1], {name: ByTurn() for name in servers}, streamed=streamed))
            started, before = time.perf_counter(), others_cpu_s(servers)
            for _ in range(rounds):
                asyncio.run(play_turns(servers, marks, figures, streamed=streamed))
            busy = (others_cpu_s(servers) - before) / (time.perf_counter() - started)
            memory = {name: server.resident_mb() for name, server in servers.items()}
            reports.append(turns_table(marks, figures, memory, busy, streamed=streamed))
    return reports


def turns_table(
    marks: Sequence[int], figures: Mapping[str, ByTurn], memory: Mapping[str, float], busy: float, *, streamed: bool
) -> Report:
    rows: list[Sequence[Any]] = []
    direct = figures[DIRECT]

    def medians(values: Mapping[int, list[float]], less: Mapping[int, list[float]] | None = None) -> str:
        under = {mark: statistics.median(less[mark]) if less else 0.0 for mark in marks}
        return " / ".join(f"{1e3 * (statistics.median(values[mark]) - under[mark]):.1f}" for mark in marks)

    for name, each in figures.items():
        if name != DIRECT:
            first = (medians(each.first, direct.first),) if streamed else ()
            rows.append((name, medians(each.whole, direct.whole), *first, medians(each.cpu), round(memory[name])))
    at = " / ".join(map(str, marks))
    columns = (
        "server",
        f"added ms at turn {at}",
        *(("first byte, added ms",) if streamed else ()),
        "CPU ms a turn",
        "resident MB at the end",
    )
    kind = f"streamed in {EVENTS} events" if streamed else f"{EVENTS} tokens, not streamed"
    notes = (
        f"medians of {len(direct.whole[marks[0]])} turns near each mark; the engine alone takes "
        f"{medians(direct.whole)} ms" + (f", its first byte {medians(direct.first)} ms" if streamed else ""),
        f"other processes kept {busy:.2f} of {os.cpu_count()} cores busy",
    )
    return Report(title=f"by turn: {kind}", columns=columns, rows=rows, notes=notes)


# ---- by workers ------------------------------------------------------------------------------------------------------
def play_without_pauses(port: int, admin_key: str, agents: int, seconds: float, streamed: bool) -> int:
    """The turns that `agents` take in that time. Each begins another conversation after `LENGTH` turns."""
    return asyncio.run(_play_without_pauses(port, admin_key, agents, seconds, streamed))


async def _play_without_pauses(port: int, admin_key: str, agents: int, seconds: float, streamed: bool) -> int:
    end, turns = time.perf_counter() + seconds, 0

    async def play(number: int) -> None:
        nonlocal turns
        while time.perf_counter() < end:
            client, key = await open_session(port, admin_key)
            agent = Agent(read_pages(skip=37 * number))
            for _ in range(LENGTH):
                answer = await client.post(PATH, agent.body(streamed=streamed), key)
                if time.perf_counter() > end:
                    break
                turns += 1
                agent.append(message_from_stream(answer.body) if streamed else message_from_answer(answer.body))
            client.close()

    await asyncio.gather(*map(play, range(agents)))
    return turns


def report_workers(workers: int, folder: Path, *, agents: int, seconds: float) -> Report:
    """The agents are `CLIENTS` processes, and each worker has an engine: neither must be the limit."""
    rows: list[Sequence[Any]] = []
    speeds: dict[bool, float] = {}
    clients = min(CLIENTS, agents)
    with ProcessPoolExecutor(clients, multiprocessing.get_context("spawn")) as pool:
        for count in (1, workers):
            with engine_and_gateway(folder, workers=count, engines=workers, sampled=EVENTS) as servers:
                gateway = servers[GATEWAY]

                def play(duration_s: float, *, streamed: bool, gateway: ServerProcess = gateway) -> int:
                    each = (gateway.port, gateway.admin_key, agents // clients, duration_s, streamed)
                    return sum(
                        future.result() for future in [pool.submit(play_without_pauses, *each) for _ in range(clients)]
                    )

                play(min(seconds, 2.0), streamed=True)
                for streamed in (True, False):
                    before = gateway.cpu_s()
                    turns = play(seconds, streamed=streamed)
                    ratio = turns / seconds / speeds.setdefault(streamed, turns / seconds)
                    kind = "streamed" if streamed else "whole"
                    rows.append((count, kind, turns / seconds, ratio, 1e3 * (gateway.cpu_s() - before) / turns))
    columns = ("workers", "answers", "turns a second", "of one worker", "CPU ms a turn")
    notes = (
        f"{agents} agents without pauses in {clients} processes, {workers} engines that answer at once; "
        f"{os.cpu_count()} cores",
    )
    return Report(title="gateway processes", columns=columns, rows=rows, notes=notes)


# ---- servers ---------------------------------------------------------------------------------------------------------
@contextmanager
def engine_and_gateway(
    folder: Path,
    *,
    peers: Mapping[str, str] | None = None,
    proxies: bool = False,
    workers: int = 1,
    engines: int = 1,
    **settings: Any,
) -> Iterator[dict[str, ServerProcess]]:
    model, key = bench_model(), secrets.token_hex(16)
    standin = folder / "standin.json"
    standin.write_text(json.dumps(standin_settings(model, **settings)))
    servers: dict[str, ServerProcess] = {}
    try:
        servers[DIRECT] = ServerProcess("benchmarks.standin", str(standin))
        url = f"http://127.0.0.1:{servers[DIRECT].port}"
        if proxies:
            servers["proxy"] = ServerProcess("benchmarks.bare_proxy", url)
            servers["proxy that relays ids"] = ServerProcess("benchmarks.bare_proxy", url, "ids")
        store = f"sqlite:{folder / secrets.token_hex(4)}.sqlite"
        for number in range(1, engines):
            servers[f"engine {number}"] = ServerProcess("benchmarks.standin", str(standin))
        urls = [url, *(f"http://127.0.0.1:{servers[f'engine {number}'].port}" for number in range(1, engines))]
        replicas = [flag for each in urls for flag in ("--url", each)]
        flags = ["--engine", "sglang", *replicas, "--model", model, "--port", "0", "--store", store]
        flags += ["--workers", str(workers)] if workers > 1 else []
        servers[GATEWAY] = ServerProcess("tokentrue", "serve", *flags, admin_key=key)
        for name, python in (peers or {}).items():
            servers[name] = PeerProcess(name, python, url, folder)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def main() -> None:
    parser = parser_for("agents", __doc__ or "")
    parser.add_argument("--agents", type=int, nargs="*", default=[32, 96], help="how many work at once; none: no table")
    parser.add_argument("--answers", nargs="+", default=["streamed", "whole"], choices=("streamed", "whole"))
    parser.add_argument(
        "--together", action="store_true", help="agents at the engine alone at the same time: six cores"
    )
    parser.add_argument("--turns", type=int, default=31, help="turns of an agent, at the median")
    parser.add_argument("--opening", type=int, nargs=2, default=[20_000, 50_000], help="tokens of first prompts")
    parser.add_argument("--rounds", type=int, default=3, help="conversations of the tables by turn; 0: no tables")
    parser.add_argument("--workers", type=int, default=0, help="gateway processes beside one; 0: no table")
    parser.add_argument("--peer", action="append", default=[], help="NAME=PYTHON: " + ", ".join(PEERS))
    options = parser.parse_args()
    peers = dict(each.split("=", 1) for each in options.peer)
    if unknown := peers.keys() - PEERS.keys():
        parser.error(f"--peer {', '.join(unknown)}: choose one of {', '.join(PEERS)}")
    low, high = options.opening
    load, counts, marks = Workload(turns=options.turns, opening=(low, high)), options.agents, MARKS
    if options.quick:
        load = Workload(turns=3, opening=(1_000, 2_000), token_delay_s=0.002, pause_s=0.1)
        counts, marks = [4] if counts else [], MARKS[:1]
    reports: list[Report] = []
    with tempfile.TemporaryDirectory(prefix="tokentrue-bench-") as folder:
        if counts:
            reports.append(report_felt(counts, options.answers, load, Path(folder), together=options.together))
        if options.rounds:
            reports += report_turns(marks, peers, Path(folder), rounds=1 if options.quick else options.rounds)
        if options.workers:
            agents, seconds = (4, 1.0) if options.quick else (64, 12.0)
            reports.append(report_workers(options.workers, Path(folder), agents=agents, seconds=seconds))
    print_reports(reports, as_json=options.json)


if __name__ == "__main__":
    main()
