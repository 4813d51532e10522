"""The configuration of `tokentrue rollout`, and its copy beside the output."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokentrue.app.configuration import as_mapping
from tokentrue.app.wiring import AtLeastOne, EngineConfig, ModelConfig
from tokentrue.environments import Plan, RolloutConfig, load_environment, plan_groups
from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.sessions.journal.database import describe_store, is_postgres


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRun:
    """`url` names a running gateway; without it one is started in this process with `model` and `engine`."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    url: str | None = None
    out: Path = Path("out/rollout")
    store: str | None = None
    gateways: AtLeastOne = 2  # with --ray: gateway actors, each with its engine
    workers: AtLeastOne = 2  # with --ray: rollout actors
    nodes: AtLeastOne = 1  # with --ray: nodes that share the gateways and workers, at least one of each on every node

    def __post_init__(self) -> None:
        if self.nodes > 1 and not self.is_shared:
            raise ConfigError(f"nodes={self.nodes} needs a record that every node reaches: --set store=postgresql://…")

    @property
    def is_shared(self) -> bool:
        return is_postgres(self.store or "")


AGENT_DEFAULTS: JsonMapping = {
    "rollout.environment": "agent",
    "rollout.tasks": 1_000_000,  # all of the file
    "rollout.max_tokens": 4096,
    "rollout.concurrency": 4,
    "rollout.timeout_s": 1800.0,
}


def agent_settings(
    agent: str | None, tasks: Path | None, score: str | None, sandbox: str | None, out: Path | None
) -> tuple[JsonObject, JsonMapping]:
    """Also returns the defaults that then apply."""
    if agent is None:
        if tasks is not None or score is not None or sandbox is not None:
            raise ConfigError("--tasks, --score and --sandbox belong to --agent")
        return {}, {}
    given = {"agent": agent, "tasks": None if tasks is None else str(tasks), "score": score, "sandbox": sandbox}
    given["transcripts"] = str((out or RolloutRun().out) / "transcripts")
    return {f"rollout.options.{name}": value for name, value in given.items()}, AGENT_DEFAULTS


def plan_rollouts(config: RolloutConfig) -> list[Plan]:
    """Deterministic for a configuration."""
    environment = load_environment(config.environment, config.options)
    return plan_groups(
        environment.tasks(config.tasks, seed=config.seed, split=config.split), n=config.group_size, seed=config.seed
    )


def describe_environment(config: RolloutConfig) -> list[str]:
    notes = getattr(load_environment(config.environment, config.options), "notes", None)
    return [] if notes is None else notes()


def remember(settings: RolloutRun) -> None:
    """Writes the resolved configuration beside the output; raises if another one is there."""
    path = settings.out / "config.json"
    shown = replace(settings, store=None if settings.store is None else describe_store(settings.store))
    text = json.dumps(as_mapping(shown), indent=1, sort_keys=True)
    if path.exists():
        before, now = json.loads(path.read_text())["rollout"], json.loads(text)["rollout"]
        if changed := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
            named = ", ".join(f"rollout.{key}" for key in changed)
            raise ConfigError(f"{settings.out} holds a run with another {named}; choose another --out")
    path.write_text(text)
