"""Environments: tasks, and agents that do them with an OpenAI client in hand."""

from tokentrue.environments.base import SMALL_MODEL, Environment, Outcome, Split, Task
from tokentrue.environments.client import ask, work
from tokentrue.environments.config import RolloutConfig
from tokentrue.environments.registry import ENVIRONMENTS, load_environment
from tokentrue.environments.runner import (
    OpenSession,
    Plan,
    Rollout,
    Sessions,
    failed_rollout,
    group_rollouts,
    log_failure,
    plan_groups,
    run_groups,
    run_one,
    run_plans,
    seed_of,
    session_settings,
)

__all__ = [
    "ENVIRONMENTS",
    "SMALL_MODEL",
    "Environment",
    "OpenSession",
    "Outcome",
    "Plan",
    "Rollout",
    "RolloutConfig",
    "Sessions",
    "Split",
    "Task",
    "ask",
    "failed_rollout",
    "group_rollouts",
    "load_environment",
    "log_failure",
    "plan_groups",
    "run_groups",
    "run_one",
    "run_plans",
    "seed_of",
    "session_settings",
    "work",
]
