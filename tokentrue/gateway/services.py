import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokentrue.gateway.admission import AdmissionGate
from tokentrue.gateway.asgi import BodyBudget
from tokentrue.gateway.auth import ApiKeys
from tokentrue.gateway.config import GatewayConfig
from tokentrue.gateway.metrics import MeteredProvider, Metrics
from tokentrue.gateway.serving.forwarding import Peers
from tokentrue.gateway.serving.processes import AdminState
from tokentrue.gateway.sessions import SessionRegistry, fit_in_memory
from tokentrue.protocols import EngineControl, Renderer
from tokentrue.sessions.journal import Journal
from tokentrue.turn import Session

RendererFor = Callable[[str], Renderer]


class Services:
    def __init__(
        self,
        *,
        config: GatewayConfig,
        renderer_for: RendererFor,
        provider: EngineControl,
        journal: Journal,
        peers: Peers,
        admin_state: AdminState,
    ) -> None:
        self.config = replace(config, session_limits=fit_in_memory(config.session_limits, config.limits))
        self.renderer_for, self.journal, self.peers, self.admin_state = renderer_for, journal, peers, admin_state
        self.provider = MeteredProvider(provider)
        self.keys = ApiKeys(admin_key=config.admin_key)
        self.admission = AdmissionGate(config)
        self.bodies = BodyBudget(config.limits.bodies_bytes)
        self.metrics = Metrics()
        self.sessions = SessionRegistry(self._open_session, config.limits, journal)

    async def _open_session(self, session_id: str) -> Session:
        self.peers.require_own(session_id)
        record = await asyncio.to_thread(self.journal.get, session_id)
        return await Session.open(
            self.journal,
            session_id,
            renderer=self.renderer_for(record.history),
            provider=self.provider,
            limits=self.config.session_limits,
            images=self.config.images,
        )

    def new_session(self, session_id: str, **settings: Any) -> Session:
        for name in ("history", "training", "pin", "side_requests"):
            if settings.get(name) is None:
                settings[name] = getattr(self.config, name)
        return Session(
            session_id=session_id,
            renderer=self.renderer_for(settings["history"]),
            provider=self.provider,
            journal=self.journal,
            limits=self.config.session_limits,
            images=self.config.images,
            **settings,
        )

    def set_paused(self, paused: bool) -> None:
        self.admin_state.paused = paused
        self.restore_admin_state(has_weights=False)

    def set_version(self, version: int) -> None:
        self.admin_state.version = version
        self.restore_admin_state()

    def restore_admin_state(self, *, has_weights: bool = True) -> None:
        """`has_weights`: the engine has the weights of that version."""
        paused = self.admin_state.paused
        for gate in (self.admission, self.provider.inner):
            if paused:
                gate.pause()
            else:
                gate.resume()
        self.metrics.paused.set(paused)
        if has_weights:
            self.provider.version = self.admin_state.version
            self.metrics.version.set(self.admin_state.version)
