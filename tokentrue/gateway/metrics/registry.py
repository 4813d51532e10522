"""Prometheus metrics of one worker, and how those of several become one page.

Coverage is computed from sums over sessions when the page is made, so workers add up.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        registry = self.registry
        self.turns = Counter("tokentrue_turns", "Committed turns.", ["dialect", "streamed"], registry=registry)
        self.errors = Counter("tokentrue_errors", "Refused or failed requests.", ["dialect", "code"], registry=registry)
        self.tokens = Counter(
            "tokentrue_tokens", "Tokens: prompt (sent), given (new of them), sampled.", ["kind"], registry=registry
        )
        self.prompt_tokens, self.given_tokens, self.sampled_tokens = (
            self.tokens.labels(kind) for kind in ("prompt", "given", "sampled")
        )
        self.trained = Gauge(
            "tokentrue_session_tokens", "Of the sessions seen: tokens sampled, trained.", ["kind"], registry=registry
        )
        self.untrained = Gauge(
            "tokentrue_untrained_tokens", "Sampled tokens that no sample trains.", ["why"], registry=registry
        )
        self.forks = Counter("tokentrue_forks", "Turns that began a root or a fork.", ["reason"], registry=registry)
        self.projections = Counter(
            "tokentrue_projections", "How replayed history matched.", ["projection"], registry=registry
        )
        self.replays = Counter(
            "tokentrue_replays", "Requests answered from the record or by an equal turn in flight.", registry=registry
        )
        self.added = Histogram(
            "tokentrue_added_latency_seconds",
            "Time per turn outside of the engine.",
            ["dialect"],
            buckets=SECONDS,
            registry=registry,
        )
        self.turn_time = Histogram(
            "tokentrue_turn_seconds", "Time per turn, engine included.", buckets=LONG_SECONDS, registry=registry
        )
        self.first = Histogram(
            "tokentrue_first_byte_seconds", "Time to the first streamed byte.", buckets=LONG_SECONDS, registry=registry
        )
        self.in_flight = Gauge("tokentrue_in_flight", "Generations in flight.", registry=registry)
        self.sessions = Gauge("tokentrue_live_sessions", "Sessions in memory.", registry=registry)
        self.session_bytes = Gauge(
            "tokentrue_live_session_bytes", "Memory of the sessions in memory, an estimate.", registry=registry
        )
        self.paused = Gauge("tokentrue_paused", "1 while generation is paused.", registry=registry)
        self.version = Gauge("tokentrue_policy_version", "The newest policy version noted.", registry=registry)

    def note_turn(self, dialect: str, reply: Reply, sampled: int, *, streamed: bool) -> None:
        """Counts a turn of `sampled` tokens that was committed for this request, or an answer that needed none. `reply`
        is the first of its choices."""
        if reply.replayed:
            self.replays.inc()
            return
        self.turns.labels(dialect, streamed).inc()
        self.projections.labels(reply.projection).inc()
        if reply.root not in (None, "first"):
            self.forks.labels(reply.root).inc()
        self.prompt_tokens.inc(reply.prompt_tokens)
        self.given_tokens.inc(reply.given_tokens)
        self.sampled_tokens.inc(sampled)

    def measure(self, admission: AdmissionGate, sessions: SessionRegistry, totals: CoverageTotals) -> None:
        """Sets the gauges of what there is now."""
        self.in_flight.set(admission.in_flight)
        self.sessions.set(len(sessions))
        self.session_bytes.set(sessions.memory_bytes)
        self.trained.labels("sampled").set(totals.sampled)
        self.trained.labels("trained").set(totals.trained)
        for why, tokens in totals.untrained.items():
            self.untrained.labels(why).set(tokens)


def engine_families(engine: Measured) -> list[Metric]:
    """The figures of an embedded engine (first-token time, tokens per second, cache use, prefix hits …), as gauges."""
    return [
        GaugeMetricFamily(f"tokentrue_engine_{name}", f"Embedded engine: {name.replace('_', ' ')}.", value=float(value))
        for name, value in engine.metrics().items()
    ]


COVERAGE = "tokentrue_coverage_ratio"
LARGEST = {"tokentrue_paused", "tokentrue_policy_version"}  # the rest adds up over workers


def build_page(families: Iterable[Metric]) -> bytes:
    """The text page of the families of one worker or several: those of one name are added up."""
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
