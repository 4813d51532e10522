"""Exactness over any engine: it proposes tokens, and the trainer's forward pass draws every position again.

The longest agreeing prefix is accepted, the first disagreement is replaced, and the proposer continues from there. So
tokens and log-probabilities equal the exact engine's with the same seed; a poor proposer costs time, never exactness.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokentrue.engine import ExactEngine
from tokentrue.engine.proof import redraw
from tokentrue.engine.schedule import Sampled
from tokentrue.errors import SamplingError
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Provider, Streaming, WeightSink
from tokentrue.types import TRUNCATIONS, UNVERSIONED, Chunk, Finish, Ids, Sampling

CHUNK = 32


@dataclass(slots=True)
class Acceptance:
    """Totals since construction."""

    proposed: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0


class VerifiedProvider(Streaming):
    name = "verified"
    truthful_filters = frozenset(TRUNCATIONS)

    def __init__(
        self,
        proposer: Provider,
        model: str | Path | Any,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        version: int = UNVERSIONED,
        chunk: int = CHUNK,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.proposer = proposer
        self.engine = ExactEngine(model, device=device, dtype=dtype, version=version, read=decode)
        self.chunk = chunk
        self.acceptance = Acceptance()

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        if sampling.stop or set(sampling.filters) - self.truthful_filters:
            raise SamplingError(
                "the verified provider takes stop_token_ids, top_k, top_p and min_p; no stop strings and no penalties"
            )
        request = self.engine.request(prompt_ids, sampling)
        request.wants_prompt = False  # only sampled tokens are verified
        sampling = replace(sampling, seed=request.seed)
        while request.finish is None:
            room = min(self.chunk, request.max_tokens - request.num_sampled)
            asked = replace(sampling, max_tokens=room, top_logprobs=0, extra={})
            proposed = list((await self.proposer.generate(request.tokens, asked, session=session)).token_ids)
            drawn, version = await asyncio.to_thread(self._verify, request.tokens, proposed, sampling)
            self.acceptance.proposed += len(proposed)
            self.acceptance.accepted += sum(d.token_id == token for d, token in zip(drawn, proposed, strict=False))
            sent = request.num_sampled
            for draw in drawn:
                request.take(draw, version)
                if draw.token_id in request.stop_ids:
                    request.finish, request.stopped_by = Finish.STOP, draw.token_id
                elif request.num_sampled == request.max_tokens:
                    request.finish = Finish.LENGTH
                if request.finish is not None:
                    break
            for chunk in request.chunks(sent):
                yield chunk
        yield Chunk(final=self.engine.result(request))

    def _verify(self, ids: Sequence[int], proposed: list[int], sampling: Sampling) -> tuple[list[Sampled], int]:
        # Runs between two engine steps, so that no weight load falls into it.
        with self.engine.paused():
            local, seed, most = self.engine.core.local, sampling.seed or 0, self.engine.core.capacity
            drawn = redraw(local.forward, local.model, ids, proposed, sampling, seed, capacity=most)
            return drawn, self.engine.version

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Publishes to the verifier, and to the proposer if it accepts weights; a proposer with old ones is only
        slower."""
        pairs = list(weights)
        await self.engine.publish(dict(pairs), version=version)
        if isinstance(self.proposer, WeightSink):
            await self.proposer.publish(pairs, version=version)

    async def health(self) -> JsonMapping:
        return {
            "engine": self.name,
            "version": self.engine.version,
            "fingerprint": self.engine.fingerprint,
            "proposer": await self.proposer.health(),
            "acceptance": self.acceptance.rate,
        }

    async def close(self) -> None:
        await self.proposer.close()
        self.engine.close()
