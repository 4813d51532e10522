"""Rollouts without HTTP: sessions in this process, in memory, with a renderer and a provider instead of a gateway."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from tokentrue.environments import Plan, session_settings
from tokentrue.protocols import Provider, Renderer
from tokentrue.samples import coverage_to_json, sample_to_json
from tokentrue.sessions.client import InProcessClient
from tokentrue.turn import Session


class LocalSession:
    """One `tt.Session` with the in-process client."""

    def __init__(self, session: Session) -> None:
        self.session_id = session.id
        self.client = InProcessClient(session)
        self._session = session

    async def finish(self, reward: float) -> tuple[Sequence[Any], Mapping[str, Any]]:
        await self._session.reward(reward)
        made = await self._session.assembly()
        return [sample_to_json(sample) for sample in made.samples], coverage_to_json(made.coverage)


class LocalSessions:
    def __init__(self, renderer: Renderer, provider: Provider, *, sampling: Mapping[str, Any]) -> None:
        self._renderer, self._provider, self._sampling = renderer, provider, dict(sampling)

    @contextlib.asynccontextmanager
    async def open(self, plan: Plan) -> AsyncGenerator[LocalSession, None]:
        settings = session_settings(plan, self._sampling)
        yield LocalSession(Session(renderer=self._renderer, provider=self._provider, session_id=plan.key, **settings))
