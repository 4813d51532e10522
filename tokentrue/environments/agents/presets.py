"""Presets of command-line agents: how each is started against a session, and what it rewrites between turns. Any
other agent is a user's command that contains `{task}`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tokentrue.errors import ConfigError

MODEL = "policy"  # the name that agents request; the gateway serves its one model under any name
TASK = "{task}"
CODEX_CONFIG = """model = "{model}"
model_provider = "gateway"
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
base_url = "{url}"
wire_api = "responses"
env_key = "GATEWAY_KEY"
"""
GEMINI_SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAddress:
    """`openai` ends in /v1; `root` is the base URL for Anthropic and Google clients."""

    openai: str
    root: str
    api_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLaunch:
    """`home_files` maps paths in the agent's home to texts."""

    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    home_files: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPreset:
    """`program` is the executable's name and `install` the command that installs it. `changes` says what the agent
    alters in messages it has sent before: changes that no projection covers start a new sample. `pin` is ("system",)
    for an agent that rewrites its system prompt between turns."""

    name: str
    program: str
    install: str
    changes: str
    launch: Callable[[SessionAddress, str], AgentLaunch]
    pin: tuple[str, ...] = ()


def launch_claude_code(address: SessionAddress, task: str) -> AgentLaunch:
    """Anthropic Messages, streamed."""
    env = {
        "ANTHROPIC_BASE_URL": address.root,
        "ANTHROPIC_AUTH_TOKEN": address.api_key,
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    tools = ("Bash", "Read", "Write", "Edit", "Glob", "Grep")
    return AgentLaunch(arguments=("-p", task, "--allowedTools", *tools), env=env)


def launch_codex(address: SessionAddress, task: str) -> AgentLaunch:
    """OpenAI Responses, streamed, reasoning sealed."""
    return AgentLaunch(
        arguments=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task),
        env={"GATEWAY_KEY": address.api_key},
        home_files={".codex/config.toml": CODEX_CONFIG.format(model=MODEL, url=address.openai)},
    )


def launch_gemini(address: SessionAddress, task: str) -> AgentLaunch:
    """Google GenerateContent, streamed."""
    env = {
        "GEMINI_API_KEY": address.api_key,
        "GOOGLE_GEMINI_BASE_URL": address.root,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    files = {".gemini/settings.json": json.dumps(GEMINI_SETTINGS)}
    return AgentLaunch(arguments=("-m", MODEL, "--yolo", "-p", task), env=env, home_files=files)


def launch_mini_swe_agent(address: SessionAddress, task: str) -> AgentLaunch:
    """Chat Completions through litellm, not streamed, one bash call per turn."""
    env = {
        "OPENAI_API_KEY": address.api_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
    }
    config = ("-c", "mini.yaml", "-c", f"model.model_kwargs.api_base={address.openai}")
    arguments = ("-m", f"openai/{MODEL}", "-t", task, "-y", "--exit-immediately", "-l", "0", *config)
    return AgentLaunch(arguments=arguments, env=env)


def launch_opencode(address: SessionAddress, task: str) -> AgentLaunch:
    """Chat Completions, streamed."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": address.openai, "apiKey": address.api_key},
        "models": {MODEL: {"name": MODEL, "tool_call": True}},
    }
    config = json.dumps({"provider": {"gateway": provider}, "model": f"gateway/{MODEL}"})
    env = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return AgentLaunch(arguments=("run", task), env=env, home_files={".config/opencode/opencode.json": config})


def launch_pi(address: SessionAddress, task: str) -> AgentLaunch:
    """Chat Completions, streamed."""
    model = {"id": MODEL, "reasoning": True, "contextWindow": 200000, "maxTokens": 8192}
    provider = {"baseUrl": address.openai, "api": "openai-completions", "apiKey": address.api_key, "models": [model]}
    files = {".pi/agent/models.json": json.dumps({"providers": {"gateway": provider}})}
    arguments = ("--provider", "gateway", "--model", MODEL, "-p", task)
    return AgentLaunch(arguments=arguments, env={"PI_OFFLINE": "1"}, home_files=files)


def launch_qwen_code(address: SessionAddress, task: str) -> AgentLaunch:
    """Chat Completions, streamed."""
    env = {"OPENAI_BASE_URL": address.openai, "OPENAI_API_KEY": address.api_key, "OPENAI_MODEL": MODEL}
    return AgentLaunch(arguments=("--auth-type", "openai", "--yolo", "-p", task), env=env)


_LAUNCHES: Mapping[str, tuple[str, str, str, Callable[[SessionAddress, str], AgentLaunch]]] = {
    "claude-code": (
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        "moves cache marks and a billing block, which the gateway ignores; compaction and sub-agents start conversations",
        launch_claude_code,
    ),
    "codex": (
        "codex",
        "npm install -g @openai/codex",
        "nothing in ten turns; compaction starts a conversation",
        launch_codex,
    ),
    "gemini": (
        "gemini",
        "npm install -g @google/gemini-cli",
        "drops thoughts and keeps their signatures, rewrites call ids; asks for top_p and top_k, which rollouts pin off",
        launch_gemini,
    ),
    "mini-swe-agent": (
        "mini",
        "pip install mini-swe-agent",
        "nothing: every turn adds to the conversation",
        launch_mini_swe_agent,
    ),
    "opencode": (
        "opencode",
        "npm install -g opencode-ai",
        "asks for a title beside the conversation: one small further sample per rollout",
        launch_opencode,
    ),
    "pi": ("pi", "npm install -g @mariozechner/pi-coding-agent", "nothing in ten turns", launch_pi),
    "qwen-code": (
        "qwen",
        "npm install -g @qwen-code/qwen-code",
        "asks beside the conversation: small further samples",
        launch_qwen_code,
    ),
}
PRESETS: Mapping[str, AgentPreset] = {
    name: AgentPreset(name=name, program=program, install=install, changes=changes, launch=launch)
    for name, (program, install, changes, launch) in _LAUNCHES.items()
}


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
