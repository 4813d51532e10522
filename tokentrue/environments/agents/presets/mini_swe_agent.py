"""mini-swe-agent: Chat Completions through litellm, not streamed, one bash call per turn."""

from tokentrue.environments.agents.preset import MODEL, AgentLaunch, AgentPreset, SessionAddress


def launch(address: SessionAddress, task: str) -> AgentLaunch:
    env = {
        "OPENAI_API_KEY": address.api_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
    }
    where = f"model.model_kwargs.api_base={address.openai}"
    arguments = (
        "-m",
        f"openai/{MODEL}",
        "-t",
        task,
        "-y",
        "--exit-immediately",
        "-l",
        "0",
        "-c",
        "mini.yaml",
        "-c",
        where,
    )
    return AgentLaunch(arguments=arguments, env=env)


PRESET = AgentPreset(
    name="mini-swe-agent",
    program="mini",
    install="pip install mini-swe-agent",
    changes="nothing: every turn adds to the conversation",
    launch=launch,
)
