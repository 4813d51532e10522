"""How each command-line agent is started against a session. docs/harnesses says what each rewrites."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import field

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping
from tokentrue.records import record

MODEL = "policy"  # the name that agents request; the gateway serves its one model under any name
TASK = "{task}"
ROOT, KEY = "<session url>", "<api key>"  # what `launch` fills in
OPENAI = f"{ROOT}/v1"  # Anthropic and Google clients take the root
CODEX_CONFIG = f"""model = "{MODEL}"
model_provider = "gateway"
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
base_url = "{OPENAI}"
wire_api = "responses"
env_key = "GATEWAY_KEY"
"""


@record
class AgentPreset:
    """`home_files`: by path, texts or JSON. `broken_off` ends the last line of an agent that gave up with exit code 0:
    the rollout fails."""

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


CLAUDE_CODE = AgentPreset(  # Anthropic Messages, streamed
    name="claude-code",
    program="claude",
    install="npm install -g @anthropic-ai/claude-code",
    arguments=("-p", TASK, "--allowedTools", "Bash", "Read", "Write", "Edit", "Glob", "Grep"),
    env={
        "ANTHROPIC_BASE_URL": ROOT,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
    },
)
CODEX = AgentPreset(  # OpenAI Responses, streamed, reasoning sealed
    name="codex",
    program="codex",
    install="npm install -g @openai/codex",
    arguments=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
    env={"GATEWAY_KEY": KEY},
    home_files={".codex/config.toml": CODEX_CONFIG},
)
GEMINI = AgentPreset(  # Google GenerateContent, streamed
    name="gemini",
    program="gemini",
    install="npm install -g @google/gemini-cli",
    arguments=("-m", MODEL, "--yolo", "-p", TASK),
    env={"GEMINI_API_KEY": KEY, "GOOGLE_GEMINI_BASE_URL": ROOT, "GEMINI_CLI_TRUST_WORKSPACE": "true"},
    home_files={
        ".gemini/settings.json": {
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "privacy": {"usageStatisticsEnabled": False},
        }
    },
)
MINI_SWE_AGENT = AgentPreset(  # Chat Completions through litellm, not streamed, one bash call per turn
    name="mini-swe-agent",
    program="mini",
    install="pip install mini-swe-agent",
    arguments=(
        *("-m", f"openai/{MODEL}", "-t", TASK, "-y", "--exit-immediately", "-l", "0"),
        *("-c", "mini.yaml", "-c", f"model.model_kwargs.api_base={OPENAI}"),
    ),
    env={
        "OPENAI_API_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
    },
)
OPENCODE = AgentPreset(  # Chat Completions, streamed
    name="opencode",
    program="opencode",
    install="npm install -g opencode-ai",
    arguments=("run", TASK),
    env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    home_files={
        ".config/opencode/opencode.json": {
            "provider": {
                "gateway": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": OPENAI, "apiKey": KEY},
                    "models": {MODEL: {"name": MODEL, "tool_call": True}},
                }
            },
            "model": f"gateway/{MODEL}",
            "permission": "allow",
        }
    },
    broken_off="The user rejected permission to use this specific tool call.",
)
PI_MODEL = {"id": MODEL, "reasoning": True, "contextWindow": 200000, "maxTokens": 8192}
PI_GATEWAY = {"baseUrl": OPENAI, "api": "openai-completions", "apiKey": KEY, "models": [PI_MODEL]}
PI = AgentPreset(  # Chat Completions, streamed
    name="pi",
    program="pi",
    install="npm install -g @mariozechner/pi-coding-agent",
    arguments=("--provider", "gateway", "--model", MODEL, "-p", TASK),
    env={"PI_OFFLINE": "1"},
    home_files={".pi/agent/models.json": {"providers": {"gateway": PI_GATEWAY}}},
)
QWEN_CODE = AgentPreset(  # Chat Completions, streamed
    name="qwen-code",
    program="qwen",
    install="npm install -g @qwen-code/qwen-code",
    arguments=("--auth-type", "openai", "--yolo", "-p", TASK),
    env={"OPENAI_BASE_URL": OPENAI, "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL},
)
PRESETS: Mapping[str, AgentPreset] = {
    preset.name: preset for preset in (CLAUDE_CODE, CODEX, GEMINI, MINI_SWE_AGENT, OPENCODE, PI, QWEN_CODE)
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
    urls = {"OPENAI_BASE_URL": OPENAI, "ANTHROPIC_BASE_URL": ROOT, "GOOGLE_GEMINI_BASE_URL": ROOT}
    return AgentPreset(
        name="command",
        program=program,
        install="install it",
        arguments=tuple(arguments),
        env={**urls, **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), KEY)},
    )
