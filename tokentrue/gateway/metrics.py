"""Prometheus metrics of one process, the merged page of several, and the time spent in the engine."""

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from tokentrue.gateway.admission import AdmissionGate
from tokentrue.gateway.sessions import CoverageTotals, SessionRegistry
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Adapting, EngineControl, Measured, Streaming
from tokentrue.sessions.images import check_engine
from tokentrue.types import UNVERSIONED, Chunk, Completion, Ids, Reply, Sampling, spans_from_runs

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
LONG_SECONDS = (0.01, 0.05, 0.25, 1, 5, 15, 60, 300, 1200)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COVERAGE = "tokentrue_coverage_ratio"
LARGEST = {"tokentrue_paused", "tokentrue_policy_version"}  # the rest adds up over workers


class TurnClock:
    """`engine_s`: seconds with at least one engine call running, as the calls of n choices overlap."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_byte: float | None = None
        self.engine_s = 0.0
        self._running = 0
        self._since = 0.0

    def enter_engine(self) -> None:
        if not self._running:
            self._since = time.perf_counter()
        self._running += 1

    @property
    def engine_ms(self) -> float:
        return round(self.engine_s * 1000, 3)

    def leave_engine(self) -> None:
        self._running -= 1
        if not self._running:
            self.engine_s += time.perf_counter() - self._since


CLOCK: ContextVar[TurnClock | None] = ContextVar("tokentrue_turn_clock", default=None)


class MeteredProvider(Streaming):
    """Measures the engine's time; sets the version of /admin/version if the engine reports none."""

    def __init__(self, inner: EngineControl) -> None:
        self.inner = inner
        self.version = UNVERSIONED
        self._adapting = inner if isinstance(inner, Adapting) else None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def truthful_filters(self) -> frozenset[str] | None:
        return self.inner.truthful_filters

    @property
    def bans_tokens(self) -> bool:
        return self.inner.bans_tokens

    @property
    def adapters(self) -> Sequence[str]:
        return () if self._adapting is None else self._adapting.adapters

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False, **images: Any
    ) -> AsyncIterator[Chunk]:
        clock = CLOCK.get() or TurnClock()
        seen: list[tuple[int, int]] = []  # (tokens, version noted when they came)
        stream: Any = self.inner.stream(prompt_ids, sampling, session=session, whole=whole, **images)
        async with aclosing(stream) as chunks:
            while True:
                clock.enter_engine()
                try:
                    chunk: Chunk | None = await anext(chunks, None)
                finally:
                    clock.leave_engine()
                if chunk is None:
                    return
                if chunk.token_ids:
                    seen.append((len(chunk.token_ids), self.version))
                    if self.version != chunk.policy_version == UNVERSIONED:
                        chunk = replace(chunk, policy_version=self.version)
                if chunk.final is not None and self.version != UNVERSIONED:
                    chunk = replace(chunk, final=self._stamp(chunk.final, seen))
                yield chunk

    def _stamp(self, completion: Completion, seen: list[tuple[int, int]]) -> Completion:
        if any(span.version != UNVERSIONED for span in completion.versions):
            return completion
        total = len(completion.token_ids)
        if sum(count for count, _ in seen) != total:
            seen = [(total, self.version)]
        return replace(completion, versions=spans_from_runs(seen))

    async def check_images(self) -> None:
        await check_engine(self.inner)

    async def health(self) -> JsonMapping:
        return await self.inner.health()

    async def close(self) -> None:
        await self.inner.close()


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        named: Any = {"namespace": "tokentrue", "registry": self.registry}
        count, gauge, time = partial(Counter, **named), partial(Gauge, **named), partial(Histogram, **named)
        self.turns = count("turns", "Committed turns.", ["dialect", "streamed"])
        self.errors = count("errors", "Refused or failed requests.", ["dialect", "code"])
        self.tokens = count("tokens", "Tokens: prompt (sent), given (new of them), sampled.", ["kind"])
        self.trained = gauge("session_tokens", "Of the sessions seen: tokens sampled, trained.", ["kind"])
        self.untrained = gauge("untrained_tokens", "Sampled tokens that no sample trains.", ["why"])
        self.forks = count("forks", "Turns that began a root or a fork.", ["reason"])
        self.projections = count("projections", "How replayed history matched.", ["projection"])
        self.replays = count("replays", "Requests answered from the record or by an equal turn in flight.")
        self.added = time("added_latency_seconds", "Time per turn outside of the engine.", ["dialect"], buckets=SECONDS)
        self.turn_time = time("turn_seconds", "Time per turn, engine included.", buckets=LONG_SECONDS)
        self.first = time("first_byte_seconds", "Time to the first streamed byte.", buckets=LONG_SECONDS)
        self.in_flight = gauge("in_flight", "Generations in flight.")
        self.sessions = gauge("live_sessions", "Sessions in memory.")
        self.session_bytes = gauge("live_session_bytes", "Memory of the sessions in memory, an estimate.")
        self.paused = gauge("paused", "1 while generation is paused.")
        self.version = gauge("policy_version", "The newest policy version noted.")
        for kind in ("prompt", "given", "sampled"):  # shown as 0 before the first turn
            self.tokens.labels(kind)

    def note_turn(self, dialect: str, reply: Reply, sampled: int, clock: TurnClock, *, streamed: bool) -> float | None:
        """The seconds outside of the engine; None for a reply from the record, which may have waited for another's
        call."""
        total_s = time.perf_counter() - clock.started
        self.turn_time.observe(total_s)
        if clock.first_byte is not None:
            self.first.observe(clock.first_byte - clock.started)
        if reply.from_record:
            self.replays.inc()
            return None
        added_s = total_s - clock.engine_s
        self.added.labels(dialect).observe(added_s)
        self.turns.labels(dialect, streamed).inc()
        self.projections.labels(reply.projection).inc()
        if reply.edge_reason not in (None, "first"):
            self.forks.labels(reply.edge_reason).inc()
        for kind, tokens in (("prompt", reply.prompt_tokens), ("given", reply.given_tokens), ("sampled", sampled)):
            self.tokens.labels(kind).inc(tokens)
        return added_s

    def measure(self, admission: AdmissionGate, sessions: SessionRegistry, totals: CoverageTotals) -> None:
        self.in_flight.set(admission.in_flight)
        self.sessions.set(len(sessions))
        self.session_bytes.set(sessions.memory_bytes)
        self.trained.labels("sampled").set(totals.sampled)
        self.trained.labels("trained").set(totals.trained)
        for why, tokens in totals.untrained.items():
            self.untrained.labels(why).set(tokens)


def engine_families(engine: Measured) -> list[Metric]:
    return [
        GaugeMetricFamily(f"tokentrue_engine_{name}", f"Embedded engine: {name.replace('_', ' ')}.", value=float(value))
        for name, value in engine.metrics().items()
    ]


def build_page(families: Iterable[Metric]) -> bytes:
    merged: dict[str, Metric] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for family in families:
        if family.name == COVERAGE:
            continue  # a worker's own
        merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            key = (family.name, sample.name, tuple(sorted(sample.labels.items())))
            before = values.get(key, 0.0)
            values[key] = max(before, sample.value) if family.name in LARGEST else before + sample.value
    for (family_name, name, labels), value in values.items():
        if not name.endswith("_created"):
            merged[family_name].add_sample(name, dict(labels), value)
    tokens = "tokentrue_session_tokens"
    sampled, trained = (values.get((tokens, tokens, (("kind", kind),)), 0.0) for kind in ("sampled", "trained"))
    ratio = trained / sampled if sampled else 1.0
    shown = GaugeMetricFamily(COVERAGE, "Trained sampled tokens over sampled tokens.", value=ratio)
    page: Any = SimpleNamespace(collect=lambda: [*merged.values(), shown])
    return generate_latest(page)
