"""gemini-cli: Google GenerateContent, streamed."""

import json

from tokentrue.environments.agents.preset import MODEL, AgentLaunch, AgentPreset, SessionAddress

SETTINGS = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": False}}


def launch(address: SessionAddress, task: str) -> AgentLaunch:
    env = {
        "GEMINI_API_KEY": address.api_key,
        "GOOGLE_GEMINI_BASE_URL": address.root,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    files = {".gemini/settings.json": json.dumps(SETTINGS)}
    return AgentLaunch(arguments=("-m", MODEL, "--yolo", "-p", task), env=env, home_files=files)


PRESET = AgentPreset(
    name="gemini",
    program="gemini",
    install="npm install -g @google/gemini-cli",
    changes="drops thoughts and keeps their signatures, rewrites call ids; asks for top_p and top_k, which rollouts pin off",
    launch=launch,
)
