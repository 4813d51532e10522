"""Outside evidence: the parity and bridge suites of the PyPI sdist `renderers` 0.1.12, run against our renderer through
an adapter.

They run in a process of their own, since their folder is called `tests` too. A cell that differs must have a
reason that is seen to hold on that cell (outside_reasons.py); docs/evidence.md has the counts.
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

from tests import carriers, parts
from tests.renderers.standins import standin_dir

VERSION = "0.1.12"
HERE = Path(__file__).parent
# what is counted where all of MODELS can be had; "failed" are those that a reason explains. docs/evidence.md prints the
# same numbers
EXPECTED = {
    "test_bridge.py": {"passed": 96, "failed": 23, "skipped": 37},
    "test_parity.py": {"passed": 7165, "failed": 231, "skipped": 151},
}
# model of their catalogue -> (tokenizer, template of tests/carriers.py); "standin" is our BPE with the template's own
# tokens
MODELS = {
    "Qwen/Qwen3-8B": ("qwen3", ""),
    **{f"Qwen/Qwen3.5-{size}": ("qwen3.5", "trl/qwen3_5_nothink.jinja") for size in ("0.8B", "2B")},
    **{f"Qwen/Qwen3.5-{size}": ("qwen3.5", "") for size in ("4B", "9B", "35B-A3B", "122B-A10B", "397B-A17B")},
    "Qwen/Qwen3.6-35B-A3B": ("qwen3.5", "trl/qwen3_6.jinja"),
    "Qwen/Qwen3.8-27B": ("qwen3.5", "trl/qwen3_8.jinja"),
    "Qwen/Qwen3.8-Flash-Next": ("qwen3.5", "xinference/qwen3.8-Flash-Next"),
    "Qwen/Qwen3-VL-4B-Instruct": ("qwen3", "trl/qwen3_vl.jinja"),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2.5", ""),
    **{f"google/gemma-4-{size}-it": ("standin", "trl/gemma4.jinja") for size in ("E2B", "E4B")},
    **{
        f"google/gemma-4-{size}-it": ("standin", "llama.cpp/google-gemma-4-31B-it.jinja") for size in ("26B-A4B", "31B")
    },
    "zai-org/GLM-5": ("glm-4.6", "xinference/glm-5"),
    "zai-org/GLM-5.1": ("glm-4.6", "xinference/glm-5.1"),
    "zai-org/GLM-5.3": ("glm-4.6", "xinference/glm-5.3"),
    "zai-org/GLM-4.7-Flash": ("glm-4.6", "llama.cpp/GLM-4.7-Flash.jinja"),
    "THUDM/GLM-4.5-Air": ("glm-4.6", "xinference/glm-4.5"),
    "MiniMaxAI/MiniMax-M2.5": ("standin", "xinference/MiniMax-M2.5"),
    "moonshotai/Kimi-K2-Instruct": ("kimi-k2", ""),
    "moonshotai/Kimi-K2.5": ("standin", "xinference/Kimi-K2.5"),
    "moonshotai/Kimi-K2.6": ("standin", "ours/Kimi-K2.6"),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3.1", "xinference/deepseek-v3"),
    "deepseek-ai/DeepSeek-R1": ("deepseek-v3.1", "xinference/deepseek-r1"),
    "deepseek-ai/DeepSeek-V4-Flash-0731": ("deepseek-v4", "llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731.jinja"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("nemotron-3", ""),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": ("nemotron-3", "trl/nemotron_3_super.jinja"),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ("nemotron-3", "trl/nemotron_3_ultra.jinja"),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": ("nemotron-3", "trl/nemotron_3_5_lightning.jinja"),
    "poolside/Laguna-XS.2": ("standin", "llama.cpp/poolside-Laguna-XS.2.jinja"),
    "poolside/Laguna-XS-2.1": ("standin", "llama.cpp/poolside-Laguna-XS-2.1.jinja"),
    "poolside/Laguna-S-2.1": ("standin", "llama.cpp/poolside-Laguna-S-2.1.jinja"),
    **{f"meta-llama/Llama-3.2-{size}-Instruct": ("llama-3.2", "") for size in ("1B", "3B")},
    "openai/gpt-oss-20b": ("gpt-oss", ""),
    "tencent/Hy3": ("standin", "llama.cpp/tencent-Hy3.jinja"),
    **{f"thinkingmachines/Inkling{size}": ("standin", "miles/inkling_fixed.jinja") for size in ("", "-Small")},
}


@pytest.fixture(scope="module")
def suite() -> Path:
    """The sdist, unpacked, with the two small packages that it needs."""
    folder = parts.CACHE / f"renderers-{VERSION}"
    if not (folder / "deps").exists():
        parts.CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parts.CACHE) as scratch:
            pip = [sys.executable, "-m", "pip"]
            fetch = [
                *pip,
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                "renderers",
                "-d",
                scratch,
                f"renderers=={VERSION}",
            ]
            if not parts.succeeds(fetch, cwd=Path(scratch)):
                pytest.skip("the sdist of `renderers` cannot be downloaded")
            with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as opened:
                opened.extractall(folder.parent, filter="data")
            (folder / "tests" / "__init__.py").touch()
            install = [
                *pip,
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(folder / "deps"),
                "prime-pydantic-config",
                "tomli",
            ]
            if not parts.succeeds(install, cwd=Path(scratch)):
                pytest.skip("prime-pydantic-config cannot be installed")
    return folder


def parts_json() -> dict[str, dict[str, str]]:
    """The models whose tokenizer and template can be had here."""
    known: dict[str, dict[str, str]] = {}
    for model, (tokenizer, template) in MODELS.items():
        text = carriers.all_templates().get(template, "")
        try:
            if template and not text:
                continue
            folder = standin_dir(text) if tokenizer == "standin" else parts.tokenizer_dir(tokenizer)
        except pytest.skip.Exception:
            continue
        known[model] = {"folder": str(folder), "template": text}
    return known


def run(suite: Path, file: str, tmp_path: Path, known: dict[str, dict[str, str]]) -> dict[str, Any]:
    (tmp_path / "parts.json").write_text(json.dumps(known))
    environment = os.environ | {
        "PARTS": str(tmp_path / "parts.json"),
        "REPORT": str(tmp_path / "report.json"),
        "HF_HUB_OFFLINE": "1",
        "TIKTOKEN_ENCODINGS_BASE": str(parts.harmony_vocabulary()),
        "PYTHONPATH": os.pathsep.join(map(str, (suite, suite / "tests", HERE, parts.ROOT, suite / "deps"))),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "renderers_adapter",
        "-q",
        "--tb=line",
        "-c",
        os.devnull,
        "--rootdir",
        str(suite),
    ]
    subprocess.run(
        [*command, "-p", "no:cacheprovider", f"tests/{file}"],
        cwd=suite,
        env=environment,
        capture_output=True,
        check=False,
    )
    return json.loads((tmp_path / "report.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", EXPECTED)
def test_their_suite(suite: Path, file: str, tmp_path: Path, record_property: Any) -> None:
    known = parts_json()
    report = run(suite, file, tmp_path, known)
    record_property("report", {key: report[key] for key in ("counts", "explained", "skips")})
    assert not report["failures"], f"{len(report['failures'])} unexplained:\n" + "\n".join(report["failures"][:20])
    assert report["counts"]["passed"] > 0
    assert sum(map(len, report["explained"].values())) == report["counts"]["failed"]
    if known.keys() == MODELS.keys():
        assert report["counts"] == EXPECTED[file]


def test_the_page_has_these_numbers() -> None:
    page = (parts.ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    for file, counts in EXPECTED.items():
        assert (
            f"| `{file}` | {sum(counts.values())} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |"
            in page
        )
