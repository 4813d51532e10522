"""Several replicas of one engine as one Provider: sticky by session, which preserves the prefix cache, health-checked,
with failover. A generation that breaks off is resumed from the tokens received: spans keep their policy versions, and
no token is sampled twice."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from tokentrue.errors import (
    ConfigError,
    EngineContractError,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import (
    AdapterSink,
    Adapting,
    Interruptible,
    Measured,
    NamedWeights,
    PretrainedAdapter,
    Provider,
    Rejoining,
    Seeing,
    Streaming,
    WeightSink,
)
from tokentrue.providers.building import CompletionBuilder
from tokentrue.routing_replay import join_masks_if_whole, join_routing
from tokentrue.types import UNVERSIONED, Chunk, Completion, Finish, Ids, RoutedExperts, Sampling, spans_from_runs

T = TypeVar("T")
RESUMABLE = (EngineUnreachable, EngineTimeout)
RESUMPTIONS = 8  # of one generation
GIVE_UP_S = 600.0  # after the start of a generation, a failure is not resumed any more
CHECK_S = 5.0  # between two health checks


class Pool(Streaming):
    """`pause()` holds new and aborted generations until `resume()`."""

    def __init__(self, replicas: Sequence[Provider]) -> None:
        if not replicas:
            raise ConfigError("a pool needs at least one engine")
        self._replicas, self.name = list(replicas), replicas[0].name
        self._adapting = [replica for replica in replicas if isinstance(replica, Adapting)]
        self._down: set[int] = set()  # failed replicas; each gets the weights again before it is used
        self._restoring = asyncio.Lock()
        self._stale: set[int] = set()  # replicas that missed the last publication
        self._not_paused = asyncio.Event()
        self._not_paused.set()
        self._checker: asyncio.Task[None] | None = None

    @property
    def truthful_filters(self) -> frozenset[str] | None:
        """Those that are truthful at every replica that has reported."""
        known = [filters for replica in self._replicas if (filters := replica.truthful_filters) is not None]
        return known[0].intersection(*known) if known else None

    @property
    def bans_tokens(self) -> bool:
        return all(getattr(replica, "bans_tokens", False) for replica in self._replicas)

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
        """Of an embedded engine; remote ones have their own metrics pages."""
        only = self._replicas[0] if len(self._replicas) == 1 else None
        return only.metrics() if isinstance(only, Measured) else {}

    async def interrupt(self) -> int:
        """Pauses, and aborts generations at engines that must be idle to load weights, until `resume()`. Returns their
        number."""
        self.pause()
        engines = [replica for replica in self._replicas if isinstance(replica, Interruptible)]
        return sum(await asyncio.gather(*(engine.interrupt() for engine in engines)))

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False, **images: Any
    ) -> AsyncIterator[Chunk]:
        generation = _Generation(TokenIds(prompt_ids), sampling)
        failures, give_up = 0, time.monotonic() + GIVE_UP_S
        while not generation.is_over:
            await self._not_paused.wait()
            index = self._choose(session)
            got, final = list[Chunk](), None
            try:
                if index in self._down:
                    await self._restore(index)
                source: Any = self._replicas[index].stream(
                    generation.ids, generation.rest, session=session, whole=whole, **images
                )
                async with aclosing(source) as chunks:
                    async for chunk in chunks:
                        if chunk.final is None:
                            got.append(chunk)
                            yield chunk
                        else:
                            final = chunk.final
            except RESUMABLE:
                self._down.add(index)
                generation.add_broken(got)
                failures += 1
                most = len(self._replicas) + (RESUMPTIONS if generation.done else 0)
                if not generation.is_over and (failures >= most or time.monotonic() > give_up):
                    raise
                continue
            if final is None:
                raise EngineContractError(f"{self.name} ended a stream without its final answer")
            if final.prompt_digest not in (None, generation.ids.sha256()):
                raise EngineContractError(f"{self.name} was sent other ids than the prompt")
            self._down.discard(index)
            is_last = self._not_paused.is_set() and len(generation.done) >= RESUMPTIONS
            generation.add(final, is_over=final.finish is not Finish.ABORT or is_last)
        yield Chunk(final=generation.join())

    async def check_images(self) -> None:
        for index, replica in enumerate(self._replicas):
            if not isinstance(replica, Seeing):
                raise EngineRejected(f"the engine {replica.name!r} takes no images")
            if index not in self._down | self._stale:
                await replica.check_images()

    async def health(self) -> JsonMapping:
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

    async def publish(self, weights: NamedWeights, *, version: int) -> None:
        """Generations wait. Unreachable replicas are not used until they have the weights."""
        sinks = [replica for replica in self._replicas if isinstance(replica, WeightSink)]
        if len(sinks) != len(self._replicas):
            raise ConfigError(f"engine {self.name!r} takes no weights")
        if len(sinks) > 1:  # the iterable yields each weight once, and all of them may not fit on a GPU
            weights = await asyncio.to_thread(lambda: [(name, tensor.detach().cpu()) for name, tensor in weights])
        self.pause()
        try:
            await self._publish_all(sink.publish(weights, version=version) for sink in sinks)
        finally:
            self.resume()

    async def publish_adapter(
        self, weights: NamedWeights, config: PretrainedAdapter, *, version: int, name: str
    ) -> bool:
        """Generations in flight keep the adapter that they began with."""
        sinks = [replica for replica in self._replicas if isinstance(replica, AdapterSink)]
        if len(sinks) != len(self._replicas):
            return False
        weights = list(weights)
        return False not in await self._publish_all(
            sink.publish_adapter(weights, config, version=version, name=name) for sink in sinks
        )

    async def _publish_all(self, publications: Iterable[Awaitable[object]]) -> list[object]:
        results = await asyncio.gather(*publications, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RESUMABLE):
                raise result
        self._stale = {i for i, result in enumerate(results) if isinstance(result, BaseException)}
        if len(self._stale) == len(self._replicas):
            raise EngineUnreachable(f"no engine took the weights (tried {len(results)}): {results[0]}")
        return results

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
        self._checker = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self.health()
            except EngineError:
                continue  # all down: the next generation reports it to its caller

    def order(self, session: str | None) -> list[int]:
        """By rendezvous hashing, healthy ones first: losing one moves only its sessions."""
        if len(self._replicas) == 1:
            return [0]

        def rank(index: int) -> tuple[bool, bytes]:
            return index not in self._down, hashlib.blake2b(f"{session}:{index}".encode(), digest_size=8).digest()

        return sorted((i for i in range(len(self._replicas)) if i not in self._stale), key=rank, reverse=True)

    def _choose(self, session: str | None) -> int:
        if not (order := self.order(session)):
            raise EngineUnreachable(
                "no engine has the weights that were published last; publish again, or restart the engines"
            )
        return order[0]


class _Generation:
    """`done`: the pieces so far. `ids`, `rest`: prompt and settings for the remainder. `end`: the finish of one that
    broke off right at a stop token or its token limit."""

    is_over = False

    def __init__(self, prompt_ids: TokenIds, sampling: Sampling) -> None:
        self._prompt_ids, self._sampling = prompt_ids, sampling
        self.ids, self.rest = prompt_ids, sampling
        self.done: list[Completion] = []
        self.end: Finish | None = None

    def add(self, piece: Completion, *, is_over: bool = False) -> None:
        self.done.append(piece)
        if is_over:
            self.is_over = True
            return
        self.ids = TokenIds.concat([self.ids, piece.token_ids])
        sampling, sampled = self._sampling, len(self.ids) - len(self._prompt_ids)
        if sampled and self.ids[-1] in sampling.stop_token_ids and not sampling.extra.get("ignore_eos"):
            self.end = Finish.STOP  # only the engine's final event was lost
        elif sampling.max_tokens is not None and sampling.max_tokens <= sampled:
            self.end = Finish.LENGTH
        elif sampling.max_tokens is not None:
            self.rest = replace(sampling, max_tokens=sampling.max_tokens - sampled)
        self.is_over = self.end is not None

    def add_broken(self, chunks: Sequence[Chunk]) -> None:
        """The tokens of a stream that failed."""
        builder = CompletionBuilder("pool", self.ids)
        for chunk in chunks:
            kept = None if chunk.sampling_mask is None else chunk.sampling_mask.rows()
            builder.append(chunk.token_ids, chunk.logprobs, version=chunk.policy_version, kept=kept)
        if builder.ids:
            self.add(builder.complete(Finish.ABORT, prompt_tokens=None))

    def join(self) -> Completion:
        whole = join_pieces(self.done, self._prompt_ids)
        if self.end is None:
            return whole
        return replace(whole, finish=self.end, stopped_by=self.ids[-1] if self.end is Finish.STOP else None)


def join_pieces(pieces: Sequence[Completion], prompt_ids: TokenIds) -> Completion:
    if len(pieces) == 1:
        return pieces[0]
    runs: list[tuple[int, int]] = []
    if any(piece.versions for piece in pieces):  # an engine without versions reports none
        for piece in pieces:
            spans = [(span.end - span.start, span.version) for span in piece.versions]
            runs += spans or [(len(piece.token_ids), UNVERSIONED)]

    def join(parts: Sequence[Sequence[T] | None]) -> tuple[T, ...] | None:
        known = [part for part in parts if part is not None]
        return tuple(item for part in known for item in part) if len(known) == len(parts) else None

    return replace(
        pieces[-1],
        token_ids=TokenIds.concat(piece.token_ids for piece in pieces),
        logprobs=tuple(x for piece in pieces for x in piece.logprobs),
        versions=spans_from_runs(runs),
        prompt_tokens=len(prompt_ids),
        top_logprobs=join([piece.top_logprobs for piece in pieces]),
        raw_logprobs=join([piece.raw_logprobs for piece in pieces]),
        routed_experts=_join_routing(pieces, len(prompt_ids)),
        sampling_mask=join_masks_if_whole([piece.sampling_mask for piece in pieces]),
        prompt_digest=prompt_ids.sha256(),
    )


def _join_routing(pieces: Sequence[Completion], end: int) -> RoutedExperts | None:
    # Each piece's prompt contains the earlier ones; for those positions the piece that sampled counts.
    parts: list[RoutedExperts] = []
    for piece in pieces:
        end += len(piece.token_ids)
        if piece.routed_experts is None:
            return None
        parts.append(piece.routed_experts.cut(parts[-1].end if parts else 0, end - 1))
    return join_routing(parts)
