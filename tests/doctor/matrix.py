"""The confusion matrices of docs/doctor.md.

`python -m tests.doctor.matrix play [MODEL|mixture] [float32|bfloat16] --set third --results FILE` plays the cases that
FILE does not hold yet and appends one JSON line for each; `python -m tests.doctor.matrix show FILE...` prints the
counts and what was not named right. `--only A,B` plays the cases whose name holds A or B, `--seed N` draws other
numbers, `--part I/N` plays every N-th case.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.doctor import (
    eighth_set,
    fifth_set,
    fourth_set,
    ninth_set,
    reported,
    second_set,
    seventh_set,
    sixth_set,
    tenth_set,
    third_set,
)
from tests.doctor.engines import CALCULATOR
from tokentrue.app.libraries import quiet_libraries
from tokentrue.doctor import Reference, examine
from tokentrue.doctor.reference import load_model, merge_adapter
from tokentrue.renderers import load_renderer

SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reported": (reported.DENSE, reported.HEALTHY),
    "mixture": (reported.MIXTURE, {"plain": reported.HEALTHY["plain"]}),
    "second": (second_set.FAULTS, second_set.HEALTHY),
    "third": (third_set.FAULTS, third_set.HEALTHY),
    "fourth": (fourth_set.FAULTS, fourth_set.HEALTHY),
    "fifth": (fifth_set.FAULTS, fifth_set.HEALTHY),
    "sixth": (sixth_set.FAULTS, sixth_set.HEALTHY),
    "seventh": (seventh_set.FAULTS, seventh_set.HEALTHY),
    "eighth": (eighth_set.FAULTS, eighth_set.HEALTHY),
    "ninth": (ninth_set.FAULTS, ninth_set.HEALTHY),
    "ninth mixture": (ninth_set.MIXTURE, ninth_set.MIXTURE_HEALTHY),
    "tenth": (tenth_set.FAULTS, tenth_set.HEALTHY),
    "tenth mixture": (tenth_set.MIXTURE, tenth_set.MIXTURE_HEALTHY),
}
# Causes that got a name after the set with the fault was written.
NAMED_SINCE = {
    "prompt not causal": "attention_mask",
    "first token evicted while decoding": "attention_mask",
    "new page unread": "attention_mask",
    "residual taken after the norm": "residual",
    "value scale forgotten": "weight_scale",
    "special token rows not loaded": "weights_missing",
    "logarithms to base ten": "log_base",
    "draft logprobs reported": "other_reports",
    "chunk positions restart": "decode_positions",
    "common logarithms": "log_base",
    "log-probabilities cut at -4": "bad_logprobs",
    "a bias on seven tokens": "logit_bias",
    "one head zeroed": "partial_sum",
    "a layer twice": "layer_order",
    "residual stream in bfloat16": "dtype_bfloat16",
    "last token twice": "prompt_changed",
    "five tokens dropped after the second": "prompt_changed",
    "a token dropped in the middle": "prompt_changed",
    "two first tokens": "prompt_changed",
    "a system message inserted": "prompt_changed",
    "boundary of a chunk": "attention_mask",
    "two experts exchanged": "expert_order",
}
VERDICTS = ("named", "listed", "unknown (right)", "unknown", "wrong", "missed", "ok", "false alarm")


def run_case(name: str, kind: str, model: Path, plain: Any, dtype: str, seed: int, make: Any) -> tuple[str, str]:
    """The verdict, and what the doctor said."""
    rng = random.Random(f"{seed} {name}")
    with tempfile.TemporaryDirectory() as folder:
        previous = None
        case = make(copy.deepcopy(plain), dtype, rng)
        engine, names = case.engine, case.names | ({NAMED_SINCE[name]} if name in NAMED_SINCE else set())
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
    listed = [{finding.fault, *finding.alternatives} for finding in report.faults]
    said = ", ".join(" or ".join(sorted(one)) for one in listed) + "".join(
        f" [{finding.detail[:150]}]" for finding in report.faults[:1]
    )
    if kind == "healthy":
        return ("false alarm" if found else "ok"), said
    if not found:
        return "missed", said
    if found == ["unknown"]:
        return ("unknown (right)" if "unknown" in names else "unknown"), said
    if set(found) <= names:
        return "named", said
    return ("listed" if all(one & names for one in listed) else "wrong"), said


def play(given: argparse.Namespace) -> None:
    quiet_libraries()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    label, results = Path(given.model).name, Path(given.results)
    with tempfile.TemporaryDirectory() as folder:
        is_mixture = given.model == "mixture"
        model = reported.mixture(Path(folder), CALCULATOR) if is_mixture else Path(given.model)
        plain = load_model(model)
        own = f"{given.set} mixture"
        faults, healthy = SETS[own if own in SETS else "mixture"] if is_mixture else SETS[given.set]
        cases = [
            (name, kind, make)
            for kind, made in (("fault", faults), ("healthy", healthy))
            for name, make in made.items()
        ]
        part, parts = map(int, given.part.split("/"))
        for name, kind, make in cases[part::parts]:
            row = {
                "set": given.set,
                "model": label,
                "dtype": given.dtype,
                "seed": given.seed,
                "kind": kind,
                "case": name,
            }
            is_done = any(row.items() <= one.items() for one in read_rows([results]))
            is_no_fault = given.dtype != "float32" and name in tenth_set.FLOAT32_ONLY
            if is_done or is_no_fault or not any(one in name for one in given.only.split(",")):
                continue
            start = time.monotonic()
            verdict, said = run_case(name, kind, model, plain, given.dtype, given.seed, make)
            row |= {"verdict": verdict, "said": said, "seconds": round(time.monotonic() - start)}
            print(f"{name} | {verdict} | {said} | {row['seconds']} s", flush=True)
            with results.open("a") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_rows(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]


def show(given: argparse.Namespace) -> None:
    rows = read_rows([Path(file) for file in given.files])
    print("| set | model | dtype | faults | " + " | ".join(VERDICTS) + " |\n" + "|---" * (4 + len(VERDICTS)) + "|")
    for key in dict.fromkeys((row["set"], row["model"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["set"], row["model"], row["dtype"]) == key]
        counts = Counter(row["verdict"] for row in mine)
        cells = (*key, sum(row["kind"] == "fault" for row in mine), *(counts[verdict] for verdict in VERDICTS))
        print("| " + " | ".join(map(str, cells)) + " |")
    print()
    for row in rows:
        if row["verdict"] in ("unknown", "wrong", "missed", "false alarm") or given.all:
            print(f"{row['verdict']}: {row['set']}, {row['model']}, {row['dtype']}: {row['case']}: {row['said']}")


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    player = commands.add_parser("play")
    player.set_defaults(run=play)
    player.add_argument("model", nargs="?", default=str(CALCULATOR))
    player.add_argument("dtype", nargs="?", default="float32")
    player.add_argument("--set", default="reported", choices=[*SETS])
    player.add_argument("--results", required=True)
    player.add_argument("--only", default="")
    player.add_argument("--seed", type=int, default=1)
    player.add_argument("--part", default="0/1")
    shower = commands.add_parser("show")
    shower.set_defaults(run=show)
    shower.add_argument("files", nargs="+")
    shower.add_argument("--all", action="store_true", help="every row, not only those to look at")
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
