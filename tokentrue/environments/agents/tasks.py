"""Tasks for command-line agents: a JSON-lines file, or Harbor task directories as they are.

A line: `{"id": "fix-1", "prompt": "…", "dir": "repo", "ref": "main", "score": "pytest -q", "split": "heldout", "env":
{…}}`; only `prompt` is needed. `dir` is copied (or checked out) for every rollout and is relative to the file.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from tokentrue.environments.base import Split, Task, digest
from tokentrue.errors import ConfigError
from tokentrue.json_lines import read_numbered_lines

FIELDS = ("id", "prompt", "dir", "ref", "score", "split", "env", "timeout_s", "network")
TEXTS = ("id", "prompt", "dir", "ref", "score")
NO_ARGUMENT = re.compile(r"[\x00\ud800-\udfff]")  # NUL ends an argument, and UTF-8 has no lone surrogates
HARBOR_SCORE = "sh /tests/test.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """`tests` is the directory of a Harbor task's verifier, which the agent does not see."""

    task_id: str
    prompt: str
    source: Path | None = None
    ref: str | None = None
    score: str | None = None
    split: Split = "train"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float | None = None
    score_timeout_s: float | None = None
    tests: Path | None = None
    network: Literal["gateway", "host"] | None = None

    @property
    def as_task(self) -> Task:
        return Task(task_id=self.task_id, prompt=self.prompt, data={"agent_task": self})


def read_tasks(path: Path) -> list[AgentTask]:
    if path.is_dir():
        found = read_harbor(path)
    else:
        try:
            lines = [(number, line.decode("utf-8")) for number, line in read_numbered_lines(path)]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"tasks: cannot read {path}: {error}") from error
        found = [task_from_line(line, f"{path}:{number}", path.parent) for number, line in lines]
    if not found:
        raise ConfigError(f"tasks: {path} holds no task")
    seen: set[str] = set()
    for task in found:
        if task.task_id in seen:
            raise ConfigError(f"tasks: {path} holds {task.task_id!r} twice; give each task an id of its own")
        seen.add(task.task_id)
    return found


def task_from_line(line: str, where: str, folder: Path) -> AgentTask:
    try:
        read: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"tasks: {where} is not JSON: {error}") from error
    fields = cast("dict[str, Any]", read) if isinstance(read, dict) else dict[str, Any]()
    if not isinstance(fields.get("prompt"), str):
        raise ConfigError(f"tasks: {where} needs a prompt")
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise ConfigError(f"tasks: {where}: unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}")
    for name in TEXTS:
        check_text(fields.get(name), name, where)
    env = {str(name): str(value) for name, value in section(fields, "env").items()}
    check_text(" ".join([*env, *env.values()]), "env", where)
    source = (folder / fields["dir"]).resolve() if fields.get("dir") else None
    if source is not None and not source.is_dir():
        raise ConfigError(f"tasks: {where}: no directory {source}")
    if fields.get("split", "train") not in ("train", "heldout"):
        raise ConfigError(f"tasks: {where}: split must be train or heldout")
    if fields.get("network") not in (None, "gateway", "host"):
        raise ConfigError(f"tasks: {where}: network must be gateway or host")
    return AgentTask(
        task_id=str(fields.get("id") or digest(line)[:12]),
        prompt=fields["prompt"],
        source=source,
        ref=fields.get("ref"),
        score=fields.get("score"),
        split=fields.get("split", "train"),
        env=env,
        timeout_s=read_limit(fields, "timeout_s", where),
        network=fields.get("network"),
    )


def check_text(value: Any, name: str, where: str) -> None:
    """A task's text becomes an argument of a command, or a path: neither can hold what is refused here."""
    if value is None or (name == "id" and isinstance(value, int | float)):
        return
    if not isinstance(value, str):
        raise ConfigError(f"tasks: {where}: {name} must be text, got {value!r}")
    if found := NO_ARGUMENT.search(value):
        raise ConfigError(f"tasks: {where}: {name} holds {found[0]!r}, which no command line can hold")


def read_limit(fields: Mapping[str, Any], name: str, where: str) -> float | None:
    """A number of seconds above 0; None, and 0, leave it to the environment's own limit."""
    value = fields.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf):
        return value
    raise ConfigError(f"tasks: {where}: {name} must be a number of seconds, got {value!r}")


def read_harbor(path: Path) -> list[AgentTask]:
    """One task directory, or a directory of them."""
    folders = [path] if (path / "task.toml").exists() else sorted(found.parent for found in path.glob("*/task.toml"))
    return [harbor_task(folder.resolve()) for folder in folders]


def harbor_task(folder: Path) -> AgentTask:
    try:
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        prompt = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks: {folder} is no Harbor task: {error}") from error
    if not (folder / "tests" / "test.sh").exists():
        raise ConfigError(f"tasks: {folder} has no tests/test.sh")
    environment = folder / "environment"
    return AgentTask(
        task_id=folder.name,
        prompt=prompt,
        source=environment if environment.is_dir() else None,
        score=HARBOR_SCORE,
        env={str(name): str(value) for name, value in section(settings, "environment").get("env", {}).items()},
        timeout_s=read_limit(section(settings, "agent"), "timeout_sec", f"{folder / 'task.toml'}: agent"),
        score_timeout_s=read_limit(section(settings, "verifier"), "timeout_sec", f"{folder / 'task.toml'}: verifier"),
        tests=folder / "tests",
    )


def section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}


def needs_image(task: AgentTask) -> bool:
    """True for a Harbor task with a Dockerfile, whose steps are not run here."""
    return task.tests is not None and task.source is not None and (task.source / "Dockerfile").exists()


def select_split(tasks: Sequence[AgentTask], split: Split) -> list[AgentTask]:
    """Tasks without a held-out part serve for both."""
    return [task for task in tasks if task.split == split] or list(tasks)
