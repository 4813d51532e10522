"""The files, functions and Python calls that one streamed chat request runs through: the fourth turn of a conversation
over SQLite, in front of an SGLang stand-in that sends 150 tokens, one an event.

Run: `python -m benchmarks.request_path`; `--files` lists the files.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks import ROOT, Report, parser_for, print_reports
from benchmarks.conversations import PATH, Agent, HttpClient, message_from_stream, open_session, read_pages
from benchmarks.servers import ServerProcess, bench_model, standin_settings
from tokentrue.app.background import embedded_gateway
from tokentrue.app.wiring import EngineConfig, ModelConfig, ServeConfig, ServerConfig

PACKAGE = ROOT / "tokentrue"
EVENTS = 150
TURN = 4


class Profile:
    """Counts the Python calls of all threads that start after it was made, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[CodeType] = Counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            self.calls[frame.f_code] += 1

    def close(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


async def measure(folder: Path, url: str) -> Counter[CodeType]:
    settings = ServeConfig(
        model=ModelConfig(path=bench_model()),
        engine=EngineConfig(name="sglang", urls=(url,)),
        server=ServerConfig(port=0, store=f"sqlite:{folder / 'bench.sqlite'}"),
    )
    profile = Profile()
    try:
        async with embedded_gateway(settings) as served:
            client, key = await open_session(int(served.base_url.rpartition(":")[2]), served.admin_key)
            agent = Agent(read_pages(), opening="Read before you write.")
            for _ in range(TURN - 1):
                agent.append(await ask(client, agent, key))
            profile.is_on = True
            await ask(client, agent, key)
            profile.is_on = False
            client.close()
    finally:
        profile.close()
    return profile.calls


async def ask(client: HttpClient, agent: Agent, key: str) -> dict[str, Any]:
    return message_from_stream((await client.post(PATH, agent.body(streamed=True), key)).body)


def run(*, show_files: bool = False, token_delay_s: float = 0.0) -> list[Report]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = standin_settings(bench_model(), sampled=EVENTS, token_delay_s=token_delay_s)
        (folder / "standin.json").write_text(json.dumps(settings))
        engine = ServerProcess("benchmarks.standin", str(folder / "standin.json"))
        try:
            calls = asyncio.run(measure(folder, f"http://127.0.0.1:{engine.port}"))
        finally:
            engine.stop()
    files: dict[str, Counter[CodeType]] = {}
    for code, count in calls.items():
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            files.setdefault(str(path.relative_to(PACKAGE)), Counter())[code] += count
    packages: dict[str, list[Counter[CodeType]]] = {}
    for path, functions in files.items():
        packages.setdefault(path.rpartition("/")[0] or "(top)", []).append(functions)
    rows = [summarise(package, found) for package, found in sorted(packages.items())]
    reports = [
        Report(
            title=f"one streamed chat request, turn {TURN}, {EVENTS} events of the engine",
            columns=("package", "files", "functions", "calls"),
            rows=[*rows, summarise("tokentrue", list(files.values()))],
            notes=(f"with libraries: {sum(calls.values())} Python calls, {sum(calls.values()) / EVENTS:.0f} an event",),
        )
    ]
    if show_files:
        listed = [summarise(path, [functions]) for path, functions in sorted(files.items())]
        reports.append(Report(title="its files", columns=("file", "", "functions", "calls"), rows=listed))
    return reports


def summarise(name: str, files: list[Counter[CodeType]]) -> tuple[str, int, int, int]:
    return name, len(files), sum(map(len, files)), sum(functions.total() for functions in files)


def main() -> None:
    parser = parser_for("request_path", __doc__ or "")
    parser.add_argument("--files", action="store_true", help="list the files, too")
    parser.add_argument("--token-delay-s", type=float, default=0.0, help="time between the engine's events")
    options = parser.parse_args()
    reports = run(show_files=options.files, token_delay_s=options.token_delay_s)
    print_reports(reports, as_json=options.json)


if __name__ == "__main__":
    main()
