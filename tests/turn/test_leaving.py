"""Callers that leave at each stage of a turn, and come back under the same key: one answer per key, every sampled token
once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.turn.letters import Letters, letters
from tests.turn.test_matching import said, session_of
from tests.turn.world import OPENING, Engine, renderer
from tokentrue.errors import EngineContractError, EngineUnreachable
from tokentrue.providers.scripted import invent_logprob
from tokentrue.sessions import Journal
from tokentrue.sessions.requests import CHARS_PER_ID, INLINE_CHARS
from tokentrue.types import Chunk, TurnRequest

MANY_IDS = INLINE_CHARS // CHARS_PER_ID  # as many as are parsed in a thread


class SlowWrites:
    """Holds every append to the journal until `go_on` is set; `writing` says that one has begun."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.writing, self.go_on = asyncio.Event(), asyncio.Event()
        append = Journal.append_nodes

        async def slow(journal: Any, *arguments: Any) -> None:
            self.writing.set()
            await self.go_on.wait()
            await append(journal, *arguments)

        patch.setattr(Journal, "append_nodes", slow)


async def consume(session: tt.Session, request: TurnRequest) -> list[Any]:
    return [event.reply async for event in session.stream(request) if event.reply is not None]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_retry_while_the_abandoned_turn_is_written_gets_that_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, streamed: bool
) -> None:
    """The answer is complete and on its way into the record: sampling another one would leave two answers under one
    key."""
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(*(said(text, text) for text in "abcdef"), journal=journal)
    writes = SlowWrites(monkeypatch)
    request = TurnRequest(messages=OPENING, n=n, request_key="k")
    first = asyncio.create_task(consume(session, request) if streamed else session.turn(request))
    await writes.writing.wait()
    first.cancel()
    await asyncio.sleep(0.02)
    retry = asyncio.create_task(session.turn(request))
    await asyncio.sleep(0.02)
    writes.go_on.set()
    replies = await asyncio.wait_for(retry, 5)
    await asyncio.wait([first])
    again = await session.turn(request)
    assert len(replies) == len(again) == n and len(engine.prompts) == n
    assert (
        [reply.node for reply in replies]
        == [reply.node for reply in again]
        == [node.id for node in session.tree.in_order()]
    )
    journal.close()
    journal = Journal(tmp_path / "j.db")
    reopened = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    assert [reply.node for reply in await reopened.turn(request)] == [reply.node for reply in replies]
    journal.close()


async def test_an_abandoned_turn_that_is_being_written_does_not_keep_the_session_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j.db")
    session, _ = session_of(said("a", "1"), journal=journal)
    writes = SlowWrites(monkeypatch)
    first = asyncio.create_task(session.turn(TurnRequest(messages=OPENING, request_key="k")))
    await writes.writing.wait()
    ending = asyncio.create_task(session.end())
    await asyncio.sleep(0.02)
    assert not ending.done()
    writes.go_on.set()
    await asyncio.wait_for(ending, 5)
    await asyncio.wait([first])
    assert session.record.state == "ended" and len(session.tree) == 1 and session.coverage().ratio == 1.0
    journal.close()


class SlowParsing(Letters):
    """Holds a parse of whole answers until `go_on` is set; `parsing` says that one has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.parsing, self.go_on = threading.Event(), threading.Event()

    def parse(self, *args: Any, **options: Any) -> Any:
        self.parsing.set()
        self.go_on.wait(10)
        return super().parse(*args, **options)


class BreakingEngine(Engine):
    """Streams many tokens and fails."""

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Chunk]:
        yield Chunk(token_ids=letters("x" * MANY_IDS), logprobs=[-1.0] * MANY_IDS, policy_version=1)  # type: ignore[arg-type]
        raise EngineUnreachable("killed")


async def test_what_a_failed_engine_sampled_is_kept_when_the_caller_leaves_while_it_is_parsed() -> None:
    renderer = SlowParsing()
    session = tt.Session(renderer=renderer, provider=BreakingEngine([]))
    caller = asyncio.create_task(consume(session, TurnRequest(messages=OPENING)))
    assert await asyncio.to_thread(renderer.parsing.wait, 10)
    caller.cancel()
    await asyncio.sleep(0.02)
    renderer.go_on.set()
    await asyncio.wait([caller])
    (node,) = session.tree.in_order()
    assert (node.outcome, len(node.sampled_ids)) == ("engine_failed", MANY_IDS)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_engine_whose_last_word_has_other_logprobs_is_refused(streamed: bool) -> None:
    """The client was shown, and the record keeps, what came with the tokens."""

    class Unsure(Engine):
        async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Chunk]:
            async for chunk in super().stream(*args, **kwargs):
                if chunk.final is not None:
                    chunk = Chunk(final=replace(chunk.final, logprobs=chunk.final.logprobs[::-1]))
                yield chunk

    answer = said("It is done.", "one step")
    engine = Unsure([answer])
    session = tt.Session(renderer=renderer("own"), provider=engine)
    with pytest.raises(EngineContractError, match="differ"):
        if streamed:
            async for _ in session.stream(TurnRequest(messages=OPENING)):
                pass
        else:
            await session.chat(OPENING)
    (node,) = session.tree.nodes.values()
    (prompt,) = engine.prompts
    assert tuple(node.sampled_ids) == answer and node.outcome == "engine_failed"
    assert list(node.logprobs) == [invent_logprob(i + len(prompt), token) for i, token in enumerate(answer)]
