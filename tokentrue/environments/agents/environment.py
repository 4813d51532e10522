"""One rollout is one process of the agent, in a directory of its own, and one run of the score command. Read `run`
first."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from tokentrue.environments.agents.preset import AgentLaunch, SessionAddress
from tokentrue.environments.agents.presets import load_preset
from tokentrue.environments.agents.process import CANNOT_RUN, CommandResult, run_supervised
from tokentrue.environments.agents.sandbox import (
    DESCRIPTIONS,
    ChosenSandbox,
    SandboxKind,
    choose_sandbox,
    enter_bwrap,
    enter_docker,
    enter_namespace,
    folders_named_in,
    programs_in_home,
    remove_container,
)
from tokentrue.environments.agents.score import reward_from_command, reward_from_harbor
from tokentrue.environments.agents.tasks import AgentTask, needs_image, of_split, read_tasks
from tokentrue.environments.agents.workspace import (
    Workspace,
    WorkspaceKind,
    open_workspace,
    remove_abandoned,
    remove_tree,
    write_files,
)
from tokentrue.environments.base import Split, Task
from tokentrue.errors import AgentError, ConfigError

KEPT = ("PATH", "LANG", "LC_ALL", "NODE_PATH", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")  # of this process's environment
SESSION_URL = re.compile(r"(?P<root>.*/sessions/(?P<id>[^/]+))/v1/?")
HARBOR_WORK, HARBOR_TESTS, HARBOR_LOGS = Path("/app"), Path("/tests"), Path("/logs")


class CommandLineAgent:
    """`agent` is a preset's name or a command with `{task}` in it; `tasks` a JSON-lines file or Harbor task
    directories; `score` a shell command in the working directory. `program` names the executable where it is not on the
    PATH, `arguments` are added to the agent's own. `agent_timeout_s` ends the agent and
    scores what it did; a task's own time limit wins. `transcripts` is where the output of agents and score commands is
    kept. `readable` are paths of the home directory that stay in sight in a sandbox, beside the folders of files that
    `agent` and a score command name by absolute path, each for itself: the agent does not see what scores it. `image`
    is what docker runs."""

    name = "agent"

    def __init__(
        self,
        *,
        agent: str | None = None,
        tasks: str | None = None,
        score: str | None = None,
        workspace: WorkspaceKind = "copy",
        sandbox: SandboxKind = "auto",
        program: str | None = None,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        agent_timeout_s: float | None = None,
        score_timeout_s: float = 600.0,
        transcripts: str | None = None,
        directory: str | None = None,
        readable: Sequence[str] = (),
        image: str | None = None,
    ) -> None:
        if agent is None or tasks is None:
            raise ConfigError("agent: needs an agent and its tasks: --agent NAME_OR_COMMAND --tasks FILE_OR_DIRECTORY")
        if workspace not in get_args(WorkspaceKind) or sandbox not in get_args(SandboxKind):
            raise ConfigError("agent: workspace is copy or worktree; sandbox is auto, bwrap, namespace, docker or none")
        self.preset = load_preset(agent)
        self.all_tasks = read_tasks(Path(tasks))
        self.sandbox: ChosenSandbox = choose_sandbox(sandbox, image=image)
        self._image = image or ""
        self._readable, self._agent_folders = tuple(readable), folders_named_in(agent)
        self._program, self._arguments = program, tuple(arguments)
        self._score, self._env = score, dict(env or {})
        self._workspace: WorkspaceKind = workspace
        self._agent_timeout_s, self._score_timeout_s = agent_timeout_s, score_timeout_s
        self._transcripts = None if transcripts is None else Path(transcripts)
        self._directory = Path(directory or tempfile.gettempdir()).resolve()
        for task in self.all_tasks:
            if task.score is None and score is None:
                raise ConfigError(f"tasks: {task.task_id!r} has no score; give --score, or a score in its line")
        remove_abandoned(self._directory)

    def notes(self) -> list[str]:
        """What a user should know about how the tasks run here."""
        notes = [
            f"{self.preset.name}: each rollout runs {DESCRIPTIONS[self.sandbox]}; from turn to turn: {self.preset.changes}"
        ]
        images = sum(needs_image(task) for task in self.all_tasks)
        if images and self.sandbox != "docker":
            notes.append(
                f"{images} of {len(self.all_tasks)} tasks have a Dockerfile: no container runs here, so its steps are not run"
            )
        if self.sandbox == "none" and any(task.tests for task in self.all_tasks):
            raise ConfigError(
                "tasks: Harbor tasks use /app, /tests and /logs, which a plain process cannot have; use sandbox='bwrap'"
            )
        return notes

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        """The file's order where all are asked for, else a draw without repeats that depends on the seed alone."""
        chosen = of_split(self.all_tasks, split)
        if count < len(chosen):
            chosen = random.Random(f"{self.name}/{split}/{seed}").sample(chosen, count)
        made = [task.as_task for task in chosen]
        return [replace(task, data={**task.data, "pin": self.preset.pin}) for task in made] if self.preset.pin else made

    async def run(self, client: Any, task: Task) -> float:
        address, session_id = address_of(client)
        asked: AgentTask = task.data["agent_task"]
        program = self._find_program()
        async with open_workspace(asked.source, kind=self._workspace, ref=asked.ref, under=self._directory) as place:
            try:
                launch = self.preset.launch(address, asked.prompt)
                write_files(place.home, launch.home_files)
                write_files(place.work, launch.work_files)
                result = await self._run_agent(place, asked, program, launch)
                if result.code in CANNOT_RUN:
                    raise AgentError(
                        f"{self.preset.name} could not be run (exit code {result.code}): {tail_of(place.logs / 'agent.log')}"
                    )
                return await self._run_score(place, asked)
            finally:
                self._keep_transcript(place, session_id)

    def _find_program(self) -> str:
        if self.sandbox == "docker":
            return self._program or self.preset.program  # of the image
        found = shutil.which(self._program or self.preset.program)
        if found is None:
            raise ConfigError(f"agent: {self._program or self.preset.program!r} is not there; {self.preset.install}")
        return str(Path(found).absolute())

    async def _run_agent(self, place: Workspace, asked: AgentTask, program: str, launch: AgentLaunch) -> CommandResult:
        env = {**asked.env, **launch.env, **self._env}
        command = [program, *launch.arguments, *self._arguments]
        limit = asked.timeout_s or self._agent_timeout_s
        return await self._run_command(
            place, asked, command, env=env, output="agent.log", timeout_s=limit, readable=self._agent_folders
        )  # fmt: skip

    async def _run_score(self, place: Workspace, asked: AgentTask) -> float:
        command = asked.score or self._score or ""
        verifier = place.logs / "verifier"
        remove_tree(verifier)  # the agent may have written a reward of its own
        verifier.mkdir()
        limit = asked.score_timeout_s or self._score_timeout_s
        shown = {} if asked.tests is None else {asked.tests: HARBOR_TESTS}
        env = {**asked.env, "TASK_ID": asked.task_id}
        result = await self._run_command(
            place,
            asked,
            ["sh", "-c", command],
            env=env,
            output="score.log",
            timeout_s=limit,
            readable=folders_named_in(command),
            shown=shown,
        )
        printed = (place.logs / "score.log").read_text(errors="replace")
        if asked.tests is not None:
            return reward_from_harbor(verifier, result, printed)
        return reward_from_command(result, printed, command)

    async def _run_command(
        self,
        place: Workspace,
        asked: AgentTask,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        output: str,
        timeout_s: float | None,
        readable: Sequence[str],
        shown: Mapping[Path, Path] | None = None,
    ) -> CommandResult:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        every = {**kept, "HOME": str(place.home), "CI": "1", **env}
        given = [name for name in every if name not in KEPT]
        command = self._enter_sandbox(place, asked, command, shown or {}, (*self._readable, *readable), given)
        try:
            return await run_supervised(
                command, cwd=place.work, env=every, output=place.logs / output, timeout_s=timeout_s
            )
        finally:
            if self.sandbox == "docker":
                await asyncio.shield(asyncio.to_thread(remove_container, place.directory.name))

    def _enter_sandbox(
        self,
        place: Workspace,
        asked: AgentTask,
        command: Sequence[str],
        shown: Mapping[Path, Path],
        readable: Sequence[str],
        variables: Sequence[str],
    ) -> list[str]:
        """The command line in its sandbox. `variables` are those that a container is given."""
        work, binds = place.work, {place.directory: place.directory, **{path: path for path in place.shared}, **shown}
        if asked.tests is not None:
            binds |= {place.work: HARBOR_WORK, place.logs: HARBOR_LOGS}
            work = HARBOR_WORK
        in_sight = programs_in_home(command[0], readable)
        if self.sandbox == "bwrap":
            return enter_bwrap(command, shown=binds, readable=in_sight, cwd=work)
        if self.sandbox == "namespace":
            return enter_namespace(command, root=place.root, shown=binds, readable=in_sight, cwd=work)
        if self.sandbox == "docker":
            return enter_docker(
                command, image=self._image, name=place.directory.name, shown=binds, variables=variables, cwd=work
            )
        return list(command)

    def _keep_transcript(self, place: Workspace, session_id: str) -> None:
        if self._transcripts is None:
            return
        self._transcripts.mkdir(parents=True, exist_ok=True)
        with (self._transcripts / f"{session_id}.log").open("wb") as out:
            for name in ("agent.log", "score.log"):
                path = place.logs / name
                if path.exists():
                    out.write(f"== {name}\n".encode() + path.read_bytes() + b"\n")


def address_of(client: Any) -> tuple[SessionAddress, str]:
    """The session that an OpenAI client talks to."""
    found = SESSION_URL.fullmatch(str(getattr(client, "base_url", "")))
    if found is None:
        raise ConfigError("agent: a command-line agent needs a gateway over HTTP; this client has no session URL")
    return SessionAddress(openai=found["root"] + "/v1", root=found["root"], api_key=client.api_key), found["id"]


def tail_of(path: Path) -> str:
    return path.read_text(errors="replace").strip()[-300:] if path.exists() else "no output"
