"""`metadata.tokentrue` of a foreign or damaged file: every reader takes it or refuses it with a typed error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import tokentrue as tt
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.doctor.samples import observe, why_not_comparable
from tokentrue.errors import TokenContractError, TokenTrueError
from tokentrue.samples.recorded_turns import read_record, read_turns, scoring_temperatures, why_not_scorable
from tokentrue.samples.trainer_rows import sampled_temperatures
from tokentrue.train.rows import is_truncated, row_from_sample
from tokentrue.types import Completion, Sample, SamplingMask
from tokentrue.viewer.data import ViewerData
from tokentrue.viewer.sources import SampleList

WRONG = [None, -1, 10**30, 1e39, 1e-50, "x", [], {}, True, 1.5, float("nan"), float("inf"), [[1]], [None], {"": {}}]


class KeepsRows(Engine):
    """Reports which ids it kept, in its first answer alone."""

    def _next(self, prompt_ids: Any, sampling: tt.Sampling) -> Completion:
        done = super()._next(prompt_ids, sampling)
        rows = [[token] for token in done.token_ids]
        return done if len(self.prompts) > 1 else replace(done, sampling_mask=SamplingMask.from_rows(rows))


@pytest.mark.parametrize(("second", "is_known"), [({}, True), ({"top_p": 0.5}, False)], ids=["whole", "filtered"])
async def test_a_filtered_turn_without_its_kept_ids_is_not_taken_for_a_whole_one(
    second: dict[str, float], is_known: bool
) -> None:
    session = tt.Session(renderer=Letters(), provider=KeepsRows([sampled("r", "one"), sampled("r", "two")]))
    opening: list[Any] = [{"role": "user", "content": "hi"}]
    reply = await session.chat(opening, sampling=tt.Sampling(top_p=0.5))
    await session.chat([*opening, reply.message, {"role": "user", "content": "go"}], sampling=tt.Sampling(**second))  # type: ignore[arg-type]
    (found,) = session.samples()
    assert (found.sampling_mask is not None) == is_known
    if is_known:
        assert scoring_temperatures(found)
    else:
        with pytest.raises(TokenContractError, match="did not report which ids were kept"):
            scoring_temperatures(found)


@pytest.fixture
async def sample() -> Sample:
    """Three turns at three temperatures."""
    session = tt.Session(
        renderer=Letters(), provider=Engine([sampled("r", "one"), sampled("r", "two"), sampled("r", "three")])
    )
    history: list[Any] = [{"role": "user", "content": "hi"}]
    for temperature in (0.7, 1.0, 0.3):
        reply = await session.chat(history, sampling=tt.Sampling(temperature=temperature, max_tokens=50))
        history = [*history, reply.message, {"role": "user", "content": "go"}]
    await session.reward(0.5)
    (found,) = session.samples()
    return found


def view(sample: Sample) -> None:
    data = ViewerData(SampleList([sample], name="file"))
    data.index()
    data.session(sample.session_id)
    data.branch(sample.session_id, sample.sample_id)


READERS: dict[str, Callable[[Sample], object]] = {
    "trainer": lambda sample: is_truncated(row_from_sample(sample, "g")),
    "doctor": lambda sample: (why_not_comparable(sample), observe(sample)),
    "diagnose": scoring_temperatures,
    "prime-rl": sampled_temperatures,
    "viewer": view,
}


def damaged(value: Any) -> Iterator[Any]:
    """`value` with one part of it replaced by each wrong value, or left out."""
    yield from WRONG
    for key in range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ():
        for part in damaged(value[key]):
            changed = copy.copy(value)
            changed[key] = part
            yield changed
        shorter = copy.copy(value)
        del shorter[key]
        yield shorter


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_record_is_read_or_refused_by_name(sample: Sample, reader: str) -> None:
    refused = 0
    for own in damaged(sample.metadata["tokentrue"]):
        try:
            READERS[reader](replace(sample, metadata={"tokentrue": own}))
        except TokenTrueError as error:
            refused += 1
            assert sample.sample_id in str(error), error
    assert refused > 100


def test_turns_stand_where_their_tokens_were_sampled(sample: Sample) -> None:
    turns = read_turns(sample)
    assert [turn.row.temperature for turn in turns] == [0.7, 1.0, 0.3]
    covered = {i for turn in turns for i in range(turn.start, turn.end)}
    assert covered == {i for i, value in enumerate(sample.rollout_logprobs) if value is not None}
    assert [value for value in sampled_temperatures(sample) if value != 1.0].count(0.3) == turns[2].end - turns[2].start
    row = row_from_sample(sample, "g")
    for turn in turns:
        assert row.temperatures[turn.start : turn.end].tolist() == [pytest.approx(turn.row.temperature)] * (
            turn.end - turn.start
        )


def test_turns_that_hold_other_tokens_than_the_sample_are_refused(sample: Sample) -> None:
    """Else the temperature of one turn would be taken for the tokens of another."""
    own = copy.deepcopy(sample.metadata["tokentrue"])
    own["nodes"][0]["given"] += 1
    with pytest.raises(
        TokenContractError, match=f"hold {len(sample.token_ids) + 1} tokens, the sample {len(sample.token_ids)}"
    ):
        row_from_sample(replace(sample, metadata={"tokentrue": own}), "g")


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({}, ""),
        ({"presence_penalty": 0.5, "top_k": 4}, "sampled under presence_penalty: a penalty depends on the text before"),
        ({"top_p": 0.5, "top_k": 4}, "and the engine did not report which ids were kept"),
    ],
)
def test_one_rule_says_which_turns_can_be_scored(sample: Sample, sampling: dict[str, Any], words: str) -> None:
    own = copy.deepcopy(sample.metadata["tokentrue"])
    own["nodes"][1] |= {"sampling": sampling, "temperature": 0.0}
    greedy = replace(sample, metadata={"tokentrue": own})
    first, turn, last = read_turns(greedy)
    said = why_not_scorable(greedy, turn)
    assert (
        words in said
        and bool(words) == bool(said)
        and not why_not_scorable(greedy, first)
        and not why_not_scorable(greedy, last)
    )
    untrained = replace(greedy, loss_mask=[bit if i >= turn.end else 0 for i, bit in enumerate(sample.loss_mask)])
    expected = {i: t for one, t in ((first, 0.7), (turn, 1.0), (last, 0.3)) for i in range(one.start, one.end)}
    assert scoring_temperatures(untrained) == [expected.get(i, 1.0) for i in range(len(sample.token_ids))]
    assert row_from_sample(untrained, "g").temperatures.tolist() == pytest.approx(scoring_temperatures(untrained))
    if words:
        with pytest.raises(TokenContractError, match=f"{sample.sample_id}, turn 1: sampled under"):
            scoring_temperatures(greedy)
    else:
        scoring_temperatures(greedy)
    with pytest.raises(TokenContractError, match=r"turn 1: sampled (under|at temperature 0)"):
        row_from_sample(greedy, "g")


def test_a_sample_of_another_program_needs_no_record(sample: Sample) -> None:
    foreign = replace(sample, metadata={"score": 1})
    assert read_turns(foreign) == [] and read_record(foreign).coverage is None
    assert set(row_from_sample(foreign, "g", 0.5).temperatures.tolist()) == {0.5}
    view(foreign)
    with pytest.raises(TokenContractError, match="prime-rl needs their temperatures"):
        sampled_temperatures(foreign)
