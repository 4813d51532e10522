"""The processes of a benchmark: an engine stand-in, servers in front of it, and the kernel's account of their CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.conversations import ANSWER, ANSWER_END, PATH
from tokentrue.errors import ConfigError

ADMIN_KEY = "TOKENTRUE_ADMIN_KEY"
THOUGHT = "I compare the numbers with what the test wants before I change anything in this file. "


def bench_model() -> str:
    """A real tokenizer where `TOKENTRUE_BENCH_MODEL` names one; else the small model that ships with the package."""
    from tokentrue.environments import SMALL_MODEL

    chosen = os.environ.get("TOKENTRUE_BENCH_MODEL") or str(Path(".cache/parts/tokenizers/qwen3"))
    return chosen if Path(chosen, "tokenizer.json").exists() else str(SMALL_MODEL)


def standin_settings(model: str, *, sampled: int = 0, **more: Any) -> dict[str, Any]:
    """The stand-in's answer, as ids of this model's tokenizer; `sampled` is its length in tokens where it is longer
    than the answer by itself: reasoning fills it up."""
    from tokentrue.renderers import load_renderer

    renderer = load_renderer(model)
    head, number = list(renderer.encode_sampled(ANSWER)), 7
    digits = [renderer.encode_sampled(digit)[-1] for digit in "0123456789"]
    tail = [*renderer.encode_sampled(ANSWER_END), renderer.stop_token_ids[0]]
    opening, thought = renderer.encode_sampled("<think>\n"), renderer.encode_sampled(THOUGHT)
    missing = max(0, sampled - len(head) - number - len(tail))
    filled = (list(thought) * (missing // len(thought) + 1))[:missing]
    return {"head": [*opening, *filled, *head[len(opening) :]], "digits": digits, "tail": tail, **more}


class ServerProcess:
    """A process that prints where it listens."""

    def __init__(self, *command: str, admin_key: str = "", python: str = sys.executable) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, ADMIN_KEY: admin_key}
        arguments = [python, "-m", *command]
        self.process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        self.admin_key = admin_key
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        if not first:
            raise ConfigError(f"{command[0]} did not start; run `python -m {' '.join(command)}` to see why")
        self.port = int(first) if first.strip().isdigit() else int(first.split()[3].rpartition(":")[2])

    def new_path(self) -> str:
        """Where a new conversation is sent."""
        return PATH

    def cpu_s(self) -> float:
        """On-CPU time of all its threads and, of a gateway, of its child that serves."""
        tasks = [task for pid in self._pids() for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def resident_mb(self) -> float:
        """Resident memory; pages that processes share count once."""
        files = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in self._pids()]
        return sum(int(line.split()[1]) for lines in files for line in lines if line.startswith("Pss:")) / 1024

    def _pids(self) -> list[str]:
        me = str(self.process.pid)
        tasks = Path(f"/proc/{me}/task").iterdir()
        return [me, *(pid for task in tasks for pid in (task / "children").read_text().split())]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def others_cpu_s(servers: dict[str, ServerProcess]) -> float:
    """CPU seconds of everything on this machine but the benchmark."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    used = sum(fields[:3] + fields[5:8]) / os.sysconf("SC_CLK_TCK")
    return used - time.process_time() - sum(server.cpu_s() for server in servers.values())
