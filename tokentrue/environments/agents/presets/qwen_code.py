"""Qwen Code: Chat Completions, streamed."""

from tokentrue.environments.agents.preset import MODEL, AgentLaunch, AgentPreset, SessionAddress


def launch(address: SessionAddress, task: str) -> AgentLaunch:
    env = {"OPENAI_BASE_URL": address.openai, "OPENAI_API_KEY": address.api_key, "OPENAI_MODEL": MODEL}
    return AgentLaunch(arguments=("--auth-type", "openai", "--yolo", "-p", task), env=env)


PRESET = AgentPreset(
    name="qwen-code",
    program="qwen",
    install="npm install -g @qwen-code/qwen-code",
    changes="asks beside the conversation: small samples of their own",
    launch=launch,
)
