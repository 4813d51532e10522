"""tokentrue rollout: runs an environment's tasks through a gateway, in groups, scored, written as samples; resumable.

The output directory has `samples.jsonl` (whole groups only), `rollouts.jsonl` (one line per rollout: reward or error)
and `config.json`. A group is written when its last rollout has ended; a restarted run does only what is missing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tokentrue.app.configuration import read
from tokentrue.app.rollouts import (
    Recorder,
    RolloutRun,
    agent_settings,
    describe_environment,
    plan_rollouts,
    read_whole_lines,
    remember,
    trim_to_whole_groups,
)
from tokentrue.cli.options import (
    AsJson,
    ConfigFile,
    Device,
    Dtype,
    ModelName,
    OutFolder,
    RayAddress,
    RayNodes,
    Settings,
    connect,
)
from tokentrue.cli.output import loading, pluralise, progress_bar, rollout_log
from tokentrue.environments import Plan, Rollout, load_environment, player_in, run_plans
from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonObject
from tokentrue.providers.registry import IN_PROCESS, REMOTE, list_names
from tokentrue.types import Coverage

OnRollout = Callable[[Rollout], None]


def command(
    config: ConfigFile = None,
    out: OutFolder = None,
    url: Annotated[str | None, typer.Option(help="a running gateway (TOKENTRUE_ADMIN_KEY holds its admin key)")] = None,
    model: ModelName = None,
    engine: Annotated[
        str | None, typer.Option(help=f"{list_names(IN_PROCESS + REMOTE)}, where no --url names a gateway")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    agent: Annotated[
        str | None, typer.Option(help="a command-line agent: a preset's name, or a command with {task} in it")
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="of --agent: a JSON-lines file, or Harbor task directories")
    ] = None,
    score: Annotated[str | None, typer.Option(help="of --agent: a shell command; its exit code or last number")] = None,
    sandbox: Annotated[str | None, typer.Option(help="of --agent: auto, bwrap, docker, podman or none")] = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="`system`: keep the first system prompt of each conversation")
    ] = None,
    ray: RayAddress = None,
    nodes: RayNodes = None,
    again: Annotated[bool, typer.Option("--again", help="run groups with a failed rollout again")] = False,
    sets: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Play groups of rollouts through a gateway and write them as samples."""
    own = {"model.path": model, "engine.name": engine, "engine.options.device": device, "engine.options.dtype": dtype}
    of_agent, defaults = agent_settings(agent, tasks, score, sandbox, out)
    given = {"out": out, "url": url, "nodes": nodes, "rollout.pin": pin, **own, **of_agent}
    settings = read(RolloutRun, config, sets or (), given, defaults)
    if ray is not None and settings.url is not None:
        raise ConfigError("--ray starts gateways of its own; leave --url out")
    if settings.nodes > 1 and ray is None:
        raise ConfigError("--nodes belongs to --ray")
    if settings.url is not None:
        flags = {"--model": model, "--engine": engine, "--device": device, "--dtype": dtype}
        if named := [flag for flag, value in flags.items() if value is not None]:
            raise ConfigError(
                f"--url names a gateway that has its own model and engine; leave {' and '.join(named)} out"
            )
        with connect(settings.url) as client:
            # Report an unreachable gateway or a refused key once, not for every rollout.
            client.sessions(limit=1)
    settings.out.mkdir(parents=True, exist_ok=True)
    with rollout_log(settings.out) as log:
        return run(settings, log, ray=ray, again=again, as_json=as_json)


def run(settings: RolloutRun, log: Path, *, ray: str | None, again: bool, as_json: bool) -> int:
    plans = plan_rollouts(settings.rollout)
    for note in describe_environment(settings.rollout):
        print(f"  {note}", file=sys.stderr if as_json else sys.stdout)
    remember(settings)
    done = trim_to_whole_groups(settings.out, plans, again=again)
    left = [plan for plan in plans if plan.group not in done]
    with record_rollouts(settings.out, plans, len(left), quiet=as_json) as on_rollout:
        if left and ray is not None:
            from tokentrue.cluster.rollout import play_on_ray

            play_on_ray(settings, left, address=ray, on_rollout=on_rollout)
        elif left:
            asyncio.run(play(settings, left, on_rollout, quiet=as_json))
    return print_summary(settings.out, plans, log, as_json=as_json)


async def play(settings: RolloutRun, plans: list[Plan], on_rollout: OnRollout, *, quiet: bool) -> None:
    from tokentrue.app.rollouts import open_sessions

    config = settings.rollout
    environment = load_environment(config.environment, config.options)
    async with AsyncExitStack() as stack:
        with loading(f"{settings.model.shown}, engine {settings.engine.name}", quiet=quiet or settings.url is not None):
            sessions = await stack.enter_async_context(open_sessions(settings))
        player = player_in(environment, sessions, timeout_s=config.timeout_s)
        async for rollout in run_plans(player, plans, concurrency=config.concurrency):
            on_rollout(rollout)


@contextmanager
def record_rollouts(out: Path, plans: list[Plan], total: int, *, quiet: bool) -> Generator[OnRollout, None, None]:
    """Yields the function that writes each rollout; shows a progress bar."""
    recorder = Recorder(out, plans)
    rewards: list[float] = []
    failed = 0
    try:
        with progress_bar("rollouts", total, quiet=quiet or not total) as advance:

            def on_rollout(rollout: Rollout) -> None:
                nonlocal failed
                recorder(rollout)
                failed += rollout.error is not None
                rewards.extend([] if rollout.reward is None else [rollout.reward])
                advance(f"reward {sum(rewards) / max(1, len(rewards)):.2f}" + (f"  {failed} failed" if failed else ""))

            yield on_rollout
    finally:
        recorder.close()


def print_summary(out: Path, plans: list[Plan], log: Path, *, as_json: bool) -> int:
    rows = read_whole_lines(out / "rollouts.jsonl")
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    sampled, trained = sum(row["sampled"] for row in rows), sum(row["trained"] for row in rows)
    summary: JsonObject = {
        "rollouts": len(rows),
        "planned": len(plans),
        "groups": len({row["group"] for row in rows}),
        "failed": sum(row["error"] is not None for row in rows),
        "without_sample": sum(row["error"] is None and not row["samples"] for row in rows),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "sampled": sampled,
        "trained": trained,
        "coverage": Coverage(sampled=sampled, trained=trained).ratio,
        "samples": str(out / "samples.jsonl"),
    }
    if as_json:
        print(json.dumps(summary, indent=1))
    else:
        shown = "no reward" if summary["reward"] is None else f"mean reward {summary['reward']:.3f}"
        counted = f"{pluralise(len(rows), 'rollout')} in {pluralise(summary['groups'], 'group')}"
        print(f"  {counted}, {summary['failed']} failed, {shown}")
        covered = f"coverage {summary['coverage']:.2%} of {pluralise(sampled, 'sampled token')}"
        print(f"  {covered}; samples in {summary['samples']}")
        for row in [row for row in rows if row.get("note")][:3]:
            print(f"  {row['rollout']}: {row['note']}")
        for row in [row for row in rows if row["error"]][:3]:
            print(f"  failed: {row['rollout']}: {row['error']}")
        if summary["without_sample"]:
            where = f"; agents' output in {out / 'transcripts'}" if (out / "transcripts").is_dir() else ""
            print(
                f"  {pluralise(summary['without_sample'], 'rollout')} sampled nothing: the model was not asked{where}"
            )
        if summary["failed"]:
            print(f"  tracebacks in {log}; --again runs the groups with failures again")
    return 1 if summary["failed"] or len(rows) < len(plans) else 0
