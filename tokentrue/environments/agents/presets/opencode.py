"""opencode: Chat Completions, streamed."""

import json

from tokentrue.environments.agents.preset import MODEL, AgentLaunch, AgentPreset, SessionAddress


def launch(address: SessionAddress, task: str) -> AgentLaunch:
    options = {"baseURL": address.openai, "apiKey": address.api_key}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": options,
        "models": {MODEL: {"name": MODEL, "tool_call": True}},
    }
    config = json.dumps({"provider": {"gateway": provider}, "model": f"gateway/{MODEL}"})
    env = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return AgentLaunch(arguments=("run", task), env=env, home_files={".config/opencode/opencode.json": config})


PRESET = AgentPreset(
    name="opencode",
    program="opencode",
    install="npm install -g opencode-ai",
    changes="asks for a title beside the conversation: one small sample of its own per rollout",
    launch=launch,
)
