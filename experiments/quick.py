"""The lab's main claims checked in half an hour: `python -m experiments.quick --model DIR [--device cuda]`.

On a GPU (12 GiB) four arms, five seeds, 300 steps each, then tables beside those of the runs on file; arms that would
not end in half an hour are left out. On a CPU one seed and two steps, the signs that need no learning: the exact arm
has no differing bit, the sources' δ is as large as on file. Exit code 1 when the exact arm has one or did not end, 2
where nothing can be run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from experiments.figures import complete_runs, table_of_arms
from experiments.grid import DATA, Job, arms, open_bench, read_runs, run_jobs

ARMS = ("exact: exact", "kernels: bypass", "fp8: bypass", "fp8: recompute + TIS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--tasks", type=Path, default=DATA / "tasks.jsonl")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1.5e-5)
    parser.add_argument("--out", type=Path, default=Path("out/quick"))
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    if trouble := find_trouble(given.model, on_gpu=on_gpu):
        parser.error(trouble)
    seeds, steps = (range(5), 300) if on_gpu else (range(1), 2)
    jobs = [Job(arm=arm, seed=seed, lr=given.lr) for arm in arms() for seed in seeds if arm.name in ARMS]
    began, file = time.monotonic(), given.out / "grid.jsonl"
    file.unlink(missing_ok=True)
    bench = open_bench(given.model, given.tasks, vocabulary=given.vocabulary, device=given.device)
    run_jobs(bench, jobs, file, steps=steps, at_once=5, until=time.monotonic() + 1800)
    mine = complete_runs(read_runs(file))
    filed = complete_runs(read_runs(DATA / "grid.jsonl"))
    for title, found in (("here", mine), ("on file", {arm: filed[arm] for arm in ARMS if arm in filed})):
        print(f"\n{title}\n" + "\n".join(table_of_arms(found)))
    print(f"\n{sum(map(len, mine.values()))} runs of {steps} steps in {time.monotonic() - began:.0f} s")
    runs = mine.get("exact: exact", {})
    if not runs:
        print("\nFAIL: no run of the exact arm ended; the lines above say why")
        return 1
    differing, compared = (
        int(sum(sum(run["curves"][key]) for run in runs.values())) for key in ("differing", "compared")
    )
    print(f"\n{'FAIL' if differing else 'OK'}: {differing:,} of the exact arm's {compared:,} log-probabilities differ")
    return int(differing > 0)


def find_trouble(model: Path, *, on_gpu: bool) -> str:
    """Empty if the runs can start."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (model / name).is_file()]
    if missing:
        return f"--model {model}: there is no {missing[0]}; give a Hugging Face directory of SmolLM2-135M-Instruct"
    if (kind := json.loads((model / "config.json").read_text()).get("model_type")) != "llama":
        return f"--model {model}: is a {kind} model, and the grid's program runs llama (SmolLM2-135M-Instruct) alone"
    if on_gpu and not torch.cuda.is_available():
        return "--device cuda: torch finds no GPU here; --device cpu runs two steps of each arm"
    return ""


if __name__ == "__main__":
    sys.exit(main())
