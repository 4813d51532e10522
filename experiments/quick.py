"""The lab's main claims checked in half an hour: `python -m experiments.quick --model DIR [--device cuda]`.

On a GPU four arms, two seeds, 100 steps each, then a table beside the runs on file. On a CPU one seed and two steps:
the signs that need no learning: the exact arm has no differing bit, the sources' δ is as large as on file. Exit code 1
when the exact arm has one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from experiments.figures import complete_runs, table_of_arms
from experiments.grid import DATA, Job, arms, read_runs, run_all, start_sharing, stop_sharing

ARMS = ("exact: exact", "kernels: bypass", "fp8: bypass", "fp8: recompute + TIS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--tasks", type=Path, default=DATA / "tasks.jsonl")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1.5e-5)
    parser.add_argument("--out", type=Path, default=Path("out/quick"))
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    seeds, steps = (range(2), 100) if on_gpu else (range(1), 2)
    jobs = [Job(arm=arm, seed=seed, lr=given.lr, steps=steps) for seed in seeds for arm in arms() if arm.name in ARMS]
    options = {"model": given.model, "tasks": given.tasks, "vocabulary": given.vocabulary, "device": given.device}
    if on_gpu:
        start_sharing()
    (given.out / "grid.jsonl").unlink(missing_ok=True)
    try:
        run_all([lambda _: jobs], given.out, options, at_once=len(jobs) if on_gpu else 1, until=time.monotonic() + 1800)
    finally:
        stop_sharing()
    mine = complete_runs(read_runs(given.out / "grid.jsonl"))
    filed = complete_runs(read_runs(DATA / "grid.jsonl"))
    for title, found in (("here", mine), ("on file", {arm: filed[arm] for arm in ARMS if arm in filed})):
        print(f"\n{title}\n" + "\n".join(table_of_arms(found)))
    runs = mine.get("exact: exact", {})
    return int(not runs or any(sum(run["curves"]["differing"]) for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
