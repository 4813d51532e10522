"""One rollout runs one agent process and then one score command, in separate sandboxes. Read `run` first.

An agent is rewarded, so it is treated as an adversary: it never writes where this process, or the score command,
reads. Output comes through a pipe. The score command starts when every process of the agent is dead, with a separate
home and environment, in a copy of the agent's work that it makes from a read-only view.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from tokentrue.environments.agents.bridge import ENTER, PORT, open_bridge
from tokentrue.environments.agents.bridge import INSIDE as BRIDGE
from tokentrue.environments.agents.presets import load_preset
from tokentrue.environments.agents.process import (
    CANNOT_RUN,
    GRACE_S,
    CommandResult,
    remove_container,
    reward_from_command,
    reward_from_harbor,
    run_command,
)
from tokentrue.environments.agents.sandbox import (
    DESCRIPTIONS,
    NOBODY,
    ChosenSandbox,
    Confinement,
    Network,
    SandboxKind,
    SandboxLimits,
    bwrap_command,
    choose_sandbox,
    container_command,
    folders_named_in,
    paths_shown,
    visible_programs,
)
from tokentrue.environments.agents.tasks import AgentTask, read_tasks
from tokentrue.environments.agents.workspace import (
    Workspace,
    WorkspaceKind,
    find_abandoned,
    give_to,
    log_beside,
    make_folders,
    open_workspace,
    remove_tree,
)
from tokentrue.environments.base import Outcome, Split, Task
from tokentrue.errors import AgentError, ConfigError

ENGINE_KEPT = ("HOME", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "CONTAINER_HOST", "DOCKER_HOST", "DOCKER_CONFIG")
KEPT = ("PATH", "LANG", "LC_ALL", "NODE_PATH", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")  # of this process's environment
SESSION_URL = re.compile(r"(?P<root>.*/sessions/(?P<id>[^/]+))/v1/?")
INSIDE = Path("/rollout")  # the name of the writable folder in a sandbox
SUBMITTED, AGENT_LOG = INSIDE / "submitted", INSIDE / "agent.log"
HARBOR_WORK, HARBOR_TESTS, HARBOR_LOGS = Path("/app"), Path("/tests"), Path("/logs")
COPY_AND_SCORE = 'cp -a -- "$1/." . && exec sh -c "$2"'


class CommandLineAgent:
    """Runs a command-line agent on each task and scores its work with a command. Options: docs/environments.md."""

    name = "agent"

    def __init__(
        self,
        *,
        agent: str | None = None,
        tasks: str | None = None,
        score: str | None = None,
        workspace: WorkspaceKind = "copy",
        sandbox: SandboxKind = "auto",
        network: Network = "gateway",
        program: str | None = None,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        agent_timeout_s: float | None = None,
        score_timeout_s: float = 600.0,
        transcripts: str | None = None,
        directory: str | None = None,
        readable: Sequence[str] = (),
        image: str | None = None,
        **limits: int,
    ) -> None:
        if agent is None or tasks is None:
            raise ConfigError("agent: needs an agent and its tasks: --agent NAME_OR_COMMAND --tasks FILE_OR_DIRECTORY")
        if workspace not in get_args(WorkspaceKind) or sandbox not in get_args(SandboxKind):
            raise ConfigError("agent: workspace is copy or worktree; sandbox is auto, bwrap, docker, podman or none")
        if network not in get_args(Network):
            raise ConfigError(f"agent: network is gateway or host, got {network!r}")
        if unknown := sorted(set(limits) - set(SandboxLimits.__slots__)):
            raise ConfigError(f"agent: no option {unknown[0]!r}; limits are {', '.join(SandboxLimits.__slots__)}")
        self.preset = load_preset(agent)
        self.all_tasks = read_tasks(Path(tasks))
        self.sandbox: ChosenSandbox = choose_sandbox(sandbox, image=image)
        self._engine: Literal["docker", "podman"] | None = None if self.sandbox in ("bwrap", "none") else self.sandbox
        self._limits, self._image = SandboxLimits(**limits), image or ""
        self._network: Network = network
        self._workspace: WorkspaceKind = workspace
        self._readable, self._agent_folders = tuple(readable), folders_named_in(agent)
        self._program, self._arguments = program or self.preset.program, tuple(arguments)
        if self._engine is None:  # otherwise it is in the image
            found = shutil.which(self._program)
            if found is None:
                raise ConfigError(f"agent: {self._program!r} is not installed; {self.preset.install}")
            self._program = str(Path(found).absolute())
        self._score, self._env = score, dict(env or {})
        self._agent_timeout_s, self._score_timeout_s = agent_timeout_s, score_timeout_s
        self._transcripts = None if transcripts is None else Path(transcripts)
        self._directory = Path(directory or tempfile.gettempdir()).resolve()
        for task in self.all_tasks:
            if task.score is None and score is None:
                raise ConfigError(f"tasks: {task.task_id!r} has no score; give --score, or a score in its line")
        for left in find_abandoned(self._directory):  # left by a killed run
            if self._engine is not None:
                for room in ("agent", "score"):
                    remove_container(self._engine, f"{left.name}-{room}")
            remove_tree(left)

    def notes(self) -> list[str]:
        if self.sandbox == "none" and any(task.tests for task in self.all_tasks):
            raise ConfigError(
                "tasks: Harbor tasks use /app, /tests and /logs, which a plain process cannot have; use sandbox='bwrap'"
            )
        runs = f"{self.preset.name}: each rollout runs {DESCRIPTIONS[self.sandbox]}"
        notes = [f"{runs}; from turn to turn: {self.preset.changes}"]
        images = sum(task.has_dockerfile for task in self.all_tasks)
        if images and self._engine is None:
            have = f"{images} of {len(self.all_tasks)} tasks have a Dockerfile"
            notes.append(f"{have}: no container runs here, so its steps are not run")
        return notes

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
        """All tasks in file order, or `count` drawn without repeats, depending only on the seed."""
        # without held-out tasks, all tasks serve both splits
        chosen = [task for task in self.all_tasks if task.split == split] or self.all_tasks
        if count < len(chosen):
            chosen = random.Random(f"{self.name}/{split}/{seed}").sample(chosen, count)
        return [Task(task_id=one.task_id, prompt=one.prompt, data={"agent_task": one}) for one in chosen]

    async def run(self, client: Any, task: Task) -> Outcome:
        found = SESSION_URL.fullmatch(str(getattr(client, "base_url", "")))
        if found is None:
            raise ConfigError("agent: a command-line agent needs a gateway over HTTP; this client has no session URL")
        asked: AgentTask = task.data["agent_task"]
        async with open_workspace(asked.source, kind=self._workspace, ref=asked.ref, under=self._directory) as place:
            try:
                result = await self._run_agent(place, asked, found["root"], client.api_key)
                if result.code in CANNOT_RUN:
                    said = result.tail.strip()[-300:] or "no output"
                    raise AgentError(f"{self.preset.name} could not be run (exit code {result.code}): {said}")
                if self.preset.broken_off and result.tail.rstrip().endswith(self.preset.broken_off):
                    raise AgentError(f"{self.preset.name} broke off: {self.preset.broken_off}")
                reward = await self._run_score(place, asked)
                return Outcome(reward=reward, note=f"the agent {result.limit}" if result.limit else None)
            finally:
                self._keep_transcript(place, found["id"])

    async def _run_agent(self, place: Workspace, asked: AgentTask, url: str, api_key: str) -> CommandResult:
        is_bridged = self.sandbox != "none" and (asked.network or self._network) == "gateway"
        seen = f"http://127.0.0.1:{PORT}{urlsplit(url).path}" if is_bridged else url
        launch = self.preset.launch(seen, api_key, asked.prompt)
        for name, text in launch.home_files.items():
            path = place.agent / "home" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = [self._program, *launch.arguments, *self._arguments]
        readonly = paths_shown((*self._readable, *self._agent_folders))
        async with AsyncExitStack() as stack:
            if is_bridged:
                await stack.enter_async_context(open_bridge(place.directory / "gateway", url))
                command = [sys.executable if self._engine is None else "python3", "-I", "-S", "-c", ENTER, *command]
                readonly[place.directory / "gateway"] = BRIDGE
            return await self._run_command(
                place, place.agent, asked, command, env={**asked.env, **launch.env, **self._env}, readonly=readonly,
                timeout_s=asked.timeout_s or self._agent_timeout_s,
            )  # fmt: skip

    async def _run_score(self, place: Workspace, asked: AgentTask) -> float:
        command = asked.score or self._score or ""
        make_folders(place.score)
        readonly = paths_shown((*self._readable, *folders_named_in(command)))
        work, log = place.agent / "work", log_beside(place.agent)
        readonly |= {work: SUBMITTED, log: AGENT_LOG}
        if asked.tests is not None:
            readonly[asked.tests] = HARBOR_TESTS
        if self.sandbox != "none":
            work, log = SUBMITTED, AGENT_LOG
        result = await self._run_command(
            place, place.score, asked, ["sh", "-c", COPY_AND_SCORE, "score", str(work), command],
            env={**asked.env, "TASK_ID": asked.task_id, "AGENT_LOG": str(log)}, readonly=readonly,
            timeout_s=asked.score_timeout_s or self._score_timeout_s,
        )  # fmt: skip
        if asked.tests is not None:
            return reward_from_harbor(place.score / "verifier", result, command)
        return reward_from_command(result, command)

    async def _run_command(
        self,
        place: Workspace,
        room: Path,
        asked: AgentTask,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        readonly: Mapping[Path, Path],
        timeout_s: float | None,
    ) -> CommandResult:
        """Only `room` is writable; output goes to the room's log."""
        inside = room if self.sandbox == "none" else INSIDE
        work = inside / "work" if asked.tests is None else HARBOR_WORK
        writable = {room / "home": inside / "home", room / "work": work, room / "tmp": Path("/tmp")}
        if asked.tests is not None:
            writable |= {room / "logs": HARBOR_LOGS, room / "verifier": HARBOR_LOGS / "verifier"}
        if place.objects is not None:
            readonly = {**readonly, place.objects: place.objects}
        if timeout_s:  # asks the command to end; `run_command` kills it if it does not
            command = ["timeout", "-k", str(GRACE_S), str(timeout_s), *command]
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        given = {"CI": "1", **env}
        home = given.pop("HOME", str(inside / "home"))
        if self._engine is None:
            kept["HOME"] = home
        else:  # a rootless engine finds its images and runtime by these, and passes on what --env names
            kept |= {name: os.environ[name] for name in ENGINE_KEPT if name in os.environ}
        container = None if self._engine is None else (self._engine, f"{place.directory.name}-{room.name}")
        limits = self._limits
        if room == place.score:  # it holds a copy of what the agent wrote, within limits
            limits = replace(limits, file_mib=2 * limits.file_mib, disk_mib=2 * limits.disk_mib)
        network = asked.network or self._network
        confinement = Confinement(writable=writable, readonly=readonly, cwd=work, network=network, limits=limits)

        def build(info_fd: int) -> Sequence[str]:
            if container is not None:
                engine, name = container
                return container_command(
                    command, confinement, engine=engine, image=self._image, name=name, variables=given, home=home
                )
            if self.sandbox == "none":
                return ["env", *command]  # which reports a program that cannot be run as a shell does
            seen = {**visible_programs(self._program), **readonly}
            return bwrap_command(command, replace(confinement, readonly=seen), info_fd=info_fd)

        if self.sandbox != "none" and os.geteuid() == 0:
            await asyncio.to_thread(give_to, room, NOBODY)
        with log_beside(room).open("wb") as output:
            return await run_command(
                build, env={**kept, **given}, output=output, limits=limits, folder=room,
                cwd=work if self.sandbox == "none" else None, timeout_s=timeout_s, is_bwrap=self.sandbox == "bwrap",
                container=container,
            )  # fmt: skip

    def _keep_transcript(self, place: Workspace, session_id: str) -> None:
        if self._transcripts is None:
            return
        self._transcripts.mkdir(parents=True, exist_ok=True)
        with (self._transcripts / f"{session_id}.log").open("wb") as out:
            for room in (place.agent, place.score):
                log = log_beside(room)
                if log.exists():
                    out.write(f"== {log.name}\n".encode() + log.read_bytes() + b"\n")
