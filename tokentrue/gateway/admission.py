"""Admission of generations: the limit on generations in flight, and the pause while weights change.

A paused gateway holds generations back instead of failing them: to the harness a weight update looks like a slow token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from tokentrue.gateway.config import GatewayConfig
from tokentrue.gateway.problems import HttpError


class AdmissionGate:
    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self.waiting = 0
        self.closing = False

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def close(self) -> None:
        """Shutting down: nothing more is admitted, and what waits is refused."""
        self.closing = True
        self._open.set()

    async def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight; False where that takes longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @contextmanager
    def admit(self) -> Generator[None, None, None]:
        """One generation, after `wait_for_resume`; refused when the gateway is closing or full."""
        if self.closing:
            raise HttpError(503, "shutting_down", "the gateway is shutting down; send this again", retry_after_s=1.0)
        if self.in_flight >= self._config.limits.in_flight:
            raise HttpError(
                429, "too_many_in_flight", f"{self.in_flight} generations are in flight; try again", retry_after_s=1.0
            )
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def wait_for_resume(self) -> None:
        if not self.paused:
            return
        if self.waiting + self.in_flight >= self._config.limits.in_flight:
            raise HttpError(
                429, "too_many_in_flight", "paused, and enough generations wait; try again", retry_after_s=5.0
            )
        self.waiting += 1
        try:
            await asyncio.wait_for(self._open.wait(), self._config.pause_wait_s)
        except TimeoutError:
            raise HttpError(
                503, "paused", "generation is paused by the administrator; try again", retry_after_s=10.0
            ) from None
        finally:
            self.waiting -= 1
