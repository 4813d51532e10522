"""A whole step of our trainer against a whole step of other trainers: parameters after it, from the same weights and
rows.

Slow: each case trains two models. verl runs in the Python that FRAMEWORKS_PYTHON names (`make test-frameworks`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
CLOSE = 1e-6


def run(python: str, module: str, folder: Path) -> dict[str, Any]:
    env = {
        **os.environ,
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [python, "-m", module, str(folder)], capture_output=True, text=True, env=env, cwd=ROOT, timeout=900
    )
    result = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert result is not None, done.stderr[-3000:]
    return json.loads(result.removeprefix("RESULT "))


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_trl_takes_the_same_step(tmp_path: Path) -> None:
    """One update, and two on the same rows, which clip ratios; with TRL's importance weights, without and with a
    reference model."""
    require_same_steps(run(sys.executable, "tests.integrations.trl_step", tmp_path), cases=10)


@pytest.mark.frameworks
@pytest.mark.timeout(1000)
def test_verl_takes_the_same_step(tmp_path: Path) -> None:
    """As above; six settings of verl, and its own advantages."""
    python = os.environ.get("TOKENTRUE_FRAMEWORKS_PYTHON")
    assert python, "set TOKENTRUE_FRAMEWORKS_PYTHON, see docs/trainers.md"
    require_same_steps(run(python, "tests.integrations.verl_step", tmp_path), cases=12)


def require_same_steps(told: dict[str, Any], *, cases: int) -> None:
    other = told.pop("other")
    assert len(told) == cases
    for name, seen in told.items():
        assert seen["moved"] > 5e-4, f"{name}: the other trainer did not train"
        updates = int(name[-1])
        assert seen["apart"] < CLOSE * updates, f"{name}: {seen['apart']:.3g} apart after a step of {seen['moved']:.3g}"
    assert other > 100 * CLOSE, "without the correction the step is another one, or this test cannot tell"
