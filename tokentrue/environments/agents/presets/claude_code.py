"""Claude Code: Anthropic Messages, streamed."""

from tokentrue.environments.agents.preset import MODEL, AgentLaunch, AgentPreset, SessionAddress


def launch(address: SessionAddress, task: str) -> AgentLaunch:
    env = {
        "ANTHROPIC_BASE_URL": address.root,
        "ANTHROPIC_AUTH_TOKEN": address.api_key,
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return AgentLaunch(
        arguments=("-p", task, "--allowedTools", "Bash", "Read", "Write", "Edit", "Glob", "Grep"), env=env
    )


PRESET = AgentPreset(
    name="claude-code",
    program="claude",
    install="npm install -g @anthropic-ai/claude-code",
    changes="moves cache marks and a billing block (the gateway ignores both); compaction and sub-agents start conversations of their own",
    launch=launch,
)
