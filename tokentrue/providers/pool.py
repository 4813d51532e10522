"""Several replicas of one engine as one Provider: sticky by session, health-checked, with failover.

Token ids are sent, so any replica continues any session exactly; stickiness only preserves the prefix cache. A
generation that breaks off (a crash, an abort for a weight update) is resumed from the tokens received, on this
replica or another: spans keep their policy versions, and no token is sampled twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from tokentrue.errors import ConfigError, EngineContractError, EngineError, EngineTimeout, EngineUnreachable
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Adapting, Interruptible, Measured, Provider, Rejoining, Streaming, WeightSink
from tokentrue.providers.building import CompletionBuilder
from tokentrue.routing_replay import join_masks_if_whole, join_routing
from tokentrue.types import UNVERSIONED, Chunk, Completion, Finish, Ids, RoutedExperts, Sampling, spans_from_runs

RESUMABLE = (EngineUnreachable, EngineTimeout)


class Pool(Streaming):
    """A Provider and an EngineControl. `pause()` holds new and aborted generations until `resume()`.

    A generation is resumed at most `resumptions` times, and after failures only within `give_up_s` of its start.
    """

    def __init__(
        self,
        replicas: Sequence[Provider],
        *,
        check_every_s: float = 5.0,
        resumptions: int = 8,
        give_up_s: float = 600.0,
    ) -> None:
        if not replicas:
            raise ConfigError("a pool needs at least one engine")
        self._replicas = list(replicas)
        self._adapting = [replica for replica in replicas if isinstance(replica, Adapting)]
        self._down: set[int] = set()  # failed replicas; each gets the weights again before it is used
        self._restoring = asyncio.Lock()
        self._stale: set[int] = set()  # replicas that missed the last publication
        self._not_paused = asyncio.Event()
        self._not_paused.set()
        self._check_every_s, self._resumptions, self._give_up_s = check_every_s, resumptions, give_up_s
        self._checker: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._replicas[0].name

    @property
    def truthful_filters(self) -> frozenset[str] | None:
        """The filters that are truthful at every replica that has reported."""
        known = [filters for replica in self._replicas if (filters := replica.truthful_filters) is not None]
        return known[0].intersection(*known) if known else None

    @property
    def adapters(self) -> Sequence[str]:
        if len(self._adapting) < len(self._replicas):
            return ()
        first, *others = (set(replica.adapters) for replica in self._adapting)
        return sorted(first.intersection(*others))

    def pause(self) -> None:
        self._not_paused.clear()

    def resume(self) -> None:
        self._not_paused.set()

    def metrics(self) -> Mapping[str, float]:
        """Metrics of an embedded engine; remote engines have their own metrics pages."""
        only = self._replicas[0] if len(self._replicas) == 1 else None
        return only.metrics() if isinstance(only, Measured) else {}

    async def interrupt(self) -> int:
        """Pauses, and aborts generations at engines that must be idle to load weights. Returns how many were aborted.

        They continue after `resume()` from the tokens received. An engine that loads weights between two tokens is
        not interrupted.
        """
        self.pause()
        return sum(
            await asyncio.gather(
                *(replica.interrupt() for replica in self._replicas if isinstance(replica, Interruptible))
            )
        )

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        generation = _Generation(TokenIds(prompt_ids), sampling)
        while generation.rest is not None:
            index = await self._wait_for_replica(session)
            got, final = list[Chunk](), None
            try:
                if index in self._down:
                    await self._restore(index)
                source: Any = self._replicas[index].stream(
                    generation.ids, generation.rest, session=session, whole=whole
                )
                async with aclosing(source) as chunks:
                    async for chunk in chunks:
                        if chunk.final is None:
                            got.append(chunk)
                            yield chunk
                        else:
                            final = chunk.final
            except RESUMABLE:
                generation.add(_pieces(got, generation.ids))
                if not self._note_failure(index, generation) and not generation.is_over:
                    raise
            else:
                self._accept_piece(index, generation, final)
        yield Chunk(final=generation.join())

    async def health(self) -> JsonMapping:
        """Queries every replica; raises if none responds."""
        answers = await asyncio.gather(*(replica.health() for replica in self._replicas), return_exceptions=True)
        failed = {i for i, answer in enumerate(answers) if isinstance(answer, BaseException)}
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer
        back = (self._down | self._stale) - failed
        self._down |= failed
        for i in sorted(back):
            with contextlib.suppress(EngineError):
                await self._restore(i)
        alive = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not alive:
            raise EngineUnreachable(f"no engine is reachable (tried {len(answers)}): {answers[0]}")
        return {**alive[0], "replicas": len(answers), "healthy": len(alive)}

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Generations wait meanwhile."""
        sinks = [replica for replica in self._replicas if isinstance(replica, WeightSink)]
        if len(sinks) != len(self._replicas):
            raise ConfigError(f"engine {self.name!r} takes no weights")
        kept = weights if len(sinks) == 1 else await asyncio.to_thread(copy_to_cpu, weights)
        self.pause()
        try:
            results = await asyncio.gather(
                *(sink.publish(kept, version=version) for sink in sinks), return_exceptions=True
            )
        finally:
            self.resume()
        self._note_publication(results)

    def _note_publication(self, results: Sequence[BaseException | None]) -> None:
        """Excludes unreachable replicas until they have the weights; raises if a replica refused them."""
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, (EngineUnreachable, EngineTimeout)):
                raise result
        self._stale = {i for i, result in enumerate(results) if result is not None}
        if len(self._stale) == len(self._replicas):
            raise EngineUnreachable(f"no engine took the weights (tried {len(results)}): {results[0]}")

    @property
    def in_use(self) -> list[Provider]:
        return [replica for i, replica in enumerate(self._replicas) if i not in self._stale]

    async def _restore(self, index: int) -> None:
        """Publishes to a replica that failed or missed a publication."""
        # It may have restarted with its initial weights.
        replica = self._replicas[index]
        async with self._restoring:
            if index not in self._down | self._stale:
                return
            if isinstance(replica, Rejoining):
                await replica.rejoin()
                self._stale.discard(index)
            self._down.discard(index)

    async def close(self) -> None:
        if self._checker is not None:
            self._checker.cancel()
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def watch(self) -> None:
        """Starts health checks; a recovered replica gets its sessions back."""
        self._checker = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._check_every_s)
            try:
                await self.health()
            except EngineError:
                continue  # all down: the next generation reports it to its caller

    def order(self, session: str | None) -> list[int]:
        """Replicas by rendezvous hashing, healthy ones first: losing one moves only its sessions."""
        if len(self._replicas) == 1:
            return [0]
        current = [i for i in range(len(self._replicas)) if i not in self._stale]
        ranked = sorted(current, key=lambda i: _rendezvous_hash(session, i), reverse=True)
        return [i for i in ranked if i not in self._down] + [i for i in ranked if i in self._down]

    def _choose(self, session: str | None) -> int:
        order = self.order(session)
        if not order:
            raise EngineUnreachable(
                "no engine has the weights that were published last; publish again, or restart the engines"
            )
        return order[0]

    async def _wait_for_replica(self, session: str | None) -> int:
        await self._not_paused.wait()
        return self._choose(session)

    def _note_failure(self, index: int, generation: _Generation) -> bool:
        """True if the generation may be resumed."""
        self._down.add(index)
        generation.failures += 1
        most = len(self._replicas) + (self._resumptions if generation.done else 0)
        return generation.failures < most and time.monotonic() <= generation.started + self._give_up_s

    def _accept_piece(self, index: int, generation: _Generation, final: Completion | None) -> None:
        """The generation continues only if it was aborted."""
        if final is None:
            raise EngineContractError(f"{self.name} ended a stream without its final answer")
        if final.prompt_digest not in (None, generation.ids.sha256()):
            raise EngineContractError(f"{self.name} was sent other ids than the prompt")
        self._down.discard(index)
        is_last = self._not_paused.is_set() and len(generation.done) >= self._resumptions
        generation.add([final], is_over=final.finish is not Finish.ABORT or is_last)


class _Generation:
    """One generation across aborts and failures. `done`: the pieces sampled so far. `ids`, `rest`: prompt and
    settings for the remainder; `rest` is None when the generation is over. `end`: the finish of one that broke off
    right at a stop token or its token limit."""

    def __init__(self, prompt_ids: TokenIds, sampling: Sampling) -> None:
        self._prompt_ids, self._sampling = prompt_ids, sampling
        self.ids, self.rest = prompt_ids, cast("Sampling | None", sampling)
        self.done: list[Completion] = []
        self.failures, self.started, self.end = 0, time.monotonic(), cast("Finish | None", None)

    @property
    def is_over(self) -> bool:
        return self.rest is None

    def add(self, pieces: Sequence[Completion], *, is_over: bool = False) -> None:
        self.done += pieces
        if is_over:
            self.rest = None
            return
        self.ids, self.rest = _remaining(self._prompt_ids, self._sampling, self.done)
        if self._has_stopped():
            self.rest, self.end = None, Finish.STOP
        elif self.rest is None:
            self.end = Finish.LENGTH

    def _has_stopped(self) -> bool:
        """True if a stop token was sampled and only the engine's final event was lost."""
        is_new = len(self.ids) > len(self._prompt_ids)
        return is_new and self.ids[-1] in self._sampling.stop_token_ids and not self._sampling.extra.get("ignore_eos")

    def join(self) -> Completion:
        whole = join_pieces(self.done, self._prompt_ids)
        if self.end is None:
            return whole
        return replace(whole, finish=self.end, stopped_by=self.ids[-1] if self.end is Finish.STOP else None)


def copy_to_cpu(weights: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Makes the weights reusable for several replicas."""
    # The iterable yields each weight once, and all of them may not fit on a GPU.
    return [(name, tensor.detach().cpu()) for name, tensor in weights]


def _rendezvous_hash(session: str | None, index: int) -> bytes:
    return hashlib.blake2b(f"{session}:{index}".encode(), digest_size=8).digest()


def _pieces(chunks: Sequence[Chunk], ids: TokenIds) -> list[Completion]:
    builder = CompletionBuilder("pool", ids)
    for chunk in chunks:
        kept = None if chunk.sampling_mask is None else chunk.sampling_mask.rows()
        builder.add(chunk.token_ids, chunk.logprobs, version=chunk.policy_version, kept=kept)
    return [builder.complete(Finish.ABORT, prompt_tokens=None)] if builder.ids else []


def _remaining(
    prompt_ids: TokenIds, sampling: Sampling, done: Sequence[Completion]
) -> tuple[TokenIds, Sampling | None]:
    """No settings if the token limit is reached."""
    ids = TokenIds.concat([prompt_ids, *(piece.token_ids for piece in done)]) if done else prompt_ids
    if sampling.max_tokens is None:
        return ids, sampling
    left = sampling.max_tokens - (len(ids) - len(prompt_ids))
    return ids, replace(sampling, max_tokens=left) if left > 0 else None


def join_pieces(pieces: Sequence[Completion], prompt_ids: TokenIds) -> Completion:
    """Drops what not every piece has (top log-probabilities, for example)."""
    if len(pieces) == 1:
        return pieces[0]
    runs = [run for piece in pieces for run in _version_runs(piece)] if any(piece.versions for piece in pieces) else []
    tops = [piece.top_logprobs for piece in pieces]
    raws = [piece.raw_logprobs for piece in pieces]
    return replace(
        pieces[-1],
        token_ids=TokenIds.concat(piece.token_ids for piece in pieces),
        logprobs=tuple(x for piece in pieces for x in piece.logprobs),
        versions=spans_from_runs(runs),
        prompt_tokens=len(prompt_ids),
        top_logprobs=tuple(x for top in tops for x in top or ()) if all(top is not None for top in tops) else None,
        raw_logprobs=tuple(x for raw in raws for x in raw or ()) if all(raw is not None for raw in raws) else None,
        routed_experts=join_piece_routing(pieces, prompt_ids),
        sampling_mask=join_masks_if_whole([piece.sampling_mask for piece in pieces]),
        prompt_digest=prompt_ids.sha256(),
    )


def _version_runs(piece: Completion) -> list[tuple[int, int]]:
    """(tokens, version); an engine without versions reports none."""
    runs = [(span.end - span.start, span.version) for span in piece.versions]
    return runs or [(len(piece.token_ids), UNVERSIONED)]


def join_piece_routing(pieces: Sequence[Completion], prompt_ids: TokenIds) -> RoutedExperts | None:
    # Each piece's prompt contains the earlier pieces; for those positions the piece that sampled from them counts.
    parts: list[RoutedExperts] = []
    end = len(prompt_ids)
    for piece in pieces:
        end += len(piece.token_ids)
        if piece.routed_experts is None:
            return None
        parts.append(piece.routed_experts.cut(parts[-1].end if parts else 0, end - 1))
    return join_routing(parts)
