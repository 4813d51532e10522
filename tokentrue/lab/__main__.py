"""`python -m tokentrue.lab NAME …`: the same experiments where the command line's own dependencies are not installed (a
bare GPU box)."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from tokentrue.lab.arms import Scale
from tokentrue.lab.registry import EXPERIMENTS, run_experiment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tokentrue.lab")
    parser.add_argument("name", choices=list(EXPERIMENTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--tasks")
    parser.add_argument("--device")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--groups", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path, default=Path("out/lab"))
    given = parser.parse_args()
    named = {key: getattr(given, key) for key in ("model", "tasks", "device", "steps", "groups", "lr", "jobs")}
    scale = replace(
        Scale(seeds=tuple(range(given.seeds))), **{key: value for key, value in named.items() if value is not None}
    )

    def report(result: dict[str, object]) -> None:
        print(
            result["arm"],
            result["seed"],
            result.get("after"),
            result.get("seconds"),
            result.get("error", ""),
            flush=True,
        )

    print(
        run_experiment(given.name, scale, quick=given.quick, out=given.out, only=given.only, on_result=report).as_text()
    )


if __name__ == "__main__":
    main()
