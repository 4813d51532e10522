"""Where a rollout's sessions come from: a gateway that runs already, or one started in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from tokentrue.cli.rollout_run import RolloutRun
from tokentrue.cli.wiring import ADMIN_KEY, ServeConfig, ServerConfig
from tokentrue.environments.http import GatewaySessions


@contextlib.asynccontextmanager
async def open_sessions(settings: RolloutRun) -> AsyncIterator[GatewaySessions]:
    sampling = settings.rollout.sampling
    if settings.url is not None:
        async with GatewaySessions(settings.url, sampling=sampling, admin_key=os.environ.get(ADMIN_KEY)) as sessions:
            yield sessions
        return
    from tokentrue.cli.embedded import embedded_gateway

    store = settings.store or f"sqlite:{settings.out / 'sessions.sqlite'}"
    serve = ServeConfig(model=settings.model, engine=settings.engine, server=ServerConfig(port=0, store=store))
    async with (
        embedded_gateway(serve) as here,
        GatewaySessions(here.base_url, sampling=sampling, admin_key=here.admin_key) as sessions,
    ):
        yield sessions
