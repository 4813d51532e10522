"""A run: one engine, one gateway, many cases; at its end the store is exported and audited by the commands that users
have."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import faults, retries
from tests.fuzz import steps as all_steps
from tests.fuzz.case import Case, World
from tests.fuzz.engine import Engine, Generation
from tests.fuzz.gateway import ROOT, Gateway
from tests.fuzz.harness import TOOLS
from tests.fuzz.oracle import Judge, Violation
from tests.parts import own_dir, tokenizer_dir
from tokentrue.conformance.standin.vocabulary import Vocabulary

HANGING_S = 120.0
RESTART_EVERY = 60  # cases
MINIMIZED = 40  # cases that are run again to find the steps that matter


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run ends after `turns` requests or `seconds`, whatever comes first."""

    turns: int = 2000
    seconds: float | None = None
    seed: int = 1
    case: int | None = None
    steps: Sequence[int] | None = None
    model: str = "own"
    tree: Path = ROOT
    at_once: int = 3
    workers: int = 1
    live: int | None = None
    keep_going: bool = False
    minimize: bool = True
    without: Sequence[str] = ()


@dataclass(slots=True, kw_only=True)
class Found:
    case: int
    rule: str
    detail: str
    transcript: list[str]
    steps: list[int]


@dataclass(slots=True, kw_only=True)
class Outcome:
    settings: Settings
    requests: int = 0
    generations: int = 0
    tokens: int = 0
    cases: int = 0
    seconds: float = 0.0
    found: list[Found] = field(default_factory=list[Found])

    def report(self) -> str:
        lines: list[str] = []
        counts = Counter(found.rule for found in self.found)
        shown: set[str] = set()
        command = f"python -m tests.fuzz --model {self.settings.model} --seed {self.settings.seed}"
        for found in self.found:
            if found.rule in shown:
                continue
            shown.add(found.rule)
            kept = ",".join(map(str, found.steps))
            lines += [f"VIOLATION ({counts[found.rule]}x) {found.rule}", f"  {found.detail}"]
            lines += [f"  again: {command} --case {found.case} --steps {kept}"]
            lines += [f"    {line[:1500]}" for line in found.transcript]
        lines.append(
            f"{self.requests} requests, {self.generations} generations, {self.tokens} sampled tokens, {self.cases} cases, "
            f"{self.seconds:.0f} s, seed {self.settings.seed}: {sum(counts.values())} violations {dict(counts) if counts else ''}"
        )
        return "\n".join(lines)


async def run(settings: Settings) -> Outcome:
    outcome = Outcome(settings=settings)
    model = own_dir("qwen3-like") if settings.model == "own" else tokenizer_dir(settings.model)
    vocabulary = Vocabulary(model)
    engine = Engine(vocabulary, settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        gateway = Gateway(
            Path(folder), model, await engine.start(), tree=settings.tree, workers=settings.workers, live=settings.live
        )
        try:
            await gateway.start()
            world = World(
                gateway=gateway,
                engine=engine,
                vocabulary=vocabulary,
                judge=Judge(vocabulary, strict=settings.model == "own"),
            )
            try:
                await Runner(world, settings, outcome).all()
            finally:
                await engine.stop()
                await gateway.stop()
        finally:
            await engine.stop()
    return outcome


class Restarts:
    """Some cases wait for each other; then the gateway is killed, while it generates for them, and started again on the
    same store."""

    def __init__(self, gateway: Gateway, cases: int) -> None:
        self._gateway, self._missing = gateway, cases
        self._done = asyncio.Event()

    async def wait(self, case: Case) -> None:
        if self._done.is_set():
            return
        before = await retries.prepare_kill(case)
        case.note("## the gateway is killed and started again")
        await self._arrived()
        await self._done.wait()
        await retries.check_after_kill(case, before)

    async def leave(self) -> None:
        """A case that ended before it came this far."""
        if not self._done.is_set():
            await self._arrived()

    async def _arrived(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            await self._gateway.stop(signal.SIGKILL)
            await self._gateway.start()
            self._done.set()


class Runner:
    def __init__(self, world: World, settings: Settings, outcome: Outcome) -> None:
        self._world, self._settings, self._outcome = world, settings, outcome
        self._next = 0
        self._restarts: Restarts | None = None
        self._done: list[Case] = []
        self._began = time.monotonic()

    async def all(self) -> None:
        settings, outcome, world = self._settings, self._outcome, self._world
        if settings.case is not None:
            alone = (
                self._with_restart([settings.case])
                if self._is_restarted(settings.case)
                else self._one(settings.case, settings.steps)
            )
            await alone
        else:
            while not self._over():
                first, self._next = self._next, self._next + settings.at_once
                await self._with_restart(range(first, self._next))
                await asyncio.gather(*(self._worker() for _ in range(settings.at_once)))
        sound = [case for case in self._done if not any(found.case == case.index for found in outcome.found)]
        try:
            await self._check_store(sound)
        except Violation as violation:
            outcome.found.append(Found(case=-1, rule=violation.rule, detail=violation.detail, transcript=[], steps=[]))
        outcome.requests, outcome.seconds = world.requests, time.monotonic() - self._began
        outcome.generations = sum(len(log) for log in world.engine.log.values())
        outcome.tokens = sum(generation.delivered for log in world.engine.log.values() for generation in log)

    def _is_restarted(self, index: int) -> bool:
        return index % RESTART_EVERY < self._settings.at_once

    async def _with_restart(self, cases: Sequence[int]) -> None:
        self._restarts = Restarts(self._world.gateway, len(cases))
        await asyncio.gather(*(self._one(index, self._settings.steps) for index in cases))
        self._restarts = None

    def _over(self) -> bool:
        settings = self._settings
        if self._outcome.found and not settings.keep_going:
            return True
        if settings.seconds is not None and time.monotonic() - self._began >= settings.seconds:
            return True
        return self._world.requests >= settings.turns

    async def _worker(self) -> None:
        while not self._over() and not self._is_restarted(self._next):
            index, self._next = self._next, self._next + 1
            await self._one(index, None)

    async def _one(self, index: int, only: Sequence[int] | None) -> None:
        self._outcome.cases += 1
        case = Case(self._world, self._settings.seed, index)
        found = await self._played(case, only)
        if self._restarts is not None:
            await self._restarts.leave()
        self._done.append(case)
        if found is None:
            return
        self._outcome.found.append(found)
        print(f"case {found.case}: {found.rule}", file=sys.stderr, flush=True)
        is_first = sum(1 for other in self._outcome.found if other.rule == found.rule) == 1
        if is_first and only is None and self._restarts is None and self._settings.minimize:
            await self._minimize(found)

    async def _played(self, case: Case, only: Sequence[int] | None) -> Found | None:
        done: list[int] = []
        try:
            async with asyncio.timeout(HANGING_S):
                await self._play(case, only, done)
        except TimeoutError:
            return Found(
                case=case.index,
                rule="a case ends",
                detail=f"nothing happened for {HANGING_S} s",
                transcript=case.transcript,
                steps=done,
            )
        except Violation as violation:
            detail = violation.detail + (
                self._world.gateway.last_error() if "500" in violation.rule + violation.detail else ""
            )
            await self._note_nodes(case)
            return Found(case=case.index, rule=violation.rule, detail=detail, transcript=case.transcript, steps=done)
        except Exception:
            return Found(
                case=case.index,
                rule="the fuzz itself failed",
                detail=traceback.format_exc(),
                transcript=case.transcript,
                steps=done,
            )
        return None

    async def _note_nodes(self, case: Case) -> None:
        """What the gateway itself says of its last turns."""
        status, shown = await self._world.gateway.admin("GET", f"/sessions/{case.session}")
        for node in (shown["nodes"] if status == 200 else [])[-6:]:
            told = {
                name: node.get(name)
                for name in ("id", "parent", "why", "detail", "projection", "outcome", "sampled_tokens")
            }
            case.note(f"node {told}")

    async def _play(self, case: Case, only: Sequence[int] | None, done: list[int]) -> None:
        status, answer = await self._world.gateway.admin("POST", "/sessions", {"session_id": case.session})
        if status != 201:
            raise Violation("a session can be made", f"{status} {answer}")
        case.tools = tuple(case.rng.sample(TOOLS, case.rng.choice((0, 2, 3, 4))))
        last = case.rng.randint(3, 14)
        deletes = case.rng.random() < 0.1
        for step in range(last + 1):
            if only is None or step in only:
                done.append(step)
                await self._step(case, step, ends=deletes and step == last)
            if step == 2 and self._restarts is not None:
                await self._restarts.wait(case)
        await case.check_record()

    async def _step(self, case: Case, step: int, *, ends: bool) -> None:
        case.use(step + 1)
        chosen = faults.delete_in_mid_stream if ends else all_steps.choose(case.rng, self._settings.without)
        case.note(f"## step {step}: {chosen.__name__}")
        await chosen(case)
        self._world.engine.plans[case.session].clear()
        if step % 4 == 3 or case.index % 8 == 0:
            await case.check_record()

    async def _minimize(self, found: Found) -> None:
        """Leaves out one step after the other while the same rule is broken."""
        kept = list(found.steps)
        for tried, step in enumerate(list(kept[:-1])):
            if tried >= MINIMIZED:
                break
            fewer = [other for other in kept if other != step]
            again = Case(self._world, self._settings.seed, found.case, name=f"-m{tried}")
            smaller = await self._played(again, fewer)
            if smaller is not None and smaller.rule == found.rule:
                kept = smaller.steps
                found.steps, found.detail, found.transcript = smaller.steps, smaller.detail, smaller.transcript

    async def _check_store(self, cases: Sequence[Case]) -> None:
        """`tokentrue samples` and `audit` over the store: all that was sampled, also what was given up."""
        gateway = self._world.gateway
        out = gateway.store.parent / "all.jsonl"
        made = await asyncio.to_thread(
            gateway.command, "samples", f"sqlite:{gateway.store}", "--abandoned", "-o", str(out)
        )
        if made.returncode != 0:
            raise Violation(
                "samples can be exported", f"exit {made.returncode}: {made.stdout[-500:]} {made.stderr[-500:]}"
            )
        if not out.read_bytes().strip():
            return
        audit = await asyncio.to_thread(gateway.command, "audit", str(out))
        if audit.returncode != 0:
            raise Violation("an export passes its audit", f"{audit.stdout[-1500:]} {audit.stderr[-500:]}")
        by_session: dict[str, list[dict[str, object]]] = {}
        with out.open(encoding="utf-8") as lines:
            for line in lines:
                sample = json.loads(line)
                by_session.setdefault(sample["session_id"], []).append(sample)
        for case in cases:
            try:
                self._check_export(case, by_session.get(case.session, []))
            except Violation as violation:
                detail, steps = violation.detail, list(range(20))
                self._outcome.found.append(
                    Found(
                        case=case.index,
                        rule=violation.rule,
                        detail=detail,
                        transcript=case.transcript[-12:],
                        steps=steps,
                    )
                )

    def _check_export(self, case: Case, samples: list[dict[str, object]]) -> None:
        self._world.judge.samples(samples, case.log)  # type: ignore[arg-type]
        recorded = {value for sample in samples for value in sample["rollout_logprobs"] if value is not None}  # type: ignore[attr-defined]
        uncertain = case.unsure()
        for generation in case.log:
            kept = self._kept(generation, recorded)
            if id(generation) not in uncertain and kept != generation.delivered:
                lost = f"{generation.delivered} tokens were reported, {kept} are in the export (fault {generation.plan.fault!r})"
                raise Violation("every sampled token is in the record", lost)
        for generation, texts in case.heard_partly:
            text = self._world.vocabulary.text(generation.sampled[: self._kept(generation, recorded)])
            for piece in texts:
                if piece.rstrip("\ufffd").strip() not in text:  # half a character may have been flushed at the end
                    raise Violation(
                        "what a client was sent is in the record", f"{piece!r} was sent, the record has {text!r}"
                    )

    def _kept(self, generation: Generation, recorded: set[float]) -> int:
        return sum(value in recorded for value in generation.logprobs[: generation.delivered])
