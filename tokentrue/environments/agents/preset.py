"""What a preset says about one command-line agent: how to start it against a session, and what it changes from turn to
turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MODEL = "policy"  # the name that agents ask for; the gateway serves its one model under any name


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAddress:
    """Where one session is: `openai` ends in /v1, `root` is the base URL of Anthropic and Google clients."""

    openai: str
    root: str
    api_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLaunch:
    """One start of an agent. Files are texts by their path in the agent's home and in its working directory."""

    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    home_files: Mapping[str, str] = field(default_factory=dict[str, str])
    work_files: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPreset:
    """`program` is the executable's name and `install` the command that brings it. `changes` says what the agent alters
    in what it has
    sent before: everything of that kind which no projection covers starts a new sample. `pin` names prompts that the
    agent's sessions pin:
    ("system",) for an agent that rewrites its system prompt from turn to turn."""

    name: str
    program: str
    install: str
    changes: str
    launch: Callable[[SessionAddress, str], AgentLaunch]
    pin: tuple[str, ...] = ()
