"""tokentrue rollout: an environment's tasks through a gateway, in groups, scored, written as samples; resumable.

The output directory holds `samples.jsonl` (whole groups only), `rollouts.jsonl` (one line per rollout: reward or error) and
`config.json`. A group is written when its last rollout has ended, so that an interrupted run leaves whole groups; started again, it
plays only what is missing.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from tokentrue.cli.config import as_mapping, read
from tokentrue.cli.wiring import EngineConfig, ModelConfig
from tokentrue.environments import Plan, Rollout, RolloutConfig, Sessions, load_environment, plan_groups, run_plans
from tokentrue.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRun:
    """`url` names a gateway that runs already; without it one is started in this process with `model` and `engine`."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    url: str | None = None
    out: Path = Path("out/rollout")
    store: str | None = None
    gateways: int = 2  # with --ray: gateway actors, each with its engine
    workers: int = 2  # with --ray: rollout actors


def command(
    config: Annotated[Path | None, typer.Option("--config", help="a TOML file; flags win over it")] = None,
    out: Annotated[Path | None, typer.Option(help="output directory; a run that is there already is gone on with")] = None,
    url: Annotated[str | None, typer.Option(help="a running gateway (TOKENTRUE_ADMIN_KEY names its admin key)")] = None,
    ray: Annotated[str | None, typer.Option("--ray", help="a Ray address, or `local`: gateways and rollouts as actors")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="any setting: rollout.tasks=32")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> int:
    """Play groups of rollouts through a gateway and write them as samples."""
    settings = read(RolloutRun, config, sets or (), {"out": out, "url": url})
    plans = planned(settings.rollout)
    settings.out.mkdir(parents=True, exist_ok=True)
    remember(settings)
    done = finished(settings.out)
    left = [plan for plan in plans if plan.group not in done]
    recorder = Recorder(settings.out, plans)
    if left and ray is not None:
        from tokentrue.cluster.rollout import play_on_ray

        play_on_ray(settings, left, address=ray, on_rollout=bar(recorder, len(left), quiet=as_json))
    elif left:
        asyncio.run(play(settings, left, bar(recorder, len(left), quiet=as_json)))
    recorder.close()
    return summed_up(settings.out, plans, as_json=as_json)


def planned(config: RolloutConfig) -> list[Plan]:
    environment = load_environment(config.environment, config.options)
    return plan_groups(environment.tasks(config.tasks, seed=config.seed, split=config.split), n=config.group_size, seed=config.seed)


async def play(settings: RolloutRun, plans: list[Plan], heard: Any) -> None:
    from tokentrue.cli.sessions import open_sessions

    environment = load_environment(settings.rollout.environment, settings.rollout.options)
    async with open_sessions(settings) as sessions:
        await play_with(environment, plans, sessions, settings.rollout, heard)


async def play_with(environment: Any, plans: list[Plan], sessions: Sessions, config: RolloutConfig, heard: Any) -> None:
    rollouts = run_plans(environment, plans, sessions, concurrency=config.concurrency, timeout_s=config.timeout_s)
    async for rollout in rollouts:
        heard(rollout)


class Recorder:
    """Writes whole groups, in the order in which they end."""

    def __init__(self, out: Path, plans: list[Plan]) -> None:
        self._sizes: dict[str, int] = {}
        for plan in plans:
            self._sizes[plan.group] = self._sizes.get(plan.group, 0) + 1
        self._groups: dict[str, list[Rollout]] = {}
        self._samples = (out / "samples.jsonl").open("ab")
        self._rollouts = (out / "rollouts.jsonl").open("ab")

    def __call__(self, rollout: Rollout) -> None:
        group = self._groups.setdefault(rollout.plan.group, [])
        group.append(rollout)
        if len(group) == self._sizes[rollout.plan.group]:
            self._write(sorted(self._groups.pop(rollout.plan.group), key=lambda r: r.plan.index))

    def _write(self, group: list[Rollout]) -> None:
        """Samples first: a group counts as done when its rollouts are on file, and a half-written sample line is cut off on resume."""
        import orjson

        for rollout in group:
            self._samples.writelines(orjson.dumps(sample) + b"\n" for sample in rollout.samples)
        self._samples.flush()
        for rollout in group:
            self._rollouts.write(orjson.dumps(line_of(rollout)) + b"\n")
        self._rollouts.flush()

    def close(self) -> None:
        self._samples.close()
        self._rollouts.close()


def line_of(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout": rollout.plan.key,
        "group": rollout.plan.group,
        "index": rollout.plan.index,
        "session_id": rollout.session_id,
        "reward": rollout.reward,
        "error": rollout.error,
        "seconds": round(rollout.seconds, 4),
        "samples": len(rollout.samples),
        "sampled": rollout.coverage.get("sampled", 0),
        "trained": rollout.coverage.get("trained", 0),
    }


def bar(recorder: Recorder, total: int, *, quiet: bool) -> Any:
    """The recorder with a progress bar around it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if quiet:
        return recorder
    note = TextColumn("{task.fields[note]}")
    progress = Progress(TextColumn("  rollouts"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeElapsedColumn(), note)
    task = progress.add_task("", total=total, note="")
    rewards: list[float] = []
    failed = 0
    ended = 0
    progress.start()

    def heard(rollout: Rollout) -> None:
        nonlocal failed, ended
        recorder(rollout)
        ended += 1
        failed += rollout.error is not None
        rewards.extend([] if rollout.reward is None else [rollout.reward])
        note = f"reward {sum(rewards) / max(1, len(rewards)):.2f}" + (f"  {failed} failed" if failed else "")
        progress.update(task, advance=1, note=note)
        if ended == total:
            progress.stop()

    return heard


def remember(settings: RolloutRun) -> None:
    """The resolved configuration lies beside the output; a run under another one is refused there."""
    path = settings.out / "config.json"
    text = json.dumps(as_mapping(settings), indent=1, sort_keys=True)
    if path.exists():
        before, now = json.loads(path.read_text())["rollout"], json.loads(text)["rollout"]
        if before != now:
            changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
            named = ", ".join(f"rollout.{key}" for key in changed)
            raise ConfigError(f"{settings.out} holds a run with another {named}; choose another --out")
    path.write_text(text)


def finished(out: Path) -> set[str]:
    """Groups on file. What a crash left after the last whole group is cut off both files."""
    lines = out / "rollouts.jsonl"
    if not lines.exists():
        (out / "samples.jsonl").unlink(missing_ok=True)
        return set()
    whole: dict[str, int] = {}
    kept: list[str] = []
    for text in lines.read_text().splitlines():
        try:
            row = json.loads(text)
        except ValueError:
            break
        whole[row["group"]] = whole.get(row["group"], 0) + 1
        kept.append(text)
    sizes = set(whole.values())
    size = max(sizes, default=0)
    done = {group for group, count in whole.items() if count == size}
    kept = [text for text in kept if json.loads(text)["group"] in done]
    lines.write_text("".join(text + "\n" for text in kept))
    sessions = {json.loads(text)["session_id"] for text in kept}
    cut_samples(out / "samples.jsonl", sessions)
    return done


def cut_samples(path: Path, sessions: set[str]) -> None:
    if not path.exists():
        return
    kept: list[str] = []
    for text in path.read_text().splitlines():
        try:
            if json.loads(text)["session_id"] in sessions:
                kept.append(text)
        except ValueError:
            break
    path.write_text("".join(text + "\n" for text in kept))


def summed_up(out: Path, plans: list[Plan], *, as_json: bool) -> int:
    rows = [json.loads(text) for text in (out / "rollouts.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    sampled, trained = sum(row["sampled"] for row in rows), sum(row["trained"] for row in rows)
    summary = {
        "rollouts": len(rows),
        "planned": len(plans),
        "groups": len({row["group"] for row in rows}),
        "failed": sum(row["error"] is not None for row in rows),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "sampled": sampled,
        "trained": trained,
        "coverage": trained / sampled if sampled else 1.0,
        "samples": str(out / "samples.jsonl"),
    }
    if as_json:
        print(json.dumps(summary, indent=1))
    else:
        shown = "no reward" if summary["reward"] is None else f"mean reward {summary['reward']:.3f}"
        print(f"  {len(rows)} rollouts in {summary['groups']} groups, {summary['failed']} failed, {shown}")
        print(f"  coverage {summary['coverage']:.2%} of {sampled:,} sampled tokens; samples in {summary['samples']}")
        for row in [row for row in rows if row["error"]][:3]:
            print(f"  failed: {row['rollout']}: {row['error']}")
    return 1 if summary["failed"] or len(rows) < len(plans) else 0
