"""What the handlers of requests share: one record, built once per process and given to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokentrue.gateway.admission import AdmissionGate
from tokentrue.gateway.asgi import BodyBudget
from tokentrue.gateway.auth import ApiKeys
from tokentrue.gateway.config import GatewayConfig
from tokentrue.gateway.metrics.meter import MeteredProvider
from tokentrue.gateway.metrics.registry import Metrics
from tokentrue.gateway.serving.forwarding import Peers
from tokentrue.gateway.serving.processes import AdminState
from tokentrue.gateway.sessions import SessionRegistry, fit_in_memory
from tokentrue.protocols import EngineControl, Renderer
from tokentrue.sessions.journal import Journal
from tokentrue.turn import Session
from tokentrue.types import UNVERSIONED

RendererFor = Callable[[str], Renderer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """`renderer_for` gives the renderer of a history policy ("keep" or "template")."""

    config: GatewayConfig
    journal: Journal
    renderer_for: RendererFor
    provider: MeteredProvider
    keys: ApiKeys
    admission: AdmissionGate
    bodies: BodyBudget
    metrics: Metrics
    sessions: SessionRegistry
    admin_state: AdminState
    peers: Peers

    def new_default_session(self, session_id: str) -> Session:
        """A session that is created by the first request under its name. It has no key of its own."""
        config = self.config
        return self.new_session(session_id=session_id, history=config.history, training=config.training, pin=config.pin)

    def new_session(self, **settings: Any) -> Session:
        renderer = self.renderer_for(settings.get("history", self.config.history))
        limits = self.config.session_limits
        return Session(renderer=renderer, provider=self.provider, journal=self.journal, limits=limits, **settings)

    # What the administrator sets.
    def set_paused(self, paused: bool) -> None:
        """On this worker, and on processes that start later."""
        self.admin_state.paused = paused
        self._apply_pause(paused)

    def set_version(self, version: int) -> None:
        """On this worker, and on processes that start later."""
        self.admin_state.version = version
        self._apply_version(version)

    def restore_admin_state(self, *, has_weights: bool = True) -> None:
        """A process that starts takes what is set. It writes nothing: an administrator may set something else
        meanwhile. `has_weights`: the engine has kept its weights, so that their version holds."""
        self._apply_pause(self.admin_state.paused)
        if has_weights and self.admin_state.version != UNVERSIONED:
            self._apply_version(self.admin_state.version)

    def _apply_pause(self, paused: bool) -> None:
        for gate in (self.admission, self.provider.inner):
            if paused:
                gate.pause()
            else:
                gate.resume()
        self.metrics.paused.set(paused)

    def _apply_version(self, version: int) -> None:
        self.provider.version = version
        self.metrics.version.set(version)


def build_services(
    *,
    config: GatewayConfig,
    renderer_for: RendererFor,
    provider: EngineControl,
    journal: Journal,
    peers: Peers,
    admin_state: AdminState,
) -> Services:
    metered = MeteredProvider(provider)
    config = replace(config, session_limits=fit_in_memory(config.session_limits, config.limits))

    async def open_session(session_id: str) -> Session:
        peers.require_own(session_id)
        record = await asyncio.to_thread(journal.get, session_id)
        renderer = renderer_for(record.history)
        return await Session.open(
            journal, session_id, renderer=renderer, provider=metered, limits=config.session_limits
        )

    return Services(
        config=config,
        journal=journal,
        renderer_for=renderer_for,
        provider=metered,
        keys=ApiKeys(admin_key=config.admin_key),
        admission=AdmissionGate(config),
        bodies=BodyBudget(config.limits.bodies_bytes),
        metrics=Metrics(),
        sessions=SessionRegistry(
            open_session, config.limits, journal.read_secret("reasoning"), lambda: journal.lease_number
        ),
        admin_state=admin_state,
        peers=peers,
    )
