"""One rollout runs one agent process and then one score command, in separate sandboxes. Read `run` first. An agent is
rewarded, so it is treated as an adversary: it never writes where this process, or the score command, reads. The score
command starts when every process of the agent is dead, with a separate home and environment, in a copy of the agent's
work that it makes from a read-only view."""

import asyncio
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokentrue.environments.agents.presets import load_preset
from tokentrue.environments.agents.process import (
    CANNOT_RUN,
    CommandResult,
    reward_from_command,
    reward_from_harbor,
    run_command,
)
from tokentrue.environments.agents.sandbox import (
    BRIDGE,
    ENTER,
    MIB,
    NOBODY,
    PORT,
    Network,
    SandboxKind,
    SandboxLimits,
    bwrap_command,
    check_sandbox,
    folders_named_in,
    open_bridge,
    paths_shown,
    visible_programs,
)
from tokentrue.environments.agents.tasks import AgentTask, read_tasks
from tokentrue.environments.agents.workspace import (
    Workspace,
    find_abandoned,
    give_to,
    log_beside,
    make_folders,
    open_workspace,
    remove_tree,
)
from tokentrue.environments.base import Outcome, Split, Task
from tokentrue.errors import AgentError, ConfigError
from tokentrue.records import record
from tokentrue.types import NotNegative

KEPT = ("PATH", "LANG", "LC_ALL", "NODE_PATH", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")  # of this process's environment
SESSION_URL = re.compile(r"(?P<root>.*/sessions/(?P<id>[^/]+))/v1/?")
INSIDE = Path("/rollout")  # the name of the writable folder in a sandbox
SUBMITTED, AGENT_LOG = INSIDE / "submitted", INSIDE / "agent.log"
HARBOR_WORK, HARBOR_TESTS, HARBOR_LOGS = Path("/app"), Path("/tests"), Path("/logs")
UNCONFINED = (
    "WITHOUT A SANDBOX: it can read and write all that you can, change its own reward, reach every network and leave "
    "processes behind"
)
COPY_AND_SCORE = 'cp -a -- "$1/." . && exec sh -c "$2"'


@record
class AgentOptions(SandboxLimits):
    agent: str = ""
    tasks: str = ""
    score: str | None = None
    sandbox: SandboxKind = "bwrap"
    network: Network = "gateway"
    program: str | None = None
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    agent_timeout_s: NotNegative | None = None
    score_timeout_s: NotNegative = 600.0
    transcripts: str | None = None
    directory: str | None = None
    readable: Sequence[str] = ()


class CommandLineAgent:
    name = "agent"

    def __init__(self, **options: Any) -> None:
        known = [each.name for each in fields(AgentOptions)]
        if unknown := sorted(set(options) - set(known)):
            raise ConfigError(f"agent: no option {unknown[0]!r}; one of {', '.join(known)}")
        self.options = asked = AgentOptions(**options)
        if not asked.agent or not asked.tasks:
            raise ConfigError("agent: needs an agent and its tasks: --agent NAME_OR_COMMAND --tasks FILE_OR_DIRECTORY")
        self.preset, self.sandbox = load_preset(asked.agent), asked.sandbox
        self.all_tasks = read_tasks(Path(asked.tasks))
        check_sandbox(asked.sandbox)
        program = asked.program or self.preset.program
        if (found := shutil.which(program)) is None:
            raise ConfigError(f"agent: {program!r} is not installed; {self.preset.install}")
        self._program = str(Path(found).absolute())
        self._directory = Path(asked.directory or tempfile.gettempdir()).resolve()
        for task in self.all_tasks:
            if task.score is None and asked.score is None:
                raise ConfigError(f"tasks: {task.task_id!r} has no score; give --score, or a score in its line")
        for left in find_abandoned(self._directory):  # left by a killed run
            remove_tree(left)

    def notes(self) -> list[str]:
        if self.sandbox == "none" and any(task.tests for task in self.all_tasks):
            raise ConfigError(
                "tasks: Harbor tasks use /app, /tests and /logs, which a plain process cannot have; use sandbox='bwrap'"
            )
        notes = [f"{self.preset.name}: each rollout runs {'in bubblewrap' if self.sandbox == 'bwrap' else UNCONFINED}"]
        if images := sum(task.has_dockerfile for task in self.all_tasks):
            notes.append(f"{images} of {len(self.all_tasks)} tasks have a Dockerfile, whose steps are not run")
        return notes

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]:
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
        async with open_workspace(asked.source, ref=asked.ref, under=self._directory) as place:
            try:
                result = await self._run_agent(place, asked, found["root"], client.api_key)
                if result.code in CANNOT_RUN:
                    said = result.tail.strip()[-300:] or "no output"
                    raise AgentError(f"{self.preset.name} could not be run (exit code {result.code}): {said}")
                if self.preset.broken_off and result.tail.rstrip().endswith(self.preset.broken_off):
                    raise AgentError(f"{self.preset.name} broke off: {self.preset.broken_off}")
                reward = await self._run_score(place, asked)
                return Outcome(reward=reward, note="its time limit ended the agent" if result.code is None else None)
            finally:
                self._keep_transcript(place, found["id"])

    async def _run_agent(self, place: Workspace, asked: AgentTask, url: str, api_key: str) -> CommandResult:
        is_bridged = self.sandbox != "none" and (asked.network or self.options.network) == "gateway"
        seen = f"http://127.0.0.1:{PORT}{urlsplit(url).path}" if is_bridged else url
        arguments, env, files = self.preset.launch(seen, api_key, asked.prompt)
        for name, text in files.items():
            path = place.agent / "home" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = [self._program, *arguments, *self.options.arguments]
        readonly = paths_shown((*self.options.readable, *folders_named_in(self.options.agent)))
        async with AsyncExitStack() as stack:
            if is_bridged:
                await stack.enter_async_context(open_bridge(place.directory / "gateway", url))
                command = [sys.executable, "-I", "-S", "-c", ENTER, *command]
                readonly[place.directory / "gateway"] = BRIDGE
            return await self._run_command(
                place, place.agent, asked, command, env={**asked.variables, **env, **self.options.env},
                readonly=readonly, timeout_s=asked.timeout_s or self.options.agent_timeout_s,
            )  # fmt: skip

    async def _run_score(self, place: Workspace, asked: AgentTask) -> float:
        command = asked.score or self.options.score or ""
        make_folders(place.score)
        readonly = paths_shown((*self.options.readable, *folders_named_in(command)))
        work, log = place.agent / "work", log_beside(place.agent)
        readonly |= {work: SUBMITTED, log: AGENT_LOG}
        if asked.tests is not None:
            readonly[asked.tests] = HARBOR_TESTS
        if self.sandbox != "none":
            work, log = SUBMITTED, AGENT_LOG
        result = await self._run_command(
            place, place.score, asked, ["sh", "-c", COPY_AND_SCORE, "score", str(work), command],
            env={**asked.variables, "TASK_ID": asked.task_id, "AGENT_LOG": str(log)}, readonly=readonly,
            timeout_s=asked.score_timeout_s or self.options.score_timeout_s,
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
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        limits = self.options
        if room == place.score:  # cp meets the limit at a file that is as large as it
            limits = replace(limits, file_mib=2 * limits.file_mib)

        def build(info_fd: int) -> Sequence[str]:
            if self.sandbox == "none":
                return ["env", *command]  # which reports a program that cannot be run as a shell does
            mounts = [(path, seen, False) for path, seen in {**visible_programs(self._program), **readonly}.items()]
            mounts += [(path, seen, True) for path, seen in writable.items()]
            network = asked.network or self.options.network
            return bwrap_command(command, mounts=mounts, cwd=work, network=network, limits=limits, info_fd=info_fd)

        if self.sandbox != "none" and os.geteuid() == 0:
            await asyncio.to_thread(give_to, room, NOBODY)
        with log_beside(room).open("wb") as output:
            return await run_command(
                build, env={**kept, "CI": "1", "HOME": str(inside / "home"), **env}, output=output,
                most_output=limits.output_mib * MIB, cwd=work if self.sandbox == "none" else None,
                timeout_s=timeout_s or None, is_bwrap=self.sandbox == "bwrap",
            )  # fmt: skip

    def _keep_transcript(self, place: Workspace, session_id: str) -> None:
        if self.options.transcripts is None:
            return
        folder = Path(self.options.transcripts)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{session_id}.log").open("wb") as out:
            for room in (place.agent, place.score):
                log = log_beside(room)
                if log.exists():
                    out.write(f"== {log.name}\n".encode() + log.read_bytes() + b"\n")
