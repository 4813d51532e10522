"""pi: Chat Completions, streamed."""

import json

from tokentrue.environments.agents.preset import MODEL, AgentLaunch, AgentPreset, SessionAddress


def launch(address: SessionAddress, task: str) -> AgentLaunch:
    model = {"id": MODEL, "reasoning": True, "contextWindow": 200000, "maxTokens": 8192}
    provider = {"baseUrl": address.openai, "api": "openai-completions", "apiKey": address.api_key, "models": [model]}
    files = {".pi/agent/models.json": json.dumps({"providers": {"gateway": provider}})}
    arguments = ("--provider", "gateway", "--model", MODEL, "-p", task)
    return AgentLaunch(arguments=arguments, env={"PI_OFFLINE": "1"}, home_files=files)


PRESET = AgentPreset(
    name="pi",
    program="pi",
    install="npm install -g @mariozechner/pi-coding-agent",
    changes="nothing in ten turns",
    launch=launch,
)
