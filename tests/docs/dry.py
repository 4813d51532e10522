"""Checks a command line without running it: its program reads every option and argument, and refuses those that it does
not know.

* `tokentrue …`, also under `torchrun`: parsed by the command's own parser, in this process.
* `python -m MODULE …`, `python FILE.py …`: parsed by the `add_argument` calls that stand in the program's source,
  without importing it:
  some programs need a GPU's libraries. A program without any takes no options.
* `python -m pytest …`: the files are there, and hold what `-m` and `-k` select; `make test` or `make test-slow` runs
  them.
* `pip install [-e] .[…]`, run in a clone, and `pip install tokentrue[…]`: the extras are those of this package.
* `docker compose …`: the service, its profile and its variables are in compose.yaml, and its `command` is parsed as
  above.
* Another project's program (`claude`, `codex`, `vf-eval` …): its options and variables are those with which our presets
  and tests start it.
* `python -m vllm…`: its options are those with which tests/providers/test_vllm_real.py starts a real server.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from packaging.requirements import Requirement

from tests.docs.fences import ROOT
from tokentrue.cli.main import load_command

AGENTS = ("claude", "codex", "gemini", "mini", "opencode", "pi", "qwen", "vf-eval")
AS_THEY_STAND = ("aider", "cline")  # tests/harness runs the very lines of the page
PLACEHOLDER = re.compile(r"<(?:the session's|its) \w+>")
VARIABLE = re.compile(r"^\w+=")
REFERENCE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
KEPT = ("action", "nargs", "dest", "required", "choices")
TYPES = {"int": int, "float": float}


def check(command: str, *, cwd: Path, env: Mapping[str, str]) -> None:
    """Raises AssertionError where the command line is wrong."""
    try:
        _check(command, cwd=cwd, env=env)
    except (Exception, SystemExit) as error:  # parsers leave in many ways
        raise AssertionError(f"$ {command}\n{error}") from error


def _check(command: str, *, cwd: Path, env: Mapping[str, str]) -> None:
    words = shlex.split(PLACEHOLDER.sub("VALUE", command), comments=True)
    variables: list[str] = []
    while words and VARIABLE.match(words[0]):
        variables.append(words.pop(0))
    match words:
        case ["tokentrue", *rest]:
            check_tokentrue(rest)
        case ["torchrun", *rest]:
            assert "-m" in rest and rest[rest.index("-m") + 1] == "tokentrue", command
            check_tokentrue(rest[rest.index("-m") + 2 :])
        case ["pip", "install", *rest]:
            check_pip(rest)
        case ["docker", "compose", *rest]:
            check_compose(rest, env)
        case ["python", "-m", module, *rest] if module.startswith("vllm."):
            check_vllm(rest)
        case ["python", "-c", code]:
            compile(code, "<page>", "exec")
        case ["python", "-m", "pytest", *rest]:
            check_pytest(rest)
        case ["python", "-m", module, *rest]:
            common = [ROOT / "benchmarks" / "__init__.py"] if module.startswith("benchmarks.") else []
            check_program(source_of(module), rest, *common)
        case ["python", file, *rest]:
            check_program(cwd / file, rest)
        case [program, *rest] if program in AGENTS or program == "export":
            check_agent([*variables, *words])
        case [program, *_] if program in AS_THEY_STAND:
            pass
        case _:
            raise AssertionError(f"no dry check for {command!r}")


def check_tokentrue(words: Sequence[str]) -> None:
    name, *rest = words
    app = typer.Typer(add_completion=False)
    app.command(name)(load_command(name))
    typer.main.get_command(app).make_context(name, list(rest))


def check_program(path: Path, words: Sequence[str], *common: Path) -> None:
    """`common` are other files whose `add_argument` calls count, unless the program has the same option."""
    parser = argparse.ArgumentParser(prog=path.name, exit_on_error=False, conflict_handler="resolve")
    trees = [ast.parse(each.read_text(encoding="utf-8")) for each in (*common, path)]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    for call in added:
        named = {word.arg: word.value for word in call.keywords if word.arg is not None}
        options: dict[str, Any] = {
            name: ast.literal_eval(named[name]) for name in KEPT if isinstance(named.get(name), ast.Constant)
        }
        kind = named.get("type")
        if isinstance(kind, ast.Name) and kind.id in TYPES:
            options["type"] = TYPES[kind.id]
        parser.add_argument(*map(ast.literal_eval, call.args), **options)
    if not added:
        words = [word for word in words if word.startswith("-")]
    _, unknown = parser.parse_known_args(list(words))
    assert not unknown, f"{path.name} does not take {unknown}"


def source_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def check_pytest(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-m", dest="mark")
    parser.add_argument("-k", dest="keyword")
    parser.add_argument("places", nargs="+")
    asked = parser.parse_args(list(words))
    for place in asked.places:
        files = sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]
        text = "".join(path.read_text(encoding="utf-8") for path in files)
        assert "def test_" in text, f"no test in {place}"
        assert asked.mark is None or f"mark.{asked.mark}" in text, f"no test of {place} is marked {asked.mark}"
        assert asked.keyword is None or asked.keyword in text, f"no test of {place} is named {asked.keyword}"


def check_pip(words: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = sorted(project["optional-dependencies"])
    for requirement in (Requirement(re.sub(r"^\.", "tokentrue", word)) for word in words if word != "-e"):
        assert requirement.name == "tokentrue" and requirement.extras <= set(extras), (
            f"{requirement}: tokentrue has {extras}"
        )


def check_compose(words: Sequence[str], env: Mapping[str, str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--profile")
    parser.add_argument("verb", choices=["up"])
    parser.add_argument("service")
    asked = parser.parse_args(list(words))
    service: Any = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][asked.service]
    profiles = service.get("profiles", [])
    assert asked.profile in profiles if profiles else asked.profile is None, (
        f"{asked.service} is in the profiles {profiles}"
    )
    for value in service["environment"].values():
        with_variables(value, env)
    check_tokentrue([with_variables(word, env) for word in service["command"]])


def with_variables(text: str, env: Mapping[str, str]) -> str:
    """Compose's own interpolation: ${NAME}, ${NAME:-default}, ${NAME:?required}."""

    def value(match: re.Match[str]) -> str:
        name, kind, word = match.groups()
        assert kind != "?" or env.get(name), f"compose.yaml: {word}"
        return env.get(name) or (word if kind == "-" else "")

    return REFERENCE.sub(value, text)


def check_agent(words: Sequence[str]) -> None:
    folders = (
        ROOT / "tokentrue" / "environments" / "agents",
        ROOT / "tests" / "harness",
        ROOT / "tests" / "gateway",
    )
    files = [
        path for folder in (*folders, ROOT / "tests" / "integrations" / "frameworks") for path in folder.glob("*.py")
    ]
    used = "".join(path.read_text(encoding="utf-8") for path in files)
    presets = json.dumps(tomllib.loads((folders[0] / "presets.toml").read_text(encoding="utf-8")))
    for word in words:
        name = word.partition("=")[0] if VARIABLE.match(word) else word
        if name != word or word.startswith("-"):
            assert f'"{name}"' in used + presets, f"neither a preset nor a test starts an agent with {name}"


def check_vllm(words: Sequence[str]) -> None:
    started = (ROOT / "tests" / "providers" / "test_vllm_real.py").read_text(encoding="utf-8")
    for option in (word for word in words if word.startswith("-")):
        assert f'"{option}"' in started, f"no test starts vLLM with {option}"
