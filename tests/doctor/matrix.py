"""The confusion matrices of docs/doctor.md: `python -m tests.doctor.matrix [MODEL|mixture] [float32|bfloat16]`.

Prints one row for each fault and each healthy engine, and the counts: named, unknown, wrong, missed, false alarms.
`--set second` and `--set third` play the sets of tests/doctor/second_set.py and third_set.py. `--only A,B` runs the cases whose name holds A or B, `--seed N` draws other numbers, `--part I/N` runs every N-th case.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.doctor import reported, second_set, third_set
from tests.doctor.engines import CALCULATOR
from tokentrue.app.libraries import quiet_libraries
from tokentrue.doctor import Reference, examine
from tokentrue.doctor.reference import load_model, merge_adapter
from tokentrue.renderers import load_renderer


def run_case(name: str, kind: str, model: Path, plain: Any, dtype: str, seed: int, make: Any) -> tuple[str, str]:
    """The verdict, and what the doctor said."""
    rng = random.Random(f"{seed} {name}")
    with tempfile.TemporaryDirectory() as folder:
        previous = None
        case = make(copy.deepcopy(plain), dtype, rng)
        engine, names = case.engine, case.names
        if case.previous is not None:
            case.previous.save_pretrained(folder)
            previous = folder
        own = copy.deepcopy(plain)
        if case.adapter is not None:
            own = merge_adapter(own, case.adapter)
        reference = Reference(own, source=model, adapter=case.adapter)
        report = asyncio.run(
            examine(
                engine, load_renderer(str(model)), reference, dtype=dtype, previous=previous, seed=rng.randrange(999)
            )
        )
    found = list(dict.fromkeys(finding.fault for finding in report.faults))
    said = ", ".join(found) + "".join(f" [{finding.detail[:150]}]" for finding in report.faults[:1])
    if kind == "healthy":
        return ("false alarm" if found else "ok"), said
    if not found:
        return "missed", said
    if found == ["unknown"]:
        return ("unknown (right)" if "unknown" in names else "unknown"), said
    return ("named" if set(found) <= names else "wrong"), said


def sound(healthy: Any, name: str) -> Any:
    return lambda model, dtype, rng: reported.Seeded(engine=healthy(name, model, dtype), names=frozenset())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(CALCULATOR))
    parser.add_argument("dtype", nargs="?", default="float32")
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--set", default="reported", choices=["reported", "second", "third"])
    given = parser.parse_args()
    quiet_libraries()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        is_mixture = given.model == "mixture"
        model = reported.mixture(Path(folder), CALCULATOR) if is_mixture else Path(given.model)
        plain = load_model(model)
        chosen: Any = {"reported": reported, "second": second_set, "third": third_set}[given.set]
        faults = reported.CASES if is_mixture else getattr(chosen, "DENSE", None) or chosen.FAULTS
        cases = [(name, "fault", make) for name, make in faults.items()]
        cases += [
            (name, "healthy", chosen.HEALTHY[name] if given.set == "third" else sound(chosen.healthy, name))
            for name in chosen.HEALTHY
        ]
        part, parts = map(int, given.part.split("/"))
        print("| case | verdict | said |\n|---|---|---|")
        for name, kind, make in cases[part::parts]:
            if any(one in name for one in given.only.split(",")):
                start = time.monotonic()
                verdict, said = run_case(name, kind, model, plain, given.dtype, given.seed, make)
                counts[verdict] = counts.get(verdict, 0) + 1
                print(f"| {name} | {verdict} | {said} | {time.monotonic() - start:.0f} s", flush=True)
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
