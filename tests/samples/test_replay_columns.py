"""Routing, kept ids and versions in the columns of each trainer, through the journal and back; the types that carry
them."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.samples.test_audit import forest
from tokentrue.errors import JournalError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.providers.pool import join_pieces
from tokentrue.routing_replay import (
    FREE,
    RoutedExperts,
    SamplingMask,
    TopLogprobs,
    empty_rows,
    join_masks,
    join_routing,
    own_routing,
)
from tokentrue.samples import read_samples, write_samples
from tokentrue.samples.formats import FORMATS
from tokentrue.sessions.journal.rows import node_from_row, pack_replay, row_from_node, unpack_replay
from tokentrue.types import Completion, Finish, Sample


def table(positions: int, start: int = 0, *, weights: bool = True) -> RoutedExperts:
    ids = np.arange(start * 6, (start + positions) * 6, dtype="<i2") % 11
    scales = (ids.astype("<f4") / 7).tobytes()
    return RoutedExperts(shape=(positions, 3, 2), data=ids.tobytes(), start=start, weights=scales if weights else None)


@pytest.fixture
async def sample() -> Sample:
    (found, *_) = (await forest()).samples()
    rows = [[] if value is None or i % 3 == 0 else sorted({token, 1, 5}) for i, (token, value) in
            enumerate(zip(found.token_ids, found.rollout_logprobs, strict=True))]  # fmt: skip
    tops = [({token: value, 9: -2.5} if value is not None else {}, 2) for token, value in
            zip(found.token_ids, found.rollout_logprobs, strict=True)]  # fmt: skip
    return replace(
        found,
        routed_experts=table(len(found.token_ids) - 1),
        sampling_mask=SamplingMask.from_rows(rows),
        top_logprobs=TopLogprobs.from_tops(tops),
    )


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_brings_the_bundle_back(sample: Sample, name: str, tmp_path: Path) -> None:
    write_samples([sample], tmp_path / "s", format=name)
    assert list(read_samples(tmp_path / "s")) == [sample]


def first_row(sample: Sample, name: str, path: Path) -> Any:
    write_samples([sample], path, format=name)
    return orjson.loads(path.read_bytes().splitlines()[0])


def expert_table(sample: Sample) -> list[Any]:
    assert sample.routed_experts is not None
    return np.frombuffer(sample.routed_experts.data, "<i2").reshape(sample.routed_experts.shape).tolist()


def test_slime_columns(sample: Sample, tmp_path: Path) -> None:
    row = first_row(sample, "slime", tmp_path / "s")
    start = len(row["tokens"]) - row["response_length"]
    assert (
        row["rollout_routed_experts"] == expert_table(sample)
        and len(row["rollout_routed_experts"]) == len(row["tokens"]) - 1
    )
    offsets, ids = row["rollout_top_p_token_offsets"], row["rollout_top_p_token_ids"]
    assert len(offsets) == row["response_length"] + 1 and offsets[-1] == len(ids)
    assert sample.sampling_mask is not None
    for i in range(row["response_length"]):
        assert ids[offsets[i] : offsets[i + 1]] == sample.sampling_mask.row(start + i).tolist()
    sampled = [value is not None for value in sample.rollout_logprobs[start:]]
    assert [version >= 0 for version in row["metadata"]["policy_versions"]] == sampled


def test_verl_columns(sample: Sample, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_samples([sample, replace(sample, routed_experts=None, sampling_mask=None)], tmp_path / "s", format="verl")
    row, bare = pq.read_table(tmp_path / "s").to_pylist()
    assert row["routed_experts"] == expert_table(sample) and bare["routed_experts"] is None
    extra = row["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (7, 7)
    assert len(extra["policy_versions"]) == len(row["response_ids"]) == len(extra["sampling_mask_offsets"]) - 1
    assert bare["extra_fields"]["sampling_mask_offsets"] is None


def test_prime_rl_columns(sample: Sample, tmp_path: Path) -> None:
    row = first_row(sample, "prime-rl", tmp_path / "s")
    told = row["routed_experts"]
    found = np.frombuffer(base64.b64decode(told["data"]), told["dtype"]).reshape(told["shape"])
    assert (
        found.shape[0] == len(row["token_ids"])
        and found[:-1].tolist() == expert_table(sample)
        and (found[-1] == FREE).all()
    )
    ids, counts = (np.frombuffer(base64.b64decode(row["sampling_mask"][name]), np.int32) for name in ("ids", "counts"))
    assert len(counts) == len(row["token_ids"]) and counts.sum() == len(ids)
    assert sample.sampling_mask is not None and ids.tolist() == sample.sampling_mask.token_ids.tolist()


async def test_the_journal_gives_it_back_and_finds_a_changed_byte() -> None:
    session = await forest()
    (node, *_) = session.tree.in_order()
    mask = SamplingMask.from_rows([[i, i + 2] for i in node.sampled_ids])
    for routing, kept in (
        (table(7, 2), mask),
        (table(7, weights=False), None),
        (None, mask),
        (table(4), empty_rows(len(mask))),
    ):
        changed = replace(node, routed_experts=routing, sampling_mask=kept)
        row = row_from_node(changed, None)
        back = node_from_row(row, None)
        assert (back.routed_experts, back.sampling_mask) == (routing, kept)
        assert row.routed_experts is not None
        broken = bytes([row.routed_experts[0] ^ 1]) + row.routed_experts[1:]
        with pytest.raises(JournalError, match="was changed"):
            node_from_row(row._replace(routed_experts=broken), None)
    assert pack_replay(None, None) == (None, {})
    old = unpack_replay(
        table(3).data, {"routed_shape": [3, 3, 2], "prompt_length": 9}
    )  # of an older release: the sampled ones
    assert old == (RoutedExperts(shape=(3, 3, 2), data=table(3).data, start=8), None)


def test_parts_join_and_what_does_not_fit_is_refused() -> None:
    whole = table(9)
    assert join_routing([whole.cut(0, 4), whole.cut(4, 9)]) == whole
    gap = join_routing([whole.cut(0, 2), whole.cut(5, 9)])
    assert gap.data == whole.cut(0, 2).data + b"\xff" * (3 * 3 * 2 * 2) + whole.cut(5, 9).data
    assert gap.shape == whole.shape
    assert own_routing(whole, parent_length=0, length=10) == whole
    assert own_routing(whole, parent_length=5, length=10) == whole.cut(
        4, 9
    )  # the parent's last token became an input only now
    for wrong in (
        lambda: join_routing([whole, whole]),
        lambda: own_routing(whole, parent_length=0, length=9),
        lambda: RoutedExperts(shape=(2, 3, 2), data=b"1"),
        lambda: SamplingMask(token_ids=TokenIds([1]), offsets=TokenIds([0, 2])),
        lambda: Completion(
            token_ids=TokenIds([4]), logprobs=(-1.0,), finish=Finish.STOP, sampling_mask=SamplingMask.from_rows([[5]])
        ),
        lambda: Completion(
            token_ids=TokenIds([4]), logprobs=(-1.0,), finish=Finish.STOP, sampling_mask=SamplingMask.from_rows([])
        ),
    ):
        with pytest.raises(TokenContractError):
            wrong()
    mask = SamplingMask.from_rows([[3, 4], [], [9]])
    assert join_masks([mask.cut(0, 1), mask.cut(1, 3)]) == mask and [len(mask.row(i)) for i in range(3)] == [2, 0, 1]


def test_an_interrupted_generation_keeps_its_bundle() -> None:
    """The second piece's prompt holds the first piece: positions it computed again are the first piece's."""
    prompt = TokenIds([1, 2, 3])
    first = Completion(token_ids=TokenIds([4, 5]), logprobs=(-1.0, -1.0), finish=Finish.ABORT, routed_experts=table(4),
                       sampling_mask=SamplingMask.from_rows([[4], [5, 6]]))  # fmt: skip
    again = np.zeros(36, "<i2").tobytes()
    second = Completion(token_ids=TokenIds([7, 8]), logprobs=(-1.0, -1.0), finish=Finish.STOP,
                        routed_experts=RoutedExperts(shape=(6, 3, 2), data=again), sampling_mask=empty_rows(2))  # fmt: skip
    done = join_pieces([first, second], prompt)
    assert done.routed_experts is not None and done.routed_experts.shape == (6, 3, 2)
    assert done.routed_experts.data == table(4).data + again[:24]
    assert done.sampling_mask == SamplingMask.from_rows([[4], [5, 6], [], []])
    assert join_pieces([first, replace(second, routed_experts=None)], prompt).routed_experts is None
