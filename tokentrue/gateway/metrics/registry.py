"""Prometheus metrics of one process, and the merged page of several."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokentrue.gateway.admission import AdmissionGate
from tokentrue.gateway.sessions import CoverageTotals, SessionRegistry
from tokentrue.protocols import Measured
from tokentrue.types import Reply

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
LONG_SECONDS = (0.01, 0.05, 0.25, 1, 5, 15, 60, 300, 1200)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        named: Any = {"namespace": "tokentrue", "registry": self.registry}
        count, gauge, time = partial(Counter, **named), partial(Gauge, **named), partial(Histogram, **named)
        self.turns = count("turns", "Committed turns.", ["dialect", "streamed"])
        self.errors = count("errors", "Refused or failed requests.", ["dialect", "code"])
        self.tokens = count("tokens", "Tokens: prompt (sent), given (new of them), sampled.", ["kind"])
        self.prompt_tokens, self.given_tokens, self.sampled_tokens = (
            self.tokens.labels(kind) for kind in ("prompt", "given", "sampled")
        )
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

    def note_turn(self, dialect: str, reply: Reply, sampled: int, *, streamed: bool) -> None:
        """Counts a turn of `sampled` tokens, or a reply from the record; `reply` is its first choice."""
        if reply.from_record:
            self.replays.inc()
            return
        self.turns.labels(dialect, streamed).inc()
        self.projections.labels(reply.projection).inc()
        if reply.edge_reason not in (None, "first"):
            self.forks.labels(reply.edge_reason).inc()
        self.prompt_tokens.inc(reply.prompt_tokens)
        self.given_tokens.inc(reply.given_tokens)
        self.sampled_tokens.inc(sampled)

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


COVERAGE = "tokentrue_coverage_ratio"
LARGEST = {"tokentrue_paused", "tokentrue_policy_version"}  # the rest adds up over workers


def build_page(families: Iterable[Metric]) -> bytes:
    """Text page for one worker or several; families of the same name are summed."""
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
    ratio = GaugeMetricFamily(
        COVERAGE, "Trained sampled tokens over sampled tokens.", value=trained / sampled if sampled else 1.0
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FixedFamilies([*merged.values(), ratio]))
    return generate_latest(registry)


class FixedFamilies(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
