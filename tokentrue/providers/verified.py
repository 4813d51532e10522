"""Exactness over any engine: it proposes tokens, and the trainer's forward pass verifies them.

A chunk of proposed tokens is scored in one exact forward over the whole sequence, and every position is drawn again
from the trainer's logits with the exact engine's counter-based Gumbel noise. The longest agreeing prefix is accepted,
the first disagreement is replaced by the trainer's draw, and the proposer continues from there. So tokens and
log-probabilities equal the exact engine's with the same seed, for any proposer; a poor proposer costs time, never
exactness. `accepted / proposed` measures it.

The proposer should propose what the trainer would draw: with the same noise if it is ours, else greedily
(temperature 0) or by its own sampling, where agreement is a matter of probability.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokentrue.engine import ExactEngine
from tokentrue.engine.proof import redraw
from tokentrue.engine.request import Sampled, mask_of
from tokentrue.errors import SamplingError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Provider, Streaming, WeightSink
from tokentrue.types import TRUNCATIONS, UNVERSIONED, Chunk, Completion, Finish, Ids, Sampling, spans_from_runs

CHUNK = 32


@dataclass(slots=True)
class Acceptance:
    """Totals since construction."""

    proposed: int = 0
    accepted: int = 0
    rounds: int = 0

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
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        request = self.engine.request(prompt_ids, replace(sampling, seed=seed))
        draws: list[Sampled] = []
        versions: list[int] = []
        finish, by = Finish.LENGTH, None
        while len(draws) < request.max_tokens and finish is Finish.LENGTH:
            room = min(self.chunk, request.max_tokens - len(draws))
            ids = [*prompt_ids, *(d.token_id for d in draws)]
            proposed = await self.propose(ids, replace(sampling, seed=seed), room, session)
            found, version = await asyncio.to_thread(self.verify, ids, proposed, sampling, seed)
            self.count(proposed, found)
            for draw in found[: request.max_tokens - len(draws)]:
                draws.append(draw)
                versions.append(version)
                mask = mask_of([draw.kept]) if sampling.truncates else None
                yield Chunk(
                    token_ids=TokenIds((draw.token_id,)),
                    logprobs=(draw.logprob,),
                    policy_version=version,
                    sampling_mask=mask,
                )
                if draw.token_id in request.stop_ids:
                    finish, by = Finish.STOP, draw.token_id
                    break
        yield Chunk(final=self.completion(TokenIds(prompt_ids), sampling, draws, versions, finish, by))

    async def propose(self, ids: list[int], sampling: Sampling, room: int, session: str | None) -> list[int]:
        asked = replace(sampling, max_tokens=room, top_logprobs=0, extra={})
        return list((await self.proposer.generate(ids, asked, session=session)).token_ids)

    def verify(self, ids: list[int], proposed: list[int], sampling: Sampling, seed: int) -> tuple[list[Sampled], int]:
        # Runs between two engine steps, so that no weight load falls into it.
        with self.engine.paused():
            core = self.engine.core
            drawn = redraw(core.forward, core.model, ids, proposed, sampling, seed, capacity=core.capacity)
            return drawn, self.engine.version

    def count(self, proposed: list[int], found: list[Sampled]) -> None:
        agreed = sum(draw.token_id == token for draw, token in zip(found, proposed, strict=False))
        self.acceptance.proposed += len(proposed)
        self.acceptance.accepted += agreed
        self.acceptance.rounds += 1

    def completion(
        self,
        prompt_ids: TokenIds,
        sampling: Sampling,
        draws: list[Sampled],
        versions: list[int],
        finish: Finish,
        by: int | None,
    ) -> Completion:
        return Completion(
            token_ids=TokenIds(d.token_id for d in draws),
            logprobs=tuple(d.logprob for d in draws),
            finish=finish,
            versions=spans_from_runs((1, version) for version in versions),
            prompt_tokens=len(prompt_ids),
            stopped_by=by,
            top_logprobs=tuple(d.top or {} for d in draws) if sampling.top_logprobs else None,
            raw_logprobs=tuple(d.raw_logprob for d in draws) if sampling.filters else None,
            sampling_mask=mask_of([d.kept for d in draws]) if sampling.truncates else None,
            fingerprint=self.engine.fingerprint,
            prompt_digest=prompt_ids.sha256(),
        )

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Publishes to the verifier, and to the proposer if it accepts weights; a proposer with old ones is only
        slower."""
        pairs = list(weights)
        await self.engine.publish(dict(pairs), version=version)
        if isinstance(self.proposer, WeightSink):
            await self.proposer.publish(pairs, version=version)

    async def health(self) -> JsonMapping:
        facts = await self.proposer.health()
        return {
            "engine": self.name,
            "version": self.engine.version,
            "fingerprint": self.engine.fingerprint,
            "proposer": facts,
            "acceptance": self.acceptance.rate,
        }

    async def close(self) -> None:
        await self.proposer.close()
        self.engine.close()
