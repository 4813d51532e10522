"""`pip install tokentrue[gateway]` in an empty environment, in front of a real vLLM: `make test-vllm`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deploy.installed import build, installed
from tests.deploy.test_wheel import CLIENT, KEY
from tests.providers.test_vllm_real import model_dir, serve  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_the_installed_gateway_in_front_of_vllm(
    model_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    python = os.environ["TOKENTRUE_VLLM_PYTHON"]
    (wheel,) = build(tmp_path / "release").glob("*.whl")
    process, engine = serve(python, model_dir, tmp_path / "vllm.log", "--logprobs-mode", "processed_logprobs")
    try:
        with installed(wheel, "gateway", tmp_path / "gateway") as environment:
            flags = ("--engine", "vllm", "--url", engine, "--model", model_dir, "--store", "memory", "--port", "0")
            with environment.running("serve", *flags, TOKENTRUE_ADMIN_KEY=KEY) as url:
                told = environment.python(CLIENT, TOKENTRUE_URL=url, TOKENTRUE_ADMIN_KEY=KEY)
            assert told[1:] == [1.0, 1.0, 16], "every token that vLLM sampled is in the sample"
            assert "torch" not in environment.packages()
    finally:
        process.terminate()
        process.wait(30)
