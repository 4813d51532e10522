"""Command-line agents as an environment: one process per rollout, connected to its session, and a command that
scores its work."""

from tokentrue.environments.agents.environment import CommandLineAgent

__all__ = ["CommandLineAgent"]
