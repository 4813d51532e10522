"""Questions and answers of a `reasoning-gym` task as JSON lines, for `experiments.questions`.

pip install reasoning-gym
python scripts/make_reasoning_tasks.py chain_sum --set min_terms=2 --set max_terms=3 --set min_digits=1 --set
max_digits=1 -o OUT.jsonl
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--size", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="a setting of the task")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    settings = {name: int(value) for name, _, value in (text.partition("=") for text in given.set)}
    gym: Any = import_module("reasoning_gym")
    rows = {
        (item["question"], item["answer"])
        for item in gym.create_dataset(given.task, size=given.size, seed=given.seed, **settings)
    }
    given.out.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in sorted(rows)))
    print(f"{len(rows)} different questions in {given.out}")


if __name__ == "__main__":
    main()
