"""Runs every test of this folder without pytest, for bare GPU machines.

python -m tests.gpu.job [name …]
Needs torch with triton, and transformers, safetensors, numpy and msgspec (unpacked wheels on PYTHONPATH will do).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
import traceback
from pathlib import Path

import torch

NEEDED = ("triton", "transformers", "safetensors", "numpy", "msgspec")


def main(names: list[str]) -> int:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"tests/gpu needs {', '.join(NEEDED)} beside torch; install {', '.join(missing)}")
        return 1
    if not torch.cuda.is_available():
        print("tests/gpu needs a CUDA device and found none")
        return 1
    failed = 0
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.gpu.{path.stem}")
        for name, test in sorted(vars(module).items()):
            if not name.startswith("test_") or (names and not any(n in f"{path.stem}.{name}" for n in names)):
                continue
            start = time.perf_counter()
            try:
                test()
                verdict = "ok"
            except Exception:
                failed += 1
                verdict = "FAILED\n" + "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
            print(f"{path.stem}.{name}: {verdict} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{failed} failed on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
