"""Presets by name; anything else is a command of the user's own with `{task}` in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib import import_module

from tokentrue.environments.agents.preset import AgentLaunch, AgentPreset, SessionAddress
from tokentrue.errors import ConfigError

PRESETS: Mapping[str, str] = {
    "claude-code": "claude_code",
    "codex": "codex",
    "gemini": "gemini",
    "mini-swe-agent": "mini_swe_agent",
    "opencode": "opencode",
    "pi": "pi",
    "qwen-code": "qwen_code",
}
TASK = "{task}"


def load_preset(agent: str) -> AgentPreset:
    if agent in PRESETS:
        return import_module(f"tokentrue.environments.agents.presets.{PRESETS[agent]}").PRESET
    if TASK not in agent:
        raise ConfigError(f"agent: no preset {agent!r}; one of {', '.join(PRESETS)}, or a command with {TASK} in it")
    return custom_preset(agent)


def custom_preset(command: str) -> AgentPreset:
    """The task is one argument, whatever it contains; the addresses are in the variables that SDKs read."""
    try:
        program, *arguments = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"agent: {command!r} is no command line: {error}") from error

    def launch(address: SessionAddress, task: str) -> AgentLaunch:
        env = {
            "OPENAI_BASE_URL": address.openai,
            "OPENAI_API_KEY": address.api_key,
            "ANTHROPIC_BASE_URL": address.root,
            "ANTHROPIC_API_KEY": address.api_key,
            "GOOGLE_GEMINI_BASE_URL": address.root,
            "GEMINI_API_KEY": address.api_key,
        }
        return AgentLaunch(arguments=tuple(argument.replace(TASK, task) for argument in arguments), env=env)

    return AgentPreset(name="command", program=program, install="install it", changes="not known", launch=launch)
