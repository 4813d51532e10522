"""Seeds at the ends of 64 bits, and records of earlier releases, which took any integer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

import tokentrue as tt
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.errors import SamplingError
from tokentrue.sessions.journal import Journal
from tokentrue.types import Message, TurnRequest, choice_seed

USER: Message = {"role": "user", "content": "u"}


@pytest.mark.parametrize("seed", [-(2**63), -1, 5, 2**63 - 2, 2**63 - 1])
async def test_no_two_choices_share_a_seed_and_each_is_one_that_engines_take(seed: int) -> None:
    engine = Engine([sampled("r", "a")] * 4)
    session = tt.Session(renderer=Letters(), provider=engine)
    await session.turn(TurnRequest(messages=[USER], sampling=tt.Sampling(seed=seed), n=4))
    seeds = [settings.seed for settings in engine.settings]
    assert seeds == [choice_seed(seed, index) for index in range(4)] and seeds[0] == seed and len(set(seeds)) == 4
    assert [node.sampling.seed for node in session.tree.in_order()] == seeds


def test_seeds_wrap_around() -> None:
    assert [choice_seed(2**63 - 1, index) for index in range(3)] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert choice_seed(3, 2) == 5 and choice_seed(-1, 1) == 0


async def test_a_record_with_values_that_are_refused_now_opens_and_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine([sampled("r", "a")] * 2)
    with closing(Journal(f"sqlite:{tmp_path / 'journal.db'}")) as journal:
        with monkeypatch.context() as earlier:
            earlier.setattr(tt.Sampling, "__post_init__", tt.Sampling._copy_stops)  # pyright: ignore[reportPrivateUsage]
            old = tt.Session(
                renderer=Letters(), provider=engine, journal=journal, sampling={"seed": 2**64, "max_tokens": 2**40}
            )
            await old.chat([USER])
        session = await tt.Session.open(journal, old.id, renderer=Letters(), provider=engine)
        (node,) = session.tree.in_order()
        assert (node.sampling.seed, node.sampling.max_tokens) == (2**64, 2**40)
        assert [sample.token_ids for sample in session.samples()] == [sample.token_ids for sample in old.samples()]
        with pytest.raises(SamplingError, match="max_tokens must be from 1"):
            await session.chat([USER])
