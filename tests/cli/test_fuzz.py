"""Every command under random wrong arguments and files: an exit code of the contract, one line or a usage text, never a
traceback.

Commands run in this process, so that a slice of 260 calls fits into `make test`; `pytest -m slow
tests/cli/test_fuzz.py` runs 4,000. A call that would start long work is given at least one wrong argument; a call that
goes through anyway is stopped after its time limit.
"""

from __future__ import annotations

import contextlib
import io
import random
import signal
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer import Typer
from typer.main import get_command

import tokentrue.engine  # before any time limit: an import that is broken off half-way cannot be made again
import tokentrue.train  # noqa: F401
from tokentrue.cli.main import COMMANDS, load_command, main
from tokentrue.environments import SMALL_MODEL

LIMIT_S = 12.0
WORDS = [
    "",
    " ",
    "-",
    "--",
    "-1",
    "0",
    "nan",
    "inf",
    "1e999",
    "9" * 40,
    "äöü🙂",
    "a=b",
    "=",
    "a.b.c=1",
    "x" * 300,
    "null",
]
WORDS += ["[1,", "%s", "..", "~"]
URLS = [
    "http://127.0.0.1:9",
    "http://",
    "https://[",
    "http://127.0.0.1:999999",
    "ftp://x",
    "postgresql://127.0.0.1:9/x",
]
SETS = ["server.port=x", "train.steps=-1", "rollout.tasks=0", "rollout=1", "rollout.temperature=nan", "model.path=", "engine.name=",
        "loss.name=none", "optim.lr=abc", "limits.in_flight=[1]", "a..b=1", "rollout.environment=os:getcwd",
        "rollout.options.x=1"]  # fmt: skip
FITTING = {
    "--engine": ["exact", "hf", "vllm", "sglang", "scripted"], "--device": ["cpu", "cuda", "tpu"], "--dtype": ["float32", "int3"],
    "--format": ["jsonl", "parquet", "verl", "none"], "action": ["list", "show", "delete", "run"], "shell": ["bash", "csh"],
    "name": ["render", "thresholds"], "--history": ["keep", "none"], "--store": ["memory", "sqlite:/dev/null/x"],
}  # fmt: skip


GUARDS = {  # at least one of these stops a call that would otherwise work for long
    "serve": [
        ["--set", "server.port=x"],
        ["--engine", "none"],
        ["--model", "./nowhere"],
        ["--store", "here"],
        ["--set", "a..b=1"],
    ],
    "train": [
        ["--set", each]
        for each in ("train.steps=-1", "rollout.tasks=0", "optim.lr=abc", "loss.name=none", "model.path=./nowhere")
    ],
    "rollout": [
        ["--set", each]
        for each in ("rollout.tasks=0", "rollout.environment=boom:Env", "rollout.temperature=nan", "a..b=1")
    ],
    "demo": [["--threads", "0"], ["--out", "/dev/null/x"]],
    "view": [["--port", "-1"], ["--port", "99999"]],
    "doctor": [["--dtype", "int3"], ["--engine", "none"]],
    "conformance": [["--levels", "x"], ["--dialects", "none"], ["--turns", "0"], ["--case", "1"]],
}


class Stuck(BaseException):
    """Raised by the alarm: the call had nothing wrong that it noticed."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    draw = random.Random(7)
    bodies = {
        "empty": b"", "text.txt": b"hello\n", "nul.jsonl": b"\0" * 64, "noise.bin": draw.randbytes(4096), "list.jsonl": b"[1, 2]\n",
        "object.jsonl": b"{}\n", "row.jsonl": b'{"sample_id": 1, "token_ids": "x", "tokentrue": {}}\n', "deep.jsonl": b"[" * 5000 + b"\n",
        "cut.parquet": b"PAR1" + draw.randbytes(64) + b"PAR1", "cut.safetensors": (40).to_bytes(8, "little") + b'{"a": {"dtype": "F32"}}',
        "huge.safetensors": (2**62).to_bytes(8, "little") + b"{", "bad.sqlite": b"SQLite format 3\0" + draw.randbytes(200),
        "bad.toml": b"a = [", "odd.toml": b'[rollout]\ntasks = "many"\n', "keys.toml": b"nothing = 1\n",
        "latin.toml": b"a = '\xe9'\n", "bad.jinja": b"{% for x in", "reading.jsonl": b'{"sample_id": "s", "logprobs": [1, "x"]}\n',
    }  # fmt: skip
    for name, body in bodies.items():
        (folder / name).write_bytes(body)
    (folder / "directory").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "nothing"}')
    (folder / "model" / "tokenizer.json").write_text("{")
    (folder / "boom.py").write_text("raise RuntimeError('at import')\n")
    return [str(path) for path in sorted(folder.iterdir())] + [str(folder / "missing" / "file")]


def parameters_of(name: str) -> Sequence[Any]:
    app = Typer(add_completion=False)
    app.command(name)(load_command(name))
    return get_command(app).params


def make_value(draw: random.Random, parameter: Any, values: list[str], *, is_number: bool) -> str:
    """Mostly of the parameter's own type, so that the call gets past its parser."""
    if parameter.opts[-1] == "--set" and draw.random() < 0.8:
        return draw.choice(SETS)
    if is_number and draw.random() < 0.85:
        return draw.choice(["0", "1", "-1", "7", "100000"])
    return draw.choice(FITTING.get(parameter.opts[-1], values) if draw.random() < 0.5 else values)


def make_call(draw: random.Random, name: str, files: list[str]) -> list[str]:
    values = [*WORDS, *URLS, *files, *(f"sqlite:{path}" for path in files), "boom:Env", str(SMALL_MODEL)]
    annotations = {each.name: str(each.annotation) for each in signature(load_command(name)).parameters.values()}
    numbers = {each for each, text in annotations.items() if text.startswith(("Annotated[int", "Annotated[float"))}
    words: list[str] = []
    for parameter in parameters_of(name):
        is_option = parameter.opts[0].startswith("-")
        if draw.random() > (0.95 if parameter.required else 0.15 if is_option else 0.6):
            continue
        words += [parameter.opts[-1]] if is_option else []
        words += (
            []
            if getattr(parameter, "is_flag", False)
            else [make_value(draw, parameter, values, is_number=parameter.name in numbers)]
        )
    words += ["--nothing"] if draw.random() < 0.02 else []
    return words + draw.choice(GUARDS.get(name, [[]]))


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stuck

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_call(words: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(Stuck), time_limit():
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 2
    return code, out.getvalue()


def check_calls(seed: int, count: int, files: list[str]) -> None:
    draw = random.Random(seed)
    names = [*COMMANDS, "nothing"]
    for number in range(count):
        name = names[number % len(names)]
        words = [name, *(make_call(draw, name, files) if name in COMMANDS else draw.sample(WORDS, 2))]
        code, said = run_call(words)
        assert code in {0, 1, 2}, f"{words}: exit {code}\n{said[-1500:]}"
        assert "Traceback" not in said and "internal error" not in said, f"{words}\n{said[-1500:]}"


pytestmark = [
    pytest.mark.filterwarnings(
        "ignore"
    ),  # a refused call may leave a socket or a file to the collector; its process ends
]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_call_prints_a_traceback(
    seed: int, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_calls(seed, 130, files)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_calls_print_no_traceback(
    seed: int, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_calls(seed, 400, files)
