"""Runs groups of rollouts with bounded concurrency and a time limit each. Every planned rollout ends in exactly one
`Rollout`, and what it samples does not depend on what runs beside it."""

import asyncio
import hashlib
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import field
from typing import Any, Protocol, cast

from tokentrue.environments.base import LOG, Environment, Outcome, Task
from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import is_utf8
from tokentrue.records import record


@record
class Plan:
    """`key` is unique in a run and names the session, so that a resumed run knows what is done."""

    key: str
    group: str
    index: int
    task: Task
    seed: int


@record
class Rollout:
    """`error` says how it failed, `trace` is the traceback. `note` is the environment's."""

    plan: Plan
    session_id: str
    reward: float | None
    error: str | None
    seconds: float
    samples: Sequence[JsonObject] = ()
    coverage: JsonMapping = field(default_factory=JsonObject)
    trace: str = ""
    note: str | None = None


class OpenSession(Protocol):
    @property
    def session_id(self) -> str: ...

    @property
    def client(self) -> Any: ...

    async def finish(self, reward: float) -> tuple[Sequence[JsonObject], JsonMapping]: ...


class Sessions(Protocol):
    def open(self, plan: Plan) -> AbstractAsyncContextManager[OpenSession]: ...


Player = Callable[[Plan], Awaitable[Rollout]]
"""Runs one rollout: here (`player_in`), or on another machine."""


def player_in(environment: Environment, sessions: Sessions, *, timeout_s: float) -> Player:
    return lambda plan: run_one(environment, plan, sessions, timeout_s=timeout_s)


def derive_seed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4]) >> 1


def plan_groups(tasks: Sequence[Task], *, n: int, seed: int, tag: str = "") -> list[Plan]:
    plans: list[Plan] = []
    for task in tasks:
        if not is_utf8(task.task_id):
            raise ConfigError(
                f"tasks: the id {task.task_id!r} holds a lone surrogate, which UTF-8 cannot hold; choose another id"
            )
        group = f"{tag}/{task.task_id}" if tag else task.task_id
        for i in range(n):
            plans.append(Plan(key=f"{group}/{i}", group=group, index=i, task=task, seed=derive_seed(seed, group, i)))
    return plans


def session_settings(
    plan: Plan, sampling: JsonMapping, pin: Sequence[str] | None = None, side_requests: str | None = None
) -> JsonObject:
    metadata = {"task": plan.task.task_id, "index": plan.index, "rollout": plan.key}
    settings: JsonObject = {"group": plan.group, "metadata": metadata, "sampling": {**sampling, "seed": plan.seed}}
    own = {"side_requests": side_requests, "pin": None if pin is None else list(pin)}
    return settings | {name: value for name, value in own.items() if value is not None}


async def run_one(
    environment: Environment,
    plan: Plan,
    sessions: Sessions,
    *,
    timeout_s: float,
    is_raised: Callable[[Exception], bool] = lambda _: False,
) -> Rollout:
    """Whatever an agent raises, SystemExit and CancelledError of its own tasks included, fails only this rollout. The
    rollout's own cancellation, and errors that satisfy `is_raised`, propagate."""
    began = time.perf_counter()
    session_id = ""
    task, limit = cast("asyncio.Task[object]", asyncio.current_task()), asyncio.timeout(timeout_s)
    cancellations = task.cancelling()
    try:
        # the limit is inside, so the session sees a time-out as an error, not a cancellation, and is ended
        async with sessions.open(plan) as session, limit:
            session_id = session.session_id
            outcome = await environment.run(session.client, plan.task)
            if not isinstance(outcome, Outcome):
                outcome = Outcome(reward=float(outcome))
            samples, coverage = await session.finish(outcome.reward)
    except (asyncio.CancelledError, SystemExit) as error:
        if task.cancelling() > cancellations:  # Ctrl-C, or the run was closed
            raise
        return failed_rollout(plan, error, began, session_id=session_id)
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():  # any other TimeoutError is the agent's
            return failed_rollout(plan, f"timed out after {timeout_s:g} s", began, session_id=session_id)
        if is_raised(error):
            raise
        return failed_rollout(plan, error, began, session_id=session_id)
    return Rollout(
        plan=plan,
        session_id=session_id,
        reward=outcome.reward,
        error=None,
        seconds=time.perf_counter() - began,
        samples=samples,
        coverage=coverage,
        note=outcome.note,
    )


def failed_rollout(plan: Plan, error: BaseException | str, began: float, *, session_id: str) -> Rollout:
    said, trace = str(error), ""
    if isinstance(error, BaseException):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
        trace = "".join(traceback.format_exception(error)).rstrip()
    # Files, logs and terminals need UTF-8, and errors may quote file names with lone surrogates.
    said, trace = (text.encode("utf-8", "backslashreplace").decode() for text in (said, trace))
    seconds = time.perf_counter() - began
    return Rollout(plan=plan, session_id=session_id, reward=None, error=said, seconds=seconds, trace=trace)


async def run_plans(play: Player, plans: Sequence[Plan], *, concurrency: int | None = None) -> AsyncGenerator[Rollout]:
    gate = asyncio.Semaphore(concurrency or max(1, len(plans)))

    async def guarded(plan: Plan) -> Rollout:
        async with gate:
            return await play(plan)

    pending = {asyncio.ensure_future(guarded(plan)) for plan in plans}
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                rollout = task.result()
                if rollout.trace:  # in this process's log, whichever process ran it
                    LOG.error("rollout %s failed\n%s", rollout.plan.key, rollout.trace)
                yield rollout
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def run_groups(
    play: Player,
    plans: Sequence[Plan],
    *,
    concurrency: int | None = None,
    on_rollout: Callable[[Rollout], None] = lambda _: None,
) -> list[list[Rollout]]:
    ended: dict[str, Rollout] = {}
    async for rollout in run_plans(play, plans, concurrency=concurrency):
        ended[rollout.plan.key] = rollout
        on_rollout(rollout)
    groups: dict[str, list[Rollout]] = {}
    for plan in plans:
        groups.setdefault(plan.group, []).append(ended[plan.key])
    return list(groups.values())
