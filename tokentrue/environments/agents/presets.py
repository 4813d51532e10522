"""How a command-line agent is started against a session; presets.toml has the known ones."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import field

import msgspec

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping, read_table
from tokentrue.records import record

TASK = "{task}"
ROOT, KEY = "<session url>", "<api key>"  # what `launch` fills in
OPENAI = f"{ROOT}/v1"  # Anthropic and Google clients take the root


@record
class AgentPreset:
    name: str
    program: str
    install: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    home_files: Mapping[str, str | JsonMapping] = field(default_factory=dict[str, str | JsonMapping])
    broken_off: str = ""

    def launch(self, url: str, api_key: str, task: str) -> tuple[list[str], dict[str, str], dict[str, str]]:
        def fill(text: str | JsonMapping) -> str:
            return (text if isinstance(text, str) else json.dumps(text)).replace(ROOT, url).replace(KEY, api_key)

        arguments = [fill(argument).replace(TASK, task) for argument in self.arguments]
        env, files = ({name: fill(text) for name, text in held.items()} for held in (self.env, self.home_files))
        return arguments, env, files


def read_presets() -> Mapping[str, AgentPreset]:
    tables = read_table(__file__, "presets.toml").items()
    return {name: msgspec.convert({"name": name, **table}, AgentPreset) for name, table in tables}


PRESETS = read_presets()


def load_preset(agent: str) -> AgentPreset:
    """A preset by name, or one made from a command: the task is a single argument, and the addresses are in the
    variables that SDKs read."""
    if agent in PRESETS:
        return PRESETS[agent]
    if TASK not in agent:
        raise ConfigError(f"agent: no preset {agent!r}; one of {', '.join(PRESETS)}, or a command with {TASK} in it")
    try:
        program, *arguments = shlex.split(agent)
    except ValueError as error:
        raise ConfigError(f"agent: {agent!r} is no command line: {error}") from error
    urls = {"OPENAI_BASE_URL": OPENAI, "ANTHROPIC_BASE_URL": ROOT, "GOOGLE_GEMINI_BASE_URL": ROOT}
    return AgentPreset(
        name="command",
        program=program,
        install="install it",
        arguments=tuple(arguments),
        env={**urls, **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), KEY)},
    )
