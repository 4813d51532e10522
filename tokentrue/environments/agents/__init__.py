"""Command-line agents as an environment: a process per rollout that talks to the session's address, and a command that
scores its work."""

from tokentrue.environments.agents.environment import CommandLineAgent

__all__ = ["CommandLineAgent"]
