"""A command in an install without what it needs says which extra to install; the base needs neither torch nor
transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tokentrue.cli.main import COMMANDS, EXTRAS

ROOT = Path(__file__).parent.parent.parent


def run_without(modules: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in sorted(modules))
    code = f"import sys; {hide}; from tokentrue.cli.main import main; main({list(arguments)!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


NEEDS = {
    "serve --port 0": "gateway",
    "verify calculator": "gateway",
    "demo": "train",
    "train": "train",
    "view http://127.0.0.1:1": "gateway",
    "doctor --engine exact --model calculator": "engine",
}
LIGHT = ("--version", "--help", "audit nothing.jsonl", "samples sqlite:nothing.sqlite -o x")
IN_TURN = """
import contextlib, io, json
for line in {lines!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main(line.split())
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([line, code, said.getvalue()]))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[int | None, str]]:
    """Exit code and errors of each line on the base install, one after the other in one process."""
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in sorted(set().union(*EXTRAS.values())))
    code = f"import sys; {hide}; from tokentrue.cli.main import main" + IN_TURN.format(lines=[*NEEDS, *LIGHT])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return {line: (code, said) for line, code, said in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(("line", "extra"), NEEDS.items())
def test_the_missing_extra_is_named(line: str, extra: str, told: dict[str, tuple[int | None, str]]) -> None:
    code, said = told[line]
    assert code == 2 and f"pip install 'tokentrue[{extra}]'" in said
    assert len(said.strip().splitlines()) == 1, said


def test_the_demo_that_lacks_its_extra_leaves_no_directory(tmp_path: Path) -> None:
    done = run_without(set().union(*EXTRAS.values()), "demo", "--out", str(tmp_path / "out" / "demo"))
    assert done.returncode == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", LIGHT)
def test_the_base_has_what_a_trainer_needs(line: str, told: dict[str, tuple[int | None, str]]) -> None:
    assert "is not installed" not in told[line][1] and "Traceback" not in told[line][1]


SLOW = {"httpx", "sqlite3", "rich.progress", "tokentrue.samples", "tokentrue.sessions", "tokentrue.app.wiring"}


def test_every_help_text_needs_no_extra() -> None:
    """In one process, on the base install: each command's options, no word about what is not installed, and none of the
    modules whose import takes a tenth of a second or more."""
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in sorted(set().union(*EXTRAS.values())))
    code = f"import sys; {hide}; from tokentrue.cli.main import COMMANDS, run\n"
    code += "for name in COMMANDS: print(run(name, ['--help']))"
    code += f"\nprint('slow:', sorted({SLOW!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout.count("Usage: tokentrue ") == len(COMMANDS), done.stderr
    assert done.stdout.count("\n0\n") == len(COMMANDS)
    assert done.stdout.endswith("slow: []\n"), done.stdout[-300:]


def module_of(requirement: str) -> str:
    name = re.split("[<>=]", requirement)[0].split("[")[0].replace("-", "_")
    return "opentelemetry" if name.startswith("opentelemetry") else name


def test_the_table_names_what_the_extras_install() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        assert {module_of(line) for line in declared[extra]} - {"tokentrue"} == modules, extra


@pytest.mark.parametrize("format", ["parquet", "verl"])
def test_a_parquet_file_needs_its_extra_and_other_files_do_not(format: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    done = run_without({"pyarrow"}, "audit", str(tmp_path / "rows.parquet"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "pip install 'tokentrue[parquet]'" in done.stderr
    code = (
        "import sys; sys.modules['pyarrow'] = None; from tokentrue.samples import write_samples\n"
        "from tokentrue.errors import FileFormatError\n"
        f"write_samples([], 'rows.jsonl')\ntry: write_samples([], 'rows', format={format!r})\n"
        "except FileFormatError as error: print(error)"
    )
    told = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True, timeout=120)
    assert "pip install 'tokentrue[parquet]'" in told and sorted(tmp_path.iterdir()) == [
        tmp_path / "rows.jsonl",
        tmp_path / "rows.parquet",
    ], "nothing is left half-written"


@pytest.mark.parametrize("command", ["demo", "train"])
def test_a_path_that_cannot_be_written_is_one_line_before_anything_is_loaded(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    where = str(tmp_path / "file" / "out")
    done = run_without({"torch"}, command, "--out", where)
    assert (done.returncode, done.stderr) == (2, f"tokentrue {command}: {where}: Not a directory\n")
