from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tokentrue.errors import EngineRejected, EngineUnreachable
from tokentrue.protocols import Streaming
from tokentrue.providers.pool import Pool
from tokentrue.types import Chunk, Completion, Finish, Ids, Sampling, SamplingMask, VersionSpan


class Counting(Streaming):
    """An engine that counts on from the last prompt token, and breaks or aborts where it is told to."""

    name = "counting"
    truthful_filters: frozenset[str] | None = frozenset({"top_k"})

    def __init__(
        self, *, break_after: list[int] | None = None, abort_after: list[int] | None = None, version: int = 1
    ) -> None:
        self.break_after, self.abort_after = break_after or [], abort_after or []
        self.version, self.up = version, True
        self.prompts: list[list[int]] = []

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        if not self.up:
            raise EngineUnreachable("down")
        self.prompts.append(list(prompt_ids))
        limit = sampling.max_tokens or 10
        broken = self.break_after.pop(0) if self.break_after else None
        aborted = self.abort_after.pop(0) if self.abort_after else None
        ids: list[int] = []
        for i in range(limit):
            if i == broken:
                raise EngineUnreachable("broke off")
            if i == aborted:
                break
            ids.append(prompt_ids[-1] + 1 + i)
            mask = SamplingMask.from_rows([[ids[-1]]]) if sampling.truncates else None
            yield Chunk(token_ids=(ids[-1],), logprobs=(-0.5,), policy_version=self.version, sampling_mask=mask)
        spans = (VersionSpan(start=0, end=len(ids), version=self.version),)
        finish = Finish.LENGTH if len(ids) == limit else Finish.ABORT
        kept = SamplingMask.from_rows([[i] for i in ids]) if sampling.truncates else None
        final = Completion(
            token_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            finish=finish,
            versions=spans,
            prompt_tokens=len(prompt_ids),
            sampling_mask=kept,
        )
        yield Chunk(final=final)
        self.version += 1 if aborted is not None else 0

    async def health(self) -> Mapping[str, Any]:
        if not self.up:
            raise EngineUnreachable("down")
        return {"engine": self.name, "version": self.version}

    async def close(self) -> None:
        pass


async def run(pool: Pool, session: str = "s", **sampling: Any) -> tuple[list[int], Completion]:
    got: list[int] = []
    async for chunk in pool.stream([1, 2, 3], Sampling(max_tokens=8, **sampling), session=session):
        if chunk.final is not None:
            return got, chunk.final
        got += chunk.token_ids
    raise AssertionError("no final chunk")


async def test_sessions_stick_and_spread() -> None:
    replicas = [Counting() for _ in range(4)]
    pool = Pool(replicas)
    chosen = {f"s{i}": pool.order(f"s{i}")[0] for i in range(400)}
    assert all(pool.order(name)[0] == index for name, index in chosen.items())
    assert min(Counter(chosen.values()).values()) > 50


async def test_losing_a_replica_moves_only_its_sessions() -> None:
    replicas = [Counting() for _ in range(3)]
    pool = Pool(replicas)
    before = {f"s{i}": pool.order(f"s{i}")[0] for i in range(100)}
    replicas[1].up = False
    facts = await pool.health()
    assert (facts["replicas"], facts["healthy"]) == (3, 2)
    after = {name: pool.order(name)[0] for name in before}
    assert all(after[name] == index for name, index in before.items() if index != 1)
    assert all(index != 1 for index in after.values())


async def test_a_generation_goes_on_from_what_was_sampled_when_the_stream_breaks() -> None:
    pool = Pool([Counting(break_after=[3], version=1), Counting(break_after=[3], version=2)])
    got, final = await run(pool)
    assert got == list(final.token_ids) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert final.finish is Finish.LENGTH
    assert final.prompt_tokens == 3


async def test_a_generation_that_was_resumed_keeps_the_ids_that_filters_kept() -> None:
    got, final = await run(Pool([Counting(break_after=[3]), Counting(break_after=[3])]), top_k=5)
    assert got == list(final.token_ids) and len(got) == 8
    assert final.sampling_mask == SamplingMask.from_rows([[i] for i in got])


async def test_an_abort_for_a_weight_update_keeps_each_span_its_version() -> None:
    engine = Counting(abort_after=[2, 3], version=7)
    got, final = await run(Pool([engine]))
    assert got == list(final.token_ids) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [(s.start, s.end, s.version) for s in final.versions] == [(0, 2, 7), (2, 5, 8), (5, 8, 9)]
    assert engine.prompts == [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8]]


async def test_broken_right_after_its_stop_token_is_over() -> None:
    """The connection breaks between the stop token and the engine's last word: nothing is sampled after the stop."""
    engine = Counting(break_after=[3])
    completion = await Pool([engine]).generate([10], Sampling(max_tokens=8, stop_token_ids=(13,)))
    assert list(completion.token_ids) == [11, 12, 13] and engine.prompts == [[10]]
    assert (completion.finish, completion.stopped_by) == (Finish.STOP, 13)


class Unversioned(Counting):
    """Says nothing of versions in its last word."""

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        async for chunk in super().stream(prompt_ids, sampling, session=session, whole=whole):
            yield chunk if chunk.final is None else Chunk(final=replace(chunk.final, versions=()))


@pytest.mark.parametrize("engine", [Unversioned(break_after=[3], version=0), Unversioned(abort_after=[3], version=0)])
async def test_an_engine_without_versions_is_resumed(engine: Unversioned) -> None:
    completion = await Pool([engine]).generate([10], Sampling(max_tokens=6))
    assert list(completion.token_ids) == [11, 12, 13, 14, 15, 16] and engine.prompts == [[10], [10, 11, 12, 13]]
    assert completion.policy_version == 0 and completion.finish is Finish.LENGTH


async def test_broken_right_at_the_limit_needs_no_more_tokens() -> None:
    class Breaks(Counting):
        async def stream(
            self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
        ) -> AsyncIterator[Chunk]:
            async for chunk in super().stream(prompt_ids, sampling):
                if chunk.final is not None:
                    raise EngineUnreachable("at the very end")
                yield chunk

    got, final = await run(Pool([Breaks()]))
    assert got == list(final.token_ids) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert final.finish is Finish.LENGTH


async def test_all_down_is_said_once() -> None:
    replicas = [Counting(), Counting()]
    for replica in replicas:
        replica.up = False
    with pytest.raises(EngineUnreachable):
        await Pool(replicas).generate([1], Sampling(max_tokens=1))
    with pytest.raises(EngineUnreachable, match=r"no engine is reachable \(tried 2\)"):
        await Pool(replicas).health()


async def test_a_refusal_is_not_tried_elsewhere() -> None:
    class Refuses(Counting):
        async def stream(self, prompt_ids: Ids, sampling: Sampling, **_: Any) -> AsyncIterator[Chunk]:
            self.prompts.append(list(prompt_ids))
            raise EngineRejected("too long")
            yield

    replicas = [Refuses(), Refuses()]
    with pytest.raises(EngineRejected):
        await Pool(replicas).generate([1], Sampling(max_tokens=1))
    assert sum(len(replica.prompts) for replica in replicas) == 1


async def test_when_no_replica_took_the_weights_generations_say_so() -> None:
    class Absent(Counting):
        async def publish(self, weights: Any, *, version: int) -> None:
            raise EngineUnreachable("gone")

    pool = Pool([Absent(), Absent()])
    with pytest.raises(EngineUnreachable, match="no engine took the weights"):
        await pool.publish([], version=2)
    with pytest.raises(EngineUnreachable, match="published last"):
        await run(pool)


def test_replicas_that_have_not_answered_yet_refuse_no_filters() -> None:
    first, second = Counting(), Counting()
    pool = Pool([first, second])
    assert pool.truthful_filters == {"top_k"}
    first.truthful_filters = None
    assert pool.truthful_filters == {"top_k"}
    second.truthful_filters = None
    assert pool.truthful_filters is None
    first.truthful_filters, second.truthful_filters = frozenset({"top_k", "top_p"}), frozenset({"top_p"})
    assert pool.truthful_filters == {"top_p"}
