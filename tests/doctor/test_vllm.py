"""The doctor against a real vLLM on CPU: `make test-vllm`. `vllm_set.py` has the cases, of which those on file
in `vllm_results.jsonl` run here.

TOKENTRUE_DOCTOR_MODEL names another model directory than the shipped calculator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.doctor import vllm_set
from tests.doctor.engines import CALCULATOR
from tests.doctor.matrix import read_rows
from tests.doctor.vllm_set import CASES, RESULTS, Case
from tokentrue.doctor import EngineRoutes, Reference, examine
from tokentrue.providers import load
from tokentrue.renderers import load_renderer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]
MODEL = Path(os.environ.get("TOKENTRUE_DOCTOR_MODEL", str(CALCULATOR)))
# Of an earlier version of this test; the others are those that were examined, with what was said then.
EARLIER = ("other chat template", "other tokenizer revision", "raw log-probabilities", "bfloat16", "int8 weights")
PLAIN = {"model": CALCULATOR.name, "dtype": "float32"}
SEEN = {row["case"]: row["verdict"] for row in read_rows([RESULTS]) if PLAIN.items() <= row.items()}
EXPECTED = {**dict.fromkeys(EARLIER, "named"), **SEEN}
PLAYED = {name: case for name, case in CASES.items() if name in EXPECTED}
ORDERED = [name for names in vllm_set.by_server(PLAYED).values() for name in names]


@pytest.fixture(scope="module")
def url_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[str, Path]]]:
    """The URL of the case's server and its folder; the server before it ends when another one is needed."""
    if not os.environ.get("TOKENTRUE_VLLM_PYTHON"):
        pytest.fail(
            "set TOKENTRUE_VLLM_PYTHON to the Python of an environment with vllm; docs/engines.md says how to make one"
        )
    started: dict[Any, tuple[str, Path]] = {}
    with ExitStack() as stack:

        def start(name: str) -> tuple[str, Path]:
            key = vllm_set.server_key(CASES[name])
            if key not in started:
                started.clear()
                stack.close()
                folder = tmp_path_factory.mktemp("vllm")
                server = vllm_set.server(CASES[name], MODEL, folder, "float32")
                started[key] = stack.enter_context(server), folder
            return started[key]

        yield start


@pytest.mark.parametrize("seed", range(2))
async def test_other_prompts_find_no_fault_either(url_of: Callable[[str], tuple[str, Path]], seed: int) -> None:
    url, _ = url_of("plain")
    provider = load("vllm", url=url)
    routes = EngineRoutes(provider, url)
    try:
        renderer, reference = load_renderer(str(MODEL)), Reference.load(MODEL)
        report = await examine(provider, renderer, reference, routes=routes, dtype="float32", seed=seed)
    finally:
        await routes.close()
        await provider.close()
    assert report.exit_code == 0, report.faults
    assert sum(finding.verdict.value == "ok" for finding in report.findings) >= 12, report.findings


@pytest.mark.parametrize("name", ORDERED)
def test_a_healthy_vllm_is_not_accused_and_a_fault_is_named(
    name: str, url_of: Callable[[str], tuple[str, Path]]
) -> None:
    case: Case = CASES[name]
    url, folder = url_of(name)
    report = vllm_set.run_case(case, url, MODEL, folder, "float32")
    verdict, said = vllm_set.judge(case, report)
    assert verdict == EXPECTED[name], said
    if not case.expected:
        assert sum(finding["verdict"] == "ok" for finding in report["findings"]) >= 12, report["findings"]
