"""Codex: OpenAI Responses, streamed, reasoning sealed."""

from tokentrue.environments.agents.preset import MODEL, AgentLaunch, AgentPreset, SessionAddress

CONFIG = """model = "{model}"
model_provider = "gateway"
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
base_url = "{url}"
wire_api = "responses"
env_key = "GATEWAY_KEY"
"""


def launch(address: SessionAddress, task: str) -> AgentLaunch:
    config = CONFIG.format(model=MODEL, url=address.openai)
    return AgentLaunch(
        arguments=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task),
        env={"GATEWAY_KEY": address.api_key},
        home_files={".codex/config.toml": config},
    )


PRESET = AgentPreset(
    name="codex",
    program="codex",
    install="npm install -g @openai/codex",
    changes="nothing in ten turns; compaction starts a conversation of its own",
    launch=launch,
)
