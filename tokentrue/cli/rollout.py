"""tokentrue rollout: an environment's tasks through a gateway, in groups, scored, written as samples; resumable."""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tokentrue.cli.common import (
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
    pluralise,
    print_json,
    progress_bar,
    require_folder,
    rollout_log,
    show_coverage,
    show_status,
)
from tokentrue.json_types import JsonObject
from tokentrue.providers.registry import IN_PROCESS, REMOTE, list_names
from tokentrue.types import Coverage

if TYPE_CHECKING:
    from tokentrue.app.rollouts import RolloutRun
    from tokentrue.environments import Plan, Rollout


def command(
    config: ConfigFile = None,
    out: OutFolder = None,
    url: Annotated[str | None, Option(help="a running gateway (TOKENTRUE_ADMIN_KEY holds its admin key)")] = None,
    model: ModelName = None,
    engine: Annotated[
        str | None, Option(help=f"{list_names(IN_PROCESS + REMOTE)}, where no --url names a gateway")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    agent: Annotated[
        str | None, Option(help="a command-line agent: a preset's name, or a command with {task} in it")
    ] = None,
    tasks: Annotated[Path | None, Option(help="of --agent: a JSON-lines file, or Harbor task directories")] = None,
    score: Annotated[str | None, Option(help="of --agent: a shell command; its exit code or last number")] = None,
    sandbox: Annotated[str | None, Option(help="of --agent: bwrap or none")] = None,
    pin: Annotated[list[str] | None, Option(help="`system`: keep the first system prompt of each conversation")] = None,
    ray: RayAddress = None,
    nodes: RayNodes = None,
    again: Annotated[bool, Option("--again", help="run groups with a failed rollout again")] = False,
    sets: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Play groups of rollouts through a gateway and write them as samples."""
    from tokentrue.app import rollouts
    from tokentrue.app.configuration import Checks, read
    from tokentrue.app.wiring import check_gateway

    own = {"model.path": model, "engine.name": engine, "engine.options.device": device, "engine.options.dtype": dtype}
    of_agent, defaults = rollouts.agent_settings(agent, tasks, score, sandbox, out)
    given = {"out": out, "url": url, "nodes": nodes, "rollout.pin": pin, **own, **of_agent}
    settings = read(rollouts.RolloutRun, config, sets or (), given, defaults)
    checks = Checks()
    checks.require(ray is None or settings.url is None, "--ray starts gateways of its own; leave --url out")
    checks.require(settings.nodes == 1 or ray is not None, "--nodes belongs to --ray")
    if settings.url is not None:
        flags = {"--model": model, "--engine": engine, "--device": device, "--dtype": dtype}
        named = " and ".join(flag for flag, value in flags.items() if value is not None)
        checks.require(not named, f"--url names a gateway that has its own model and engine; leave {named} out")
        if not named:
            checks(reach_gateway, settings.url)
    else:
        check_gateway(checks, settings.model, settings.engine, settings.store, reach=ray is None)
    checks(require_folder, settings.out)
    checks.finish()
    settings.out.mkdir(parents=True, exist_ok=True)
    with rollout_log(settings.out) as log:
        plans = rollouts.plan_rollouts(settings.rollout)
        for note in rollouts.describe_environment(settings.rollout):
            print(f"  {note}", file=sys.stderr if as_json else sys.stdout)
        rollouts.remember(settings)
        done = rollouts.trim_to_whole_groups(settings.out, plans, again=again)
        play_all(settings, plans, [plan for plan in plans if plan.group not in done], ray=ray, quiet=as_json)
        return print_summary(settings.out, plans, log, as_json=as_json)


def reach_gateway(url: str) -> None:
    with connect(url) as client:
        client.sessions(limit=1)


def play_all(settings: "RolloutRun", plans: "list[Plan]", left: "list[Plan]", *, ray: str | None, quiet: bool) -> None:
    from tokentrue.app.rollouts import Recorder

    rewards: list[float] = []
    failed = sampled = 0
    began = time.monotonic()
    with (
        closing(Recorder(settings.out, plans)) as recorder,
        progress_bar("rollouts", len(left), quiet=quiet or not left, every_s=10.0) as advance,
    ):

        def on_rollout(rollout: "Rollout") -> None:
            nonlocal failed, sampled
            recorder(rollout)
            failed += rollout.error is not None
            rewards.extend([] if rollout.reward is None else [rollout.reward])
            sampled += rollout.coverage.get("sampled", 0)
            speed = f"{sampled / (time.monotonic() - began):,.0f} tokens/s"
            lost = f"  {failed} failed" if failed else ""
            advance(f"reward {sum(rewards) / max(1, len(rewards)):.2f}  {speed}{lost}")

        if left and ray is not None:
            from tokentrue.cluster.rollout import play_on_ray

            play_on_ray(settings, left, address=ray, on_rollout=on_rollout)
        elif left:
            asyncio.run(play(settings, left, on_rollout, quiet=quiet))


async def play(
    settings: "RolloutRun", plans: "list[Plan]", on_rollout: "Callable[[Rollout], None]", *, quiet: bool
) -> None:
    from tokentrue.app.rollouts import open_sessions
    from tokentrue.environments import load_environment, player_in, run_plans

    config = settings.rollout
    environment = load_environment(config.environment, config.options)
    what = f"loading {settings.model.shown}, engine {settings.engine.name}"
    async with AsyncExitStack() as stack:
        with show_status(what, quiet=quiet or settings.url is not None):
            sessions = await stack.enter_async_context(open_sessions(settings))
        player = player_in(environment, sessions, timeout_s=config.timeout_s)
        async for rollout in run_plans(player, plans, concurrency=config.concurrency):
            on_rollout(rollout)


def print_summary(out: Path, plans: "list[Plan]", log: Path, *, as_json: bool) -> int:
    from tokentrue.app.rollouts import read_whole_lines

    rows = read_whole_lines(out / "rollouts.jsonl")
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    sampled, trained = sum(row["sampled"] for row in rows), sum(row["trained"] for row in rows)
    failed = [row for row in rows if row["error"] is not None]
    silent = sum(row["error"] is None and not row["samples"] for row in rows)
    summary: JsonObject = {
        "rollouts": len(rows),
        "planned": len(plans),
        "groups": len({row["group"] for row in rows}),
        "failed": len(failed),
        "without_sample": silent,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "sampled": sampled,
        "trained": trained,
        "coverage": Coverage(sampled=sampled, trained=trained).ratio,
        "samples": str(out / "samples.jsonl"),
    }
    if as_json:
        print_json(summary)
    else:
        shown = f"mean reward {summary['reward']:.3f}" if rewards else "no reward"
        counted = f"{pluralise(len(rows), 'rollout')} in {pluralise(summary['groups'], 'group')}"
        print(f"  {counted}, {len(failed)} failed, {shown}")
        print(f"  {show_coverage(summary['coverage'], sampled)}; samples in {summary['samples']}")
        for row in [row for row in rows if row.get("note")][:3]:
            print(f"  {row['rollout']}: {row['note']}")
        for row in failed[:3]:
            print(f"  failed: {row['rollout']}: {row['error']}")
        if silent:
            where = f"; agents' output in {out / 'transcripts'}" if (out / "transcripts").is_dir() else ""
            print(f"  {pluralise(silent, 'rollout')} sampled nothing: the model was not asked{where}")
        if failed:
            print(f"  tracebacks in {log}; --again runs the groups with failures again")
    return 1 if failed or len(rows) < len(plans) else 0
