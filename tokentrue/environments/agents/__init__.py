"""Command-line agents as an environment."""

from tokentrue.environments.agents.environment import CommandLineAgent

__all__ = ["CommandLineAgent"]
