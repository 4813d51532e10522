"""Several replicas of one engine behind one Provider: sticky by session, health-checked, moved on failure.

Ids are sent, so any replica continues any session exactly; stickiness only saves the prefix cache. A generation that an engine
broke off (a crash, an abort for a weight update) goes on from the tokens it already gave, on this replica or another: the spans
keep their own policy versions, and nothing that was sampled is sampled again.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from tokentrue.errors import ConfigError, EngineError, EngineTimeout, EngineUnreachable
from tokentrue.protocols import Provider, call_if_there
from tokentrue.providers.evidence import Gathering
from tokentrue.types import Chunk, Completion, Finish, Ids, Sampling, VersionSpan

MOVES_ON = (EngineUnreachable, EngineTimeout)


class Pool:
    """`pause()` holds new and broken-off generations back until `resume()`."""

    def __init__(self, replicas: Sequence[Provider], *, check_every_s: float = 5.0, resumptions: int = 8) -> None:
        if not replicas:
            raise ConfigError("a pool needs at least one engine")
        self._replicas = list(replicas)
        self._down: set[int] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._check_every_s, self._resumptions = check_every_s, resumptions
        self._checker: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._replicas[0].name

    @property
    def truthful_filters(self) -> frozenset[str]:
        return frozenset.intersection(*(replica.truthful_filters for replica in self._replicas))

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def metrics(self) -> Mapping[str, float]:
        """What an embedded engine tells of itself; remote ones have pages of their own."""
        tell = getattr(self._replicas[0], "metrics", None)
        return tell() if len(self._replicas) == 1 and callable(tell) else {}  # pyright: ignore[reportReturnType]

    def foresee(self, ids: Ids, session: str) -> None:
        call_if_there(self._replicas[self.order(session)[0]], "foresee", ids, session)

    def forget(self, session: str) -> None:
        for replica in self._replicas:
            call_if_there(replica, "forget", session)

    async def interrupt(self) -> int:
        """Paused, and what is running at the engines broken off, where an engine must be stopped for new weights; how many that were.

        Each goes on after `resume()` from the tokens it has. An engine that takes weights between two tokens is not stopped.
        """
        self.pause()
        stoppable: list[Any] = [replica for replica in self._replicas if hasattr(replica, "interrupt")]
        return sum(await asyncio.gather(*(replica.interrupt() for replica in stoppable)))

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        if len(self._replicas) > 1 or not self._open.is_set():
            return await self._whole(prompt_ids, sampling, session, [])
        try:  # one replica: nothing to choose, and mostly nothing to splice
            completion = await self._replicas[0].generate(prompt_ids, sampling, session=session)
        except MOVES_ON:
            self._down.add(0)
            raise
        self._down.discard(0)
        if completion.finish is Finish.ABORT and self._resumptions:
            return await self._whole(prompt_ids, sampling, session, [completion])
        return joined([completion], prompt_tokens=len(prompt_ids))

    async def _whole(self, prompt_ids: Ids, sampling: Sampling, session: str | None, done: list[Completion]) -> Completion:
        final = None
        async for chunk in self._spliced(prompt_ids, sampling, session, done, whole=True):
            final = chunk.final
        assert final is not None
        return final

    def stream(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> AsyncIterator[Chunk]:
        return self._spliced(prompt_ids, sampling, session, [], whole=False)

    async def health(self) -> Mapping[str, Any]:
        """Asks every replica; raises when none answers."""
        answers = await asyncio.gather(*(replica.health() for replica in self._replicas), return_exceptions=True)
        self._down = {i for i, answer in enumerate(answers) if isinstance(answer, BaseException)}
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer
        alive = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not alive:
            raise EngineUnreachable(f"none of {len(answers)} engines answers: {answers[0]}")
        return {**alive[0], "replicas": len(answers), "healthy": len(alive)}

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Every replica takes the weights; generations wait meanwhile."""
        kept = list(weights)
        self.pause()
        try:
            await asyncio.gather(*(replica.publish(kept, version=version) for replica in self._replicas))  # type: ignore[attr-defined]
        finally:
            self.resume()

    async def close(self) -> None:
        if self._checker is not None:
            self._checker.cancel()
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def watch(self) -> None:
        """Starts the health checks: a replica that comes back gets its sessions back."""
        self._checker = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._check_every_s)
            try:
                await self.health()
            except EngineError:
                continue  # all down: the next generation says so to its caller

    def order(self, session: str | None) -> list[int]:
        """Replicas by rendezvous hashing, healthy ones first: losing one moves only its own sessions."""
        if len(self._replicas) == 1:
            return [0]
        ranked = sorted(range(len(self._replicas)), key=lambda i: _weight(session, i), reverse=True)
        return [i for i in ranked if i not in self._down] + [i for i in ranked if i in self._down]

    async def _spliced(
        self, prompt_ids: Ids, sampling: Sampling, session: str | None, done: list[Completion], *, whole: bool
    ) -> AsyncGenerator[Chunk]:
        """`done` is what was sampled of this generation before."""
        failures = 0
        while True:
            if not self._open.is_set():
                await self._open.wait()
            ids, rest = _remaining(prompt_ids, sampling, done)
            if rest is None:  # it broke off right at the limit: nothing is left to sample
                yield Chunk(final=replace(joined(done, prompt_tokens=len(prompt_ids)), finish=Finish.LENGTH))
                return
            index = self.order(session)[0]
            got: list[Chunk] = []
            final = None
            try:
                replica = self._replicas[index]
                stream: Any = _in_one(replica, ids, rest, session) if whole else replica.stream(ids, rest, session=session)
                async with aclosing(stream) as chunks:
                    async for chunk in chunks:
                        if chunk.final is not None:
                            final = chunk.final
                        else:
                            got.append(chunk)
                            yield chunk
            except MOVES_ON:
                self._down.add(index)
                failures += 1
                done += _pieces(got)
                if failures >= len(self._replicas) + (self._resumptions if done else 0):
                    raise
                continue
            assert final is not None
            self._down.discard(index)
            if final.finish is Finish.ABORT and (not self._open.is_set() or len(done) < self._resumptions):
                done.append(final)
                continue
            yield Chunk(final=joined([*done, final], prompt_tokens=len(prompt_ids)))
            return


async def _in_one(replica: Provider, ids: Ids, sampling: Sampling, session: str | None) -> AsyncGenerator[Chunk]:
    yield Chunk(final=await replica.generate(ids, sampling, session=session))


def _weight(session: str | None, index: int) -> bytes:
    return hashlib.blake2b(f"{session}:{index}".encode(), digest_size=8).digest()


def _pieces(chunks: Sequence[Chunk]) -> list[Completion]:
    """What a broken stream had already given, as a completion of its own."""
    gathering = Gathering("pool", 0)
    for chunk in chunks:
        gathering.add(chunk.token_ids, chunk.logprobs, version=chunk.policy_version)
    return [gathering.completion(Finish.ABORT, prompt_tokens=None)] if gathering.count else []


def _remaining(prompt_ids: Ids, sampling: Sampling, done: Sequence[Completion]) -> tuple[Ids, Sampling | None]:
    sampled = [i for piece in done for i in piece.token_ids]
    if not sampled:
        return prompt_ids, sampling
    packed = array("i", prompt_ids)
    if sampling.max_tokens is None:
        return packed + array("i", sampled), sampling
    left = sampling.max_tokens - len(sampled)
    return packed + array("i", sampled), replace(sampling, max_tokens=left) if left > 0 else None


def joined(pieces: Sequence[Completion], *, prompt_tokens: int) -> Completion:
    """Pieces of one generation, end to end; what not every piece has (top log-probabilities, say) is left out."""
    if len(pieces) == 1:
        return pieces[0] if pieces[0].prompt_tokens == prompt_tokens else replace(pieces[0], prompt_tokens=prompt_tokens)
    spans: list[VersionSpan] = []
    start = 0
    for piece in pieces:
        spans += [VersionSpan(start=start + s.start, end=start + s.end, version=s.version) for s in piece.versions if s.end > s.start]
        start += len(piece.token_ids)
    tops = [piece.top_logprobs for piece in pieces]
    raws = [piece.raw_logprobs for piece in pieces]
    return replace(
        pieces[-1],
        token_ids=tuple(i for piece in pieces for i in piece.token_ids),
        logprobs=tuple(x for piece in pieces for x in piece.logprobs),
        versions=tuple(spans),
        prompt_tokens=prompt_tokens,
        top_logprobs=tuple(x for top in tops for x in top or ()) if all(top is not None for top in tops) else None,
        raw_logprobs=tuple(x for raw in raws for x in raw or ()) if all(raw is not None for raw in raws) else None,
        routed_experts=None,
    )
