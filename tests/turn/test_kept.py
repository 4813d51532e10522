"""What is kept has its bounds, and what is written gives itself back."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.conversation import Conversations, own_source
from tokentrue.errors import EngineContractError, MessageError, TokenContractError
from tokentrue.sessions import Journal
from tokentrue.sessions.journal.rows import node_from_row, row_from_node
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import TurnRequest

ASKED: list[Any] = [{"role": "user", "content": "hi"}]


async def first_node() -> tuple[Tree, Node]:
    session = tt.Session(renderer=Letters(), provider=Engine([sampled("r", "a", '{"n": 1.5}')]))
    (reply,) = await session.turn(
        TurnRequest(messages=ASKED, sampling=tt.Sampling(stop=("x",), stop_token_ids=(9,), seed=3))
    )
    return session.tree, session.tree.get(reply.node)


async def test_a_row_gives_its_node_back() -> None:
    _, node = await first_node()
    row = row_from_node(node, None)
    assert node_from_row(row, None) == node


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("top_logprobs", ({7: math.nan},), EngineContractError),
        ("served", {"role": "assistant", "content": "a", 1: "b"}, EngineContractError),
        ("given", ({"role": "user", "content": ("h", "i")},), MessageError),
        ("template_kwargs", {"a": {1: 2}}, MessageError),
    ],
)
async def test_what_does_not_come_back_is_not_written(field: str, value: Any, error: type[Exception]) -> None:
    _, node = await first_node()
    changed: Any = {field: value}
    with pytest.raises(error, match="cannot be recorded exactly"):
        row_from_node(replace(node, **changed), None)


async def test_a_node_that_was_not_reserved_is_checked_when_it_is_added() -> None:
    tree, node = await first_node()
    other = replace(node, id="other", seq=1)
    tree.reserve([other])
    assert tree.committed_seq == 1
    with pytest.raises(TokenContractError, match="certificate"):
        tree.add(replace(other, chain=b"x"))
    with pytest.raises(TokenContractError, match="certificate"):
        tree.reserve([replace(node, id="third", seq=2), replace(node, id="fourth", seq=3, chain=b"x")])
    assert tree.next_seq == 2
    tree.release([other])
    assert tree.committed_seq == 2


def test_conversations_are_kept_up_to_their_bytes() -> None:
    kept = Conversations(20_000)
    histories: list[list[Any]] = [[{"role": "user", "content": letter * 4_000}] for letter in "abc"]
    for history in histories:
        kept.read(history, None)

    def count_shared(history: list[Any]) -> int:
        return len(kept.find("", list(map(own_source, history))))

    assert [count_shared(history) for history in histories] == [0, 0, 1] and kept.used <= 20_000
    kept.read([*histories[2], {"role": "user", "content": "d"}], None)
    assert count_shared(histories[2]) == 1 and kept.used <= 20_000  # in place of the one that it continues
    kept.read([*histories[0], *histories[1]], None)
    assert count_shared(histories[0]) == 0 and kept.used <= 20_000
    kept.close()
    kept.read(histories[1], None)
    assert kept.used == kept.budget.used == 0


async def test_equal_requests_to_a_new_session_are_one_turn(tmp_path: Path) -> None:
    """Both come before the session itself is in the journal."""
    journal = Journal(tmp_path / "j.db")
    for number in range(50):
        engine = Engine([sampled("r", f"a{number}")])
        session = tt.Session(renderer=Letters(), provider=engine, journal=journal)
        request = TurnRequest(messages=ASKED)
        (one,), (other,) = await asyncio.gather(session.turn(request), session.turn(request))
        assert one.node == other.node and len(engine.prompts) == 1
    journal.close()
