"""Outside evidence: the parity and bridge suites of the PyPI sdist `renderers` 0.1.12, run against our renderer through an adapter.

They run in a process of their own, since their folder is called `tests` too. A failure must be one of `KNOWN`, each with its reason.
Slow: `python -m pytest tests/contract/test_outside_renderers.py -m slow`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests import parts
from tests.contract.subjects import _templates

VERSION = "0.1.12"
HERE = Path(__file__).parent
# model of their catalogue -> (tokenizer, template); "standin" is our BPE with the template's own tokens
MODELS = {
    "Qwen/Qwen3-8B": ("qwen3", ""),
    "Qwen/Qwen3.5-4B": ("qwen3.5", ""),
    "Qwen/Qwen3.5-9B": ("qwen3.5", ""),
    "Qwen/Qwen3.5-35B-A3B": ("qwen3.5", ""),
    "Qwen/Qwen3.5-122B-A10B": ("qwen3.5", ""),
    "Qwen/Qwen3.5-397B-A17B": ("qwen3.5", ""),
    "Qwen/Qwen3.6-35B-A3B": ("qwen3.5", "trl/qwen3_6.jinja"),
    "Qwen/Qwen3.8-27B": ("qwen3.5", "trl/qwen3_8.jinja"),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2.5", ""),
    "zai-org/GLM-5": ("glm-4.6", "llama.cpp/GLM-4.7-Flash.jinja"),
    "zai-org/GLM-5.1": ("glm-4.6", "xinference/glm-5.1"),
    "zai-org/GLM-5.3": ("glm-4.6", "xinference/glm-5.3"),
    "zai-org/GLM-4.7-Flash": ("glm-4.6", "llama.cpp/GLM-4.7-Flash.jinja"),
    "THUDM/GLM-4.5-Air": ("glm-4.6", "xinference/glm-4.5"),
    "MiniMaxAI/MiniMax-M2.5": ("standin", "xinference/MiniMax-M2.5"),
    "moonshotai/Kimi-K2-Instruct": ("kimi-k2", ""),
    "moonshotai/Kimi-K2.5": ("standin", "xinference/Kimi-K2.5"),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3.1", "xinference/deepseek-prover-v2"),
    "deepseek-ai/DeepSeek-R1": ("deepseek-v3.1", "xinference/deepseek-r1-0528"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("nemotron-3", ""),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": ("nemotron-3", "trl/nemotron_3_super.jinja"),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ("nemotron-3", "trl/nemotron_3_ultra.jinja"),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": ("nemotron-3", "trl/nemotron_3_5_lightning.jinja"),
    "google/gemma-4-31B-it": ("standin", "llama.cpp/google-gemma-4-31B-it.jinja"),
    "poolside/Laguna-XS.2": ("standin", "llama.cpp/poolside-Laguna-XS.2.jinja"),
    "poolside/Laguna-XS-2.1": ("standin", "llama.cpp/poolside-Laguna-XS-2.1.jinja"),
    "poolside/Laguna-S-2.1": ("standin", "llama.cpp/poolside-Laguna-S-2.1.jinja"),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama-3.2", ""),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama-3.2", ""),
    "openai/gpt-oss-20b": ("gpt-oss", ""),
}
# a part of the failing test's name -> why ours differs
KNOWN = {
    "-tool-call-none-": "a null content: the reference prints it as None or raises, ours is an empty text",
    "test_renderer_matches_reference[moonshotai/Kimi-K2.5-": "a tool result without a name gets the name of the call that it answers",
    "test_renderer_matches_reference[openai/gpt-oss-20b-": "their reference is the harmony library, ours the model's own template",
    "test_bridge_rejects_assistant_in_extension": "an assistant turn injected by the harness is a continuation that we support",
    "test_bridge_declines_across_user_turn_when_thinking_present[moonshotai/Kimi-K2.5]": "this template keeps the reasoning of a call turn",
    "test_bridge_declines_across_user_turn_when_thinking_present[openai/gpt-oss-20b]": "this template keeps the reasoning of a call turn",
}


@pytest.fixture(scope="module")
def suite() -> Path:
    """The sdist, unpacked, with the two small packages that it needs."""
    folder = parts.CACHE / f"renderers-{VERSION}"
    if not (folder / "deps").exists():
        parts.CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parts.CACHE) as scratch:
            pip = [sys.executable, "-m", "pip"]
            fetch = [*pip, "download", "--quiet", "--no-deps", "--no-binary", "renderers", "-d", scratch, f"renderers=={VERSION}"]
            if not parts.succeeds(fetch, cwd=Path(scratch)):
                pytest.skip("the sdist of `renderers` cannot be downloaded")
            with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as opened:
                opened.extractall(folder.parent, filter="data")
            (folder / "tests" / "__init__.py").touch()
            install = [*pip, "install", "--quiet", "--no-deps", "--target", str(folder / "deps"), "prime-pydantic-config", "tomli"]
            if not parts.succeeds(install, cwd=Path(scratch)):
                pytest.skip("prime-pydantic-config cannot be installed")
    return folder


def run(suite: Path, file: str, tmp_path: Path) -> dict[str, Any]:
    known = {}
    for model, (tokenizer, template) in MODELS.items():
        text = _templates().get(template, "") if template else ""
        if template and not text:
            continue
        try:
            folder = parts.standin_dir(text) if tokenizer == "standin" else parts.tokenizer_dir(tokenizer)
        except pytest.skip.Exception:
            continue
        known[model] = {"folder": str(folder), "template": text}
    (tmp_path / "parts.json").write_text(json.dumps(known))
    environment = os.environ | {
        "PARTS": str(tmp_path / "parts.json"),
        "REPORT": str(tmp_path / "report.json"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (suite, suite / "tests", HERE, parts.ROOT, suite / "deps"))),
    }
    command = [sys.executable, "-m", "pytest", "-p", "renderers_adapter", "-q", "--tb=line", "-c", os.devnull, "--rootdir", str(suite)]
    subprocess.run([*command, "-p", "no:cacheprovider", f"tests/{file}"], cwd=suite, env=environment, capture_output=True, check=False)
    return json.loads((tmp_path / "report.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("file", "least"), [("test_bridge.py", 80), ("test_parity.py", 5000)])
def test_their_suite(suite: Path, file: str, least: int, tmp_path: Path, record_property: Any) -> None:
    report = run(suite, file, tmp_path)
    counts = report["counts"][file]
    record_property("counts", counts)
    unknown = [failure for failure in report["failures"] if not any(part in failure for part in KNOWN)]
    assert not unknown, f"{len(unknown)} unexplained of {counts}:\n" + "\n".join(unknown[:20])
    assert counts["passed"] >= least
