"""Environments: tasks, and agents that solve them through an OpenAI client."""

from tokentrue.environments.base import (
    ENVIRONMENTS,
    SMALL_MODEL,
    Environment,
    Outcome,
    RolloutConfig,
    Split,
    Task,
    load_environment,
)
from tokentrue.environments.chat import ask, work
from tokentrue.environments.runner import (
    OpenSession,
    Plan,
    Player,
    Rollout,
    Sessions,
    derive_seed,
    failed_rollout,
    plan_groups,
    player_in,
    run_groups,
    run_one,
    run_plans,
    session_settings,
)

__all__ = [
    "ENVIRONMENTS",
    "SMALL_MODEL",
    "Environment",
    "OpenSession",
    "Outcome",
    "Plan",
    "Player",
    "Rollout",
    "RolloutConfig",
    "Sessions",
    "Split",
    "Task",
    "ask",
    "derive_seed",
    "failed_rollout",
    "load_environment",
    "plan_groups",
    "player_in",
    "run_groups",
    "run_one",
    "run_plans",
    "session_settings",
    "work",
]
