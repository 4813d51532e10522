"""What a newcomer gets wrong is one line that names it and says what to do: no traceback, no silence, exit code 2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

import tokentrue as tt
from tests.cli.test_extras import run_without
from tests.gateway.world import Server, scripted_server
from tokentrue.app.wiring import ModelConfig, ServeConfig
from tokentrue.cli.common import pluralise, print_table, progress_bar, show_share
from tokentrue.cli.main import COMMANDS, main, run
from tokentrue.cli.rollout import print_summary
from tokentrue.cli.samples import NAMES
from tokentrue.cli.serve import greet
from tokentrue.environments import SMALL_MODEL
from tokentrue.providers.registry import ENGINES
from tokentrue.providers.remote import RemoteOptions
from tokentrue.samples.formats import FORMATS

KEY = "a-long-admin-key"
AT_FIRST = [
    "bad.jsonl", "bad.parquet", "bad.safetensors", "bad.toml", "broken_env.py", "cut.parquet", "cut.safetensors",
    "deep.jsonl", "empty", "file", "noise.bin",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a file, an empty directory, files that are not what their names say, an environment that
    cannot be loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENTRUE_ADMIN_KEY", raising=False)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("bad.parquet", "bad.safetensors", "cut.safetensors", "bad.jsonl"):
        (tmp_path / name).write_text("no samples here")
    (tmp_path / "cut.safetensors").write_bytes((10**6).to_bytes(8, "little") + b'{"a"')
    (tmp_path / "cut.parquet").write_bytes(b"PAR1" + b"\0" * 40)
    (tmp_path / "deep.jsonl").write_text("[" * 5000)
    (tmp_path / "noise.bin").write_bytes(bytes(range(128, 256)))
    (tmp_path / "bad.toml").write_text("[train]\nstepps = 3\n")
    (tmp_path / "broken_env.py").write_text("import json\n\nTASKS = json.loads('{')\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == AT_FIRST
    return tmp_path


WRONG = [
    ("serve --port 0 --store sqlite:file/x.sqlite", "cannot open the journal", "give a writable path"),
    ("serve --port 0 --store here", "store must be sqlite:PATH", "memory"),
    ("serve --port 0 --store memory --model empty", "directory 'empty' has no tokenizer", "tokenizer.json"),
    ("serve --port 0 --store memory --model ./nowhere", "there is no directory './nowhere'", "hub id"),
    ("serve --port 0 --store memory --device cuda", "device: 'cuda' is not available", "use cpu"),
    ("serve --port 0 --store memory --device tpu9", "device: 'tpu9'", "use cpu, cuda"),
    ("serve --port 0 --store memory --dtype int8", "dtype: 'int8'", "one of float32"),
    ("serve --port 0 --store memory --engine warp", "no engine 'warp'", "choose one of"),
    (
        "serve --port 0 --engine scripted --script file --device cpu --store memory",
        "loads no model in this process",
        "--device is for exact and hf",
    ),
    ("verify empty", "has no tokenizer", "is it a model's?"),
    ("demo --out file/out", "file", "Not a directory"),
    ("demo --threads 0", "--threads", "greater than or equal to 1"),
    ("demo --heldout 0", "--heldout", "greater than or equal to 1"),
    ("demo --steps 0", "--steps", "greater than or equal to 1"),
    ("train --out file/out", "file", "Not a directory"),
    ("train --device cuda", "device: 'cuda' is not available", "use cpu"),
    ("train --dtype int8", "dtype: 'int8'", "one of float32"),
    ("train --model empty", "model: directory 'empty' has no tokenizer", "is it a model's?"),
    ("train --samples bad.jsonl --model empty", "bad.jsonl:1: not JSON", ""),
    ("train --model ./nowhere", "there is no directory './nowhere'", "hub id"),
    ("train --samples bad.parquet", "bad.parquet: not a parquet file", ""),
    ("train --set rollout.temperature=-1", "rollout.temperature: must be a number >= 0.0", "got -1"),
    ("train --config bad.toml", "bad.toml: train.stepps: unknown key", "did you mean steps?"),
    ("train --config bad.toml --set train.stepps=2", "tokentrue train: train.stepps: unknown key", "did you mean"),
    ("train --set rollout.environment=calculater", "no 'calculater'", "one of calculator"),
    ("train --engine vlm", "no engine 'vlm'", "did you mean vllm?"),
    ("train --engine vllm --set train.exact=false", "'vllm' needs --url", "engine.urls="),
    ("audit http://127.0.0.1:9", "a gateway or a journal, not a file", "`tokentrue samples` exports it"),
    ("conformance file", "no target 'file'", "a Python file with a subclass of Target"),
    ("train --set threads=0", "threads: must be a whole number >= 1", "got 0"),
    ("rollout --set rollout.temperature=-1", "rollout.temperature: must be a number >= 0.0", "got -1"),
    ("rollout --set rollout.temperature=nan", "rollout.temperature: must be a number >= 0.0", "got nan"),
    (
        "rollout --set rollout.max_tokens=18446744073709551616",
        "rollout.max_tokens must be from 1 to 2^31 - 1",
        "got 18446744073709551616",
    ),
    (
        "train --set rollout.temperature=1e39",
        "rollout.temperature must be a number: 0, or from 1e-30 to 1e30",
        "got 1e+39",
    ),
    ("rollout --out file/out", "file", "Not a directory"),
    (
        "rollout --url http://127.0.0.1:9",
        "no gateway is reachable at http://127.0.0.1:9",
        "is `tokentrue serve` running?",
    ),
    (
        "rollout --url http://127.0.0.1:9 --model empty",
        "--url names a gateway that has its own model",
        "leave --model out",
    ),
    ("rollout --device cuda", "device: 'cuda' is not available", "use cpu"),
    ("rollout --set rollout.environment=nowhere", "no 'nowhere'", "package.module:Class"),
    ("rollout --set rollout.environment=broken_env:Env", "broken_env:Env cannot be loaded", "JSONDecodeError"),
    ("samples http://127.0.0.1:9 -o x.jsonl", "no gateway is reachable", "is `tokentrue serve` running?"),
    ("samples file -o x.jsonl", "file is not a journal", "sqlite:PATH"),
    ("sessions file", "file is not a journal", "sqlite:PATH"),
    ("audit bad.parquet", "bad.parquet: not a parquet file", ""),
    ("audit cut.parquet", "cut.parquet: not a parquet file, or a damaged one", ""),
    ("audit bad.safetensors", "bad.safetensors: not a safetensors file", ""),
    ("audit cut.safetensors", "cut.safetensors: not a safetensors file", ""),
    ("audit noise.bin", "noise.bin: neither JSON lines nor parquet nor safetensors", ""),
    ("audit deep.jsonl", "deep.jsonl:1: not JSON", ""),
    ("audit bad.jsonl", "bad.jsonl:1: not JSON", ""),
    ("view nowhere.jsonl", "nowhere.jsonl: no such file", ""),
    ("view file --export file/page.html", "file", ""),
    ("diagnose bad.jsonl --trainer empty", "bad.jsonl:1: not JSON", ""),
    ("samples bad.jsonl -o empty", "-o empty: is a directory", "name a file in it"),
    ("verify calculator --template noise.bin", "noise.bin is not text", ""),
    ("samples nowhere.sqlite --format verl -o x.jsonl", "format verl writes a .parquet file", "name it x.parquet"),
    ("samples nowhere.sqlite -o x.parquet --format jsonl", "format jsonl writes a .jsonl file", "name it x.jsonl"),
    ("verify calculater", "there is no directory 'calculater'", "did you mean calculator?"),
    ("serve --port 0 --store memory --engine vlm", "no engine 'vlm'", "scripted; did you mean vllm?"),
    ("serve --port 0 --store memory --set engine.options.modle=x", "no option 'modle'", "did you mean model?"),
    ("serve --port 0 --store memory --adapter a=nowhere", "--adapter a: there is no directory 'nowhere'", ""),
    ("serve --port 0 --store sqlite:noise.bin", "file is not a database", "give a writable path"),
]


@pytest.mark.parametrize(("line", "wrong", "advice"), WRONG, ids=[line for line, *_ in WRONG])
def test_one_line_names_it(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, wrong: str, advice: str
) -> None:
    name, *rest = line.split()
    assert run(name, rest) == 2
    said = capsys.readouterr()
    text = said.err.replace("  loading", "loading")
    assert wrong in text and advice in text and "Traceback" not in text, text
    lines = [each for each in text.splitlines() if each.strip() and not each.startswith("loading")]
    assert len(lines) == 1 or "Usage:" in text, text


EVERYTHING = {
    "serve --port 0 --store here --engine hf --model calculater --set engine.options.modle=x": [
        "did you mean calculator?",
        "did you mean model?",
        "store must be sqlite:PATH",
    ],
    "serve --set server.prot=1 --set limits.in_flght=2": ["did you mean port?", "did you mean in_flight?"],
    "serve --port {port} --store sqlite:noise.bin --engine vllm --device cpu": [
        "--device is for exact and hf",
        "'vllm' needs --url",
        "file is not a database",
        "is in use; choose another with --port",
    ],
    "train --out file/x --model ./nowhere --set rollout.environment=calculater --engine vllm --set train.exact=false": [
        "Not a directory",
        "environment: no 'calculater'",
        "no directory './nowhere'",
        "'vllm' needs --url",
    ],
    "verify calculater --template nowhere --set x": ["did you mean calculator?", "no file 'nowhere'", "expected k=v"],
}


@pytest.mark.parametrize(("line", "wrong"), EVERYTHING.items())
def test_everything_that_is_wrong_is_named_before_anything_is_loaded(folder: Path, line: str, wrong: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = line.format(port=taken.getsockname()[1]).split()
        done = run_without({"torch", "transformers"}, *arguments)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == len(wrong) and all(said in line for said, line in zip(wrong, lines, strict=True)), done.stderr
    assert {path.name for path in folder.iterdir()} <= {*AT_FIRST, "noise.bin.lock", "noise.bin.workers"}, (
        "nothing is written"
    )


def test_the_options_of_the_table_are_those_of_the_engines() -> None:
    for name, kind in ENGINES.items():
        module, _, attribute = kind.address.partition(":")
        taken = signature(getattr(import_module(module), attribute)).parameters
        shared = set(RemoteOptions.__annotations__) if kind.remote else set()  # passed on as keywords
        assert set(kind.options) == set(taken) - {"options"} | shared, name


def test_the_help_lists_all_formats() -> None:
    assert NAMES.split(", ") == list(FORMATS)


def test_the_traceback_of_an_environment_is_in_the_log(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rollout", ["--set", "rollout.environment=broken_env:Env", "--out", "out"]) == 2
    assert (
        "(broken_env.py:3)" in capsys.readouterr().err or "decoder.py" in (folder / "out" / "rollouts.log").read_text()
    )
    assert (
        "Traceback" in (folder / "out" / "rollouts.log").read_text()
        and "broken_env.py" in (folder / "out" / "rollouts.log").read_text()
    )


AN_AGENT = """
from tokentrue.environments import Task

class Mine:
    name = "mine"
    def tasks(self, count, *, seed=0, split="train"):
        return [Task(task_id=f"mine/{i}", prompt=f"what is {i} plus 1?") for i in range(count)]
    async def run(self, client, task):
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task.prompt}])
        if task.prompt.startswith("what is 1 "):
            raise KeyError("a mistake of the agent")
        return 1.0
"""


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TOKENTRUE_ADMIN_KEY", KEY)
    server = scripted_server(folder, ["It is 4."] * 8, admin_key=KEY)
    yield server
    server.stop()


def test_an_environment_of_the_current_directory(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_own_env.py").write_text(AN_AGENT)
    size = ["--set", "rollout.tasks=2", "--set", "rollout.group_size=1", "--set", "rollout.environment=my_own_env:Mine"]
    assert run("rollout", ["--url", server.url, "--out", "out", *size]) == 1
    said = capsys.readouterr().out
    assert (
        "2 rollouts in 2 groups, 1 failed" in said
        and "KeyError: 'a mistake of the agent'" in said
        and "Traceback" not in said
    )
    log = (folder / "out" / "rollouts.log").read_text()
    assert (
        "tracebacks in out/rollouts.log" in said
        and "Traceback" in log
        and 'raise KeyError("a mistake of the agent")' in log
    )


def test_the_gateways_own_words_are_shown(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rest in (("samples", ["-o", "x.jsonl"]), ("sessions", []), ("rollout", [])):
        monkeypatch.setenv("TOKENTRUE_ADMIN_KEY", "wrong-" + KEY)
        address = ["--url", server.url] if name == "rollout" else [server.url]
        assert run(name, [*address, *rest]) == 2
        said = capsys.readouterr().err
        assert (
            "the gateway answered 401" in said and "TOKENTRUE_ADMIN_KEY" in said and len(said.strip().splitlines()) == 1
        ), said


def test_the_default_journal_of_another_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start records a session with the model of these tests; the second would serve the shipped one from the
    same file."""
    from tokentrue.app.wiring import DEFAULT_STORE

    path = folder / DEFAULT_STORE.removeprefix("sqlite:")
    server = scripted_server(folder, ["It is 4."], admin_key=KEY)
    with tt.Client(server.url, KEY) as client:
        client.open(session_id="old")
    server.stop()
    (folder / "journal.sqlite").rename(path)
    assert run("serve", ["--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "holds sessions of another model" in said and "--store sqlite:PATH" in said and "old" in said


def test_a_defect_is_one_line_and_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(name: str) -> None:
        raise ZeroDivisionError("for this test")

    monkeypatch.setattr("tokentrue.cli.main.load_command", broken)
    assert run("audit", ["x"]) == 70
    said = capsys.readouterr().err
    assert "internal error: ZeroDivisionError: for this test" in said and len(said.splitlines()) == 1
    kept = Path(said.partition("the traceback is in ")[2].partition(",")[0])
    assert "Traceback" in kept.read_text()
    kept.unlink()
    monkeypatch.setenv("TOKENTRUE_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run("audit", ["x"])


@pytest.mark.slow
def test_few_steps_of_the_demo_are_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", ["--steps", "1", "--tasks", "1", "--heldout", "1", "--out", str(tmp_path / "demo")]) == 0
    said = capsys.readouterr().out
    assert "1 step of 14: too few to judge the reward by" in said and "NOT AS PROMISED" not in said
    assert "8 rollouts" in said and "(1 task, greedy)" in said and "for 1 step\n" in said


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("serv", "no command 'serv'; did you mean serve?"),
        ("coverage", "`tokentrue sessions STORE_OR_URL` has it"),
        ("export", "`tokentrue samples STORE_OR_URL -o FILE`"),
        ("xyzzy", "`tokentrue --help` lists them"),
    ],
)
def test_a_command_that_is_not_there(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_piped_tables_are_whole_and_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table("a title", ["one", "two"], [["x" * 150, "y" * 150]])
    assert f"{'x' * 150} │ {'y' * 150}" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table("a title", ["one"], [["wrong"]])
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    print_table("a title", ["one"], [["wrong"]])
    assert "\x1b" not in capsys.readouterr().out, "neither colour nor bold"


def test_progress_without_a_terminal_is_a_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("training", 3) as advance:
        for step in range(3):
            advance(f"reward 0.{step}")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  0:")[0] for line in lines] == [f"  training {n + 1}/3  reward 0.{n}" for n in range(3)]
    assert [line.endswith(" left") for line in lines] == [False, True, False]
    with progress_bar("rollouts", 3, every_s=3600) as advance:
        for _ in range(3):
            advance("")
    assert capsys.readouterr().out.splitlines() == ["  rollouts 3/3"], "many short pieces are not many lines"


def test_coverage_is_rounded_down() -> None:
    assert [show_share(share) for share in (1.0, 0.99999, 2 / 3, 0.29)] == ["100.00%", "99.99%", "66.66%", "29.00%"]


def test_a_list_of_a_gateway_has_turns_and_coverage(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with tt.Client(server.url, KEY) as client, client.session(session_id="mine", group="g") as session:
        session.openai().chat.completions.create(model="m", messages=[{"role": "user", "content": "2+2?"}])
    assert run("sessions", [server.url]) == 0
    cells = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()]
    assert "┃session┃group┃state┃turns┃coverage┃reward┃" in cells and "│mine│g│ended│1│100.00%││" in cells, cells


def test_the_banner_has_lines_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    greet(ServeConfig(), "http://h:1", "tta-new")
    lines = capsys.readouterr().out.splitlines()
    assert "export TOKENTRUE_URL=http://h:1" in lines and "export TOKENTRUE_ADMIN_KEY=tta-new" in lines
    assert any("http://h:1/view" in line for line in lines)
    assert any("tokentrue samples http://h:1 -o samples.jsonl" in line for line in lines)
    greet(ServeConfig(), "http://h:1", None)
    assert "tta-" not in capsys.readouterr().out, "a key that was given is not printed"


def test_the_banner_names_the_toy_model(capsys: pytest.CaptureFixture[str]) -> None:
    greet(ServeConfig(), "http://h", None)
    shown = capsys.readouterr().out
    assert "toy model" in shown
    assert '-H "Authorization: Bearer $TOKENTRUE_ADMIN_KEY"' in shown, "a shell must expand the variable"
    greet(ServeConfig(model=ModelConfig(path=str(SMALL_MODEL))), "http://h", None)
    assert "toy model" not in capsys.readouterr().out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"tokentrue {tt.__version__}\n"
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and all(f"\n  {name} " in shown for name in COMMANDS)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["audit", "--help"]])
def test_a_full_standard_output_is_one_line(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        command, env = [sys.executable, "-m", "tokentrue", *arguments], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    assert done.returncode == 2 and "No space left on device" in done.stderr and len(done.stderr.splitlines()) == 1, (
        done.stderr
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["audit", "--help"]])
def test_a_reader_that_stops_early_sees_no_traceback(arguments: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command, env = [sys.executable, "-m", "tokentrue", *arguments], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_counted_nouns() -> None:
    assert [pluralise(n, "sample") for n in (0, 1, 2, 1024)] == ["0 samples", "1 sample", "2 samples", "1,024 samples"]


@pytest.mark.parametrize(
    "arguments", [["-c", "import tokentrue"], ["-m", "tokentrue", "--help"], ["-m", "experiments", "list"]]
)
def test_quick_starts_load_neither_torch_nor_transformers(arguments: list[str]) -> None:
    """What would make them slow is named."""
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, timeout=120)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and not loaded & {"torch", "transformers", "pyarrow", "starlette"}, json.dumps(
        sorted(loaded)[:5]
    )


MISTAKES = {  # of commands that load a model, and what is said of them
    "doctor --engine exact --model calculater": "did you mean calculator?",
    "doctor --engine vllm --url http://127.0.0.1:9 --model calculator": "no engine is reachable",
    "doctor --engine vllm --url 127.0.0.1:9 --model calculator": "is not the URL of an engine",
    "doctor --engine exact --model calculator --samples nothing.jsonl": "nothing.jsonl: holds no sample",
    "doctor --engine exact --model calculator -o nowhere/page.html": "directory nowhere does not exist",
    "serve --pipeline 0 --port 0 --store memory": "pipeline: must be a whole number >= 1, got 0",
    "serve --pipeline 4 --port 0 --store memory": "pipeline=4: choose 1 to 3",
    "serve --tensor 7 --port 0 --store memory": "tensor=7: choose 1, 2, 4 or 8",
    "diagnose nothing.jsonl --trainer calculator": "nothing.jsonl: holds no sample",
    "diagnose nothing.jsonl --trainer calculater": "--trainer: there is no directory 'calculater'",
    "diagnose nothing.jsonl --trainer calculator -o empty": "-o empty: is a directory",
    "train --samples nothing.jsonl": "nothing.jsonl: holds no sample",
    "train --set engine.options.tensor=7": "tensor=7: choose",
    "train --engine vllm --set train.exact=false --set engine.urls=['http://127.0.0.1:9']": "no engine is reachable",
    "rollout --engine vllm --set engine.urls=['http://127.0.0.1:9']": "no engine is reachable",
    "conformance nowhere": "no target 'nowhere'",
}


def test_a_mistake_is_said_before_torch_is_loaded(folder: Path) -> None:
    (folder / "nothing.jsonl").write_text("")
    code = f"""
import sys
sys.modules["torch"] = None
from tokentrue.cli.main import run
for line in {list(MISTAKES)!r}:
    name, *rest = line.split()
    print(line, run(name, rest), sep=" -> ", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    said = done.stderr
    for line, wrong in MISTAKES.items():
        told, _, said = said.partition(f"{line} -> 2\n")
        assert wrong in told and told.count("\n") <= 2, (line, told)


def test_rollouts_that_sampled_nothing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"rollout": "a/0", "group": "a", "reward": 0.0, "error": None, "samples": 0, "sampled": 0, "trained": 0}
    (tmp_path / "rollouts.jsonl").write_text(
        f"{json.dumps(row)}\n{json.dumps({**row, 'rollout': 'a/1', 'samples': 1})}\n"
    )
    (tmp_path / "transcripts").mkdir()
    print_summary(tmp_path, [], tmp_path / "rollouts.log", as_json=False)
    assert (
        f"1 rollout sampled nothing: the model was not asked; agents' output in {tmp_path / 'transcripts'}"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("name", "said"), [("train", "the same command resumes"), ("audit", "interrupted")])
def test_an_interrupted_command_says_so(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokentrue.cli.main.load_command", lambda _: command)
    assert run(name, []) == 130
    assert capsys.readouterr().err.endswith(f"{said}\n")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_closed_standard_output_is_no_internal_error(tmp_path: Path, closed: str) -> None:
    from tests.viewer.world import build_store

    build_store(tmp_path / "runs.sqlite")
    line = f'"{sys.executable}" -m tokentrue sessions "{tmp_path / "runs.sqlite"}" {closed}'
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
