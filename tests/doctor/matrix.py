"""The confusion matrix of docs/doctor.md: `python -m tests.doctor.matrix` runs every seeded fault and prints one row
for each."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch

from tests.doctor.faults import FAULTS
from tests.doctor.test_faults import examined
from tokentrue.app.libraries import quiet_libraries


def main() -> None:
    quiet_libraries()
    torch.set_num_threads(1)
    print("| fault | named | probe | confidence |\n|---|---|---|---|")
    right = 0
    for name, (expected, build) in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            report = asyncio.run(examined(build(Path(folder))))
        named = ", ".join(dict.fromkeys(finding.fault for finding in report.faults)) or "nothing"
        right += named == expected
        first = report.faults[0] if report.faults else None
        where = f"{first.probe} | {first.confidence}" if first else "- | -"
        print(f"| {name} | `{named}`{'' if named == expected else f' (expected `{expected}`)'} | {where} |", flush=True)
    print(f"\n{right} of {len(FAULTS)} named rightly.")


if __name__ == "__main__":
    main()
