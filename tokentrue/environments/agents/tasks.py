"""Tasks for command-line agents: a JSON-lines file, or unmodified Harbor task directories.

A line: `{"id": "fix-1", "prompt": "…", "dir": "repo", "ref": "main", "score": "pytest -q", "split": "heldout",
"env": {…}}`; only `prompt` is required. `dir`, relative to the file, is copied or checked out for every rollout."""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from tokentrue.environments.agents.sandbox import Network
from tokentrue.environments.base import Split, digest
from tokentrue.errors import ConfigError
from tokentrue.plain_json import read_numbered_lines

Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00]*\Z")]  # NUL ends an argument of a command
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # 0: the environment's limit applies


class TaskLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    prompt: Text
    id: Text | int | float | None = None
    dir: Text | None = None
    ref: Text | None = None
    score: Text | None = None
    split: Split = "train"
    env: dict[Text, Text | int | float | bool] = {}
    timeout_s: Seconds | None = None
    network: Network | None = None


class AgentTask(TaskLine, kw_only=True):
    """`tests` is the directory of a Harbor task's verifier, hidden from the agent."""

    task_id: str
    source: Path | None = None
    score_timeout_s: float | None = None
    tests: Path | None = None

    @property
    def variables(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.env.items()}

    @property
    def has_dockerfile(self) -> bool:
        return self.tests is not None and self.source is not None and (self.source / "Dockerfile").exists()


class HarborCommand(msgspec.Struct, frozen=True):
    timeout_sec: Seconds | None = None


class HarborEnvironment(msgspec.Struct, frozen=True):
    env: dict[Text, Text | int | float | bool] = {}


class HarborSettings(msgspec.Struct):
    agent: HarborCommand = HarborCommand()
    verifier: HarborCommand = HarborCommand()
    environment: HarborEnvironment = HarborEnvironment()


def read_tasks(path: Path) -> list[AgentTask]:
    if path.is_dir():
        folders = [path] if (path / "task.toml").exists() else sorted(p.parent for p in path.glob("*/task.toml"))
        found = [harbor_task(folder.resolve()) for folder in folders]
    else:
        try:
            found = [task_from_line(line, f"{path}:{n}", path.parent) for n, line in read_numbered_lines(path)]
        except OSError as error:
            raise ConfigError(f"tasks: cannot read {path}: {error}") from error
    if not found:
        raise ConfigError(f"tasks: {path} holds no task")
    name, count = Counter(task.task_id for task in found).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"tasks: {path} holds {name!r} twice; give each task another id")
    return found


def task_from_line(line: bytes, where: str, folder: Path) -> AgentTask:
    try:
        read = msgspec.json.decode(line, type=TaskLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks: {where}: {error}") from error
    source = (folder / read.dir).resolve() if read.dir else None
    if source is not None and not source.is_dir():
        raise ConfigError(f"tasks: {where}: no directory {source}")
    name = str(read.id or digest(line.decode())[:12])
    return AgentTask(**msgspec.structs.asdict(read), task_id=name, source=source)


def harbor_task(folder: Path) -> AgentTask:
    try:
        settings = msgspec.convert(tomllib.loads((folder / "task.toml").read_text(encoding="utf-8")), HarborSettings)
        prompt = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"tasks: {folder} is no Harbor task: {error}") from error
    if not (folder / "tests" / "test.sh").exists():
        raise ConfigError(f"tasks: {folder} has no tests/test.sh")
    return AgentTask(
        task_id=folder.name,
        prompt=prompt,
        source=folder / "environment" if (folder / "environment").is_dir() else None,
        score="sh /tests/test.sh",
        env=settings.environment.env,
        timeout_s=settings.agent.timeout_sec,
        score_timeout_s=settings.verifier.timeout_sec,
        tests=folder / "tests",
    )
