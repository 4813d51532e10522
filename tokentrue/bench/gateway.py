"""What the gateway adds to a turn, against a bare reverse proxy in the same run: `tokentrue bench gateway`.

Four processes on one machine: this client, the engine stand-in (SGLang's wire format, answers at once), the gateway, the proxy.
Agents play real conversations, one assistant turn with a tool call and one tool result at a time; every body goes to the gateway
and to the proxy, in turn, so both see the same noise. CPU is read from the kernel's own account of each process.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httptools
import orjson

from tokentrue.bench import Report
from tokentrue.errors import ConfigError

PATH = "/v1/chat/completions"
TARGETS = {8: 2.2, 128: 1.0}
WINDOW = 4  # turns on either side of a mark that count for it
ANSWER = (
    "<think>\nThe next file is the one to read, then the numbers can be compared with what the test wants.\n</think>\n\n"
    'Reading on.\n<tool_call>\n{"name": "read", "arguments": {"path": "src/module_'
)
ANSWER_END = '.py", "first": 1, "last": 40}}\n</tool_call>'
TOOL = {
    "name": "read",
    "description": "Read lines of a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
RULES = "You mend programs. Read before you write, change one thing at a time, and run the tests after each change. "
PAGE = 1900  # characters of a file that a tool reads at a time: about 5k, 18k, 70k and 140k tokens of history at turns 8, 32, 128 and 256


def run(*, quick: bool = False) -> list[Report]:
    marks = (8, 32) if quick else (8, 32, 128, 256)
    sessions = 4 if quick else 8
    with tempfile.TemporaryDirectory(prefix="tokentrue-bench-") as folder, machine(Path(folder)) as parts:
        began, before = time.perf_counter(), others_s(parts)
        measured = asyncio.run(measure(parts, marks, sessions))
        busy = (others_s(parts) - before) / (time.perf_counter() - began)
    latency = latency_report(measured, marks)
    note = f"other processes kept {busy:.2f} of {os.cpu_count()} cores busy meanwhile"
    if busy > 0.1:
        note += "; measure again when it is quiet"
    return [replace(latency, notes=[*latency.notes, note]), stream_report(measured)]


def others_s(parts: dict[str, Part]) -> float:
    """CPU seconds of everything on this machine but the benchmark: where it grows, the figures are not to be trusted."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    used = sum(fields[:3] + fields[5:8]) / os.sysconf("SC_CLK_TCK")
    return used - time.process_time() - sum(part.cpu_s() for part in parts.values())


def bench_model() -> str:
    """A real tokenizer where one was put; the small model that ships with the package elsewhere."""
    from tokentrue.environments import SMALL_MODEL

    chosen = os.environ.get("TOKENTRUE_BENCH_MODEL") or str(Path(".cache/parts/tokenizers/qwen3"))
    return chosen if Path(chosen, "tokenizer.json").exists() else str(SMALL_MODEL)


def standin_settings(model: str, **more: Any) -> dict[str, Any]:
    """The stand-in's answer, as ids of this model's tokenizer."""
    from tokentrue.renderers import load_renderer

    renderer = load_renderer(model)
    digits = [renderer.encode_sampled(digit)[-1] for digit in "0123456789"]
    tail = [*renderer.encode_sampled(ANSWER_END), renderer.stop_token_ids[0]]
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "src/module_1000001.py"}'}}
    message = {"role": "assistant", "content": "Reading on.", "tool_calls": [call]}
    chat = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [{"index": 0, "message": message}]}
    return {"head": renderer.encode_sampled(ANSWER), "digits": digits, "tail": tail, "chat": chat, **more}


class Part:
    """A process that prints where it listens."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        if not first:
            raise ConfigError(f"{command[0]} did not start; run `python -m {' '.join(command)}` to see why")
        self.port = int(first) if first.strip().isdigit() else int(first.split()[3].rpartition(":")[2])

    def cpu_s(self) -> float:
        """On-CPU time of all its threads."""
        total = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def machine(folder: Path) -> Iterator[dict[str, Part]]:
    model = bench_model()
    settings = folder / "standin.json"
    settings.write_text(json.dumps(standin_settings(model)))
    parts: dict[str, Part] = {}
    try:
        parts["engine"] = Part("tokentrue.bench.standin", str(settings))
        url = f"http://127.0.0.1:{parts['engine'].port}"
        parts["proxy"] = Part("tokentrue.bench.bare_proxy", url)
        store = f"sqlite:{folder / 'bench.sqlite'}"
        flags = ["--engine", "sglang", "--url", url, "--model", model, "--port", "0", "--store", store]
        parts["gateway"] = Part("tokentrue", "serve", *flags)
        yield parts
    finally:
        for part in parts.values():
            part.stop()


class Wire(asyncio.Protocol):
    """The least client there is: one connection, one request at a time, the moments of its first body byte and its end."""

    def __init__(self) -> None:
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self.body:
            self.first_s = time.perf_counter()
        self.body += data

    def on_message_complete(self) -> None:
        assert self._done is not None
        self._done.set_result(None)

    async def post(self, path: str, body: bytes, key: str) -> tuple[bytes, float, float]:
        """The answer, seconds to its first byte and to its end."""
        self._parser, self.body = httptools.HttpResponseParser(self), bytearray()
        self._done = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        started = time.perf_counter()
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self._done
        if self._parser.get_status_code() >= 300:
            raise ConfigError(f"the benchmark was refused: {bytes(self.body[:300])!r}")
        return bytes(self.body), self.first_s - started, time.perf_counter() - started


async def connect(port: int) -> Wire:
    _, wire = await asyncio.get_running_loop().create_connection(Wire, "127.0.0.1", port)
    return wire


def pages() -> Iterator[str]:
    """Source files as an agent reads them: those of Python's own library, page by page. Agents of a group read the same ones."""
    files = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    while True:
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            yield from (text[start : start + PAGE] for start in range(0, len(text) - PAGE, PAGE))


class Agent:
    """A conversation as its bytes: grown by what was answered, never dumped anew, so the client costs the same at every turn."""

    def __init__(self, pages: Iterator[str]) -> None:
        self._pages = pages
        system = {"role": "system", "content": RULES * 60}
        user = {"role": "user", "content": "The sum is off in the last bit. Find out why."}
        self._messages = b'{"messages":[' + orjson.dumps(system) + b"," + orjson.dumps(user)
        self._tail = b'],"model":"m","tools":[' + orjson.dumps({"type": "function", "function": TOOL}) + b"]"

    def body(self, *, streamed: bool = False) -> bytes:
        return self._messages + self._tail + (b',"stream":true}' if streamed else b"}")

    def heard(self, message: dict[str, Any]) -> None:
        tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": next(self._pages)}
        self._messages += b"," + orjson.dumps(message) + b"," + orjson.dumps(tool)


async def measure(parts: dict[str, Part], marks: Sequence[int], sessions: int) -> dict[str, Any]:
    """Per mark: seconds per turn of both, to the first streamed byte of both, CPU per turn of both."""
    gateway, proxy = await connect(parts["gateway"].port), await connect(parts["proxy"].port)
    unread = pages() if os.environ.get("TOKENTRUE_BENCH_PAGES") == "new" else None  # each agent goes on where the last one stopped

    async def agents(marks: Sequence[int], out: dict[str, Any]) -> None:
        await play(parts, gateway, proxy, Agent(unread or pages()), marks, out)
        await play_streamed(gateway, proxy, Agent(unread or pages()), [mark for mark in marks if mark <= 128], out)

    await agents(marks[:1], record())  # these do not count: whatever a fresh server does, it does for the first time
    out = record()
    for _ in range(sessions):
        await agents(marks, out)
    return out


def record() -> dict[str, Any]:
    names = ("gateway", "proxy", "gateway_first", "proxy_first", "gateway_cpu", "proxy_cpu")
    return {name: defaultdict(list) for name in names} | {"tokens": {}}


def mark_of(turn: int, marks: Sequence[int]) -> int | None:
    return next((mark for mark in marks if abs(turn - mark) <= WINDOW), None)


async def play(parts: dict[str, Part], gateway: Wire, proxy: Wire, agent: Agent, marks: Sequence[int], out: dict[str, Any]) -> None:
    key = orjson.loads((await gateway.post("/sessions", b"{}", ""))[0])["api_key"]
    for turn in range(1, max(marks) + WINDOW + 1):
        mark, body = mark_of(turn, marks), agent.body()
        before = parts["gateway"].cpu_s()
        answer, _, whole_s = await gateway.post(PATH, body, key)
        message = orjson.loads(answer)
        if mark is not None:
            out["gateway_cpu"][mark].append(parts["gateway"].cpu_s() - before)
            out["gateway"][mark].append(whole_s)
            before = parts["proxy"].cpu_s()
            out["proxy"][mark].append((await proxy.post(PATH, body, key))[2])
            out["proxy_cpu"][mark].append(parts["proxy"].cpu_s() - before)
        if turn in marks:
            out["tokens"][turn] = message["usage"]["prompt_tokens"]
        agent.heard(message["choices"][0]["message"])


async def play_streamed(gateway: Wire, proxy: Wire, agent: Agent, marks: Sequence[int], out: dict[str, Any]) -> None:
    key = orjson.loads((await gateway.post("/sessions", b"{}", ""))[0])["api_key"]
    for turn in range(1, max(marks) + WINDOW + 1):
        mark, body = mark_of(turn, marks), agent.body(streamed=True)
        stream, first_s, _ = await gateway.post(PATH, body, key)
        if mark is not None:
            out["gateway_first"][mark].append(first_s)
            out["proxy_first"][mark].append((await proxy.post(PATH, body, key))[1])
        agent.heard(message_of(stream))


def message_of(stream: bytes) -> dict[str, Any]:
    """The message that a stream of chunks adds up to."""
    text: dict[str, str] = {"content": "", "reasoning_content": "", "arguments": "", "id": "", "name": ""}
    for line in stream.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        for choice in orjson.loads(line[6:])["choices"]:
            delta = choice["delta"]
            for call in delta.get("tool_calls", ()):
                text["id"] += call.get("id", "")
                text["name"] += call["function"].get("name", "")
                text["arguments"] += call["function"]["arguments"]
            for name in ("content", "reasoning_content"):
                text[name] += delta.get(name) or ""
    call = {"id": text["id"], "type": "function", "function": {"name": text["name"], "arguments": text["arguments"]}}
    return {"role": "assistant", "content": text["content"], "reasoning_content": text["reasoning_content"], "tool_calls": [call]}


def ms(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered) * 1e3, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3


def latency_report(measured: dict[str, Any], marks: Sequence[int]) -> Report:
    rows: list[Sequence[Any]] = []
    cpu: dict[int, float] = {}
    for mark in marks:
        ours, theirs = ms(measured["gateway"][mark]), ms(measured["proxy"][mark])
        cpu[mark] = statistics.median(measured["gateway_cpu"][mark]) * 1e3
        proxy_cpu = statistics.median(measured["proxy_cpu"][mark]) * 1e3
        target = f"≤ {TARGETS[mark]}" if mark in TARGETS else ""
        rows.append((mark, measured["tokens"][mark], *ours, *theirs, ours[0] / theirs[0], target, cpu[mark], proxy_cpu))
    columns = ("turn", "prompt tokens", "p50 ms", "p99 ms", "proxy p50", "proxy p99", "ratio", "target", "CPU ms", "proxy CPU")
    notes = [f"{len(measured['gateway'][marks[0]])} turns per row; engine stand-in: own process, SGLang wire format, answers at once"]
    if 256 in cpu:
        notes.append(f"CPU per turn at 256 ÷ at 8: {cpu[256] / cpu[8]:.2f} (target ≤ 2)")
    return Report(title="time per turn, gateway against bare proxy", columns=columns, rows=rows, notes=notes)


def stream_report(measured: dict[str, Any]) -> Report:
    rows: list[Sequence[Any]] = []
    for mark in measured["gateway_first"]:
        ours, theirs = ms(measured["gateway_first"][mark]), ms(measured["proxy_first"][mark])
        rows.append((mark, *ours, *theirs, ours[0] / theirs[0], "≤ 1.5" if mark == 8 else ""))
    columns = ("turn", "p50 ms", "p99 ms", "proxy p50", "proxy p99", "ratio", "target")
    return Report(title="first streamed byte, gateway against bare proxy", columns=columns, rows=rows)
