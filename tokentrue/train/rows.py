"""Samples to training rows, rewards to advantages, and rows to the forward passes of a step.

Every row of a session carries the session's advantage and is in the same minibatch. Every row of a minibatch belongs to
one rank, and all ranks make the same number of forward passes.
"""

import itertools
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tokentrue.errors import TokenContractError
from tokentrue.mismatch import grpo_advantages, rloo_advantages, whitened_advantages
from tokentrue.numerics import Array, KeptRows, sort_by_prefix
from tokentrue.numerics.routing import routing_of, routing_weights_of
from tokentrue.pixels import ReadImage, find_images
from tokentrue.records import record
from tokentrue.routing_replay import FREE
from tokentrue.samples.groups import group_sessions
from tokentrue.samples.recorded_turns import read_turns, scoring_temperatures
from tokentrue.samples.shape import spread_spans
from tokentrue.train.config import AdvantageConfig, Baseline
from tokentrue.types import Finish, PromptImage, Sample

Groups = list[list[Sample]]
# Rows that share less of themselves may be packed with others.
WORTH_SHARING = 1 / 16


@record(eq=False)
class ScoredRow:
    ids: Tensor  # int64 [T]
    temperatures: Tensor  # float32 [T]
    kept: KeptRows | None = None  # ids that the sampler's filters kept, a row for each token
    images: tuple[PromptImage, ...] = ()
    head_ids: Tensor | None = None  # int64 [T, K]: to score beside each token
    experts: Tensor | None = None  # int16 [T, layers, top_k] of the rollout, and their weights
    expert_weights: Tensor | None = None

    @property
    def length(self) -> int:
        return int(self.ids.shape[0])


@record(eq=False)
class Row(ScoredRow):
    """`mask` is True where loss falls; `rollout` is 0 and `versions` -1 where nothing was sampled."""

    sample: Sample
    group: str
    mask: Tensor  # bool [T]
    sampled: Tensor  # bool [T]
    rollout: Tensor  # float32 [T]
    versions: Tensor  # int64 [T]
    reward: float

    @property
    def session(self) -> tuple[str, str]:
        return self.group, self.sample.session_id


def row_from_sample(sample: Sample, group: str, temperature: float = 1.0, images: ReadImage | None = None) -> Row:
    """`temperature`: of samples which do not record theirs; `images` reads the bytes of their images."""
    name = f"sample {sample.sample_id}"
    if sample.reward is None:
        raise TokenContractError(f"{name} has no reward; score its session first")
    if not sample.token_ids:
        raise TokenContractError(f"{name} has no tokens; leave it out")
    if not set(sample.loss_mask) <= {0, 1}:
        raise TokenContractError(f"{name}: loss_mask holds values other than 0 and 1")
    logprobs = sample.rollout_logprobs
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    sampled = torch.tensor([value is not None for value in logprobs], dtype=torch.bool)
    if bool((mask & ~sampled).any()):
        raise TokenContractError(f"{name}: the loss mask covers a token that was not sampled")
    if bool(mask[0]):
        raise TokenContractError(f"{name}: its first token has no context and cannot be trained")
    for number, turn in enumerate(read_turns(sample)):
        if turn.row.temperature == 0 and bool(mask[turn.start : turn.end].any()):
            raise TokenContractError(f"{name}, turn {number}: sampled at temperature 0, which has no policy gradient")
    versions = spread_spans(sample, lambda span: (span.policy_version or 0) if span.kind == "sampled" else -1, -1)
    return Row(
        sample=sample,
        group=group,
        ids=torch.tensor(sample.token_ids, dtype=torch.int64),
        mask=mask,
        sampled=sampled,
        rollout=torch.tensor([0.0 if value is None else value for value in logprobs], dtype=torch.float64).float(),
        versions=torch.tensor(versions, dtype=torch.int64),
        temperatures=torch.tensor(scoring_temperatures(sample, temperature), dtype=torch.float32),
        reward=float(sample.reward),
        kept=kept_rows(sample),
        images=find_images(sample.images, images, name),
        experts=None if sample.routed_experts is None else routing_of(sample),
        expert_weights=None if sample.routed_experts is None else routing_weights_of(sample),
    )


def kept_rows(sample: Sample) -> KeptRows | None:
    mask = sample.sampling_mask
    if mask is None or not mask.token_ids:
        return None
    return KeptRows(token_ids=torch.tensor(mask.token_ids.tolist()), offsets=torch.tensor(mask.offsets.tolist()))


def with_head_ids(rows: Sequence[Row]) -> tuple[list[Row], list[Tensor]]:
    """Rows with the sampler's most likely ids, and those ids' log-probabilities, `[T, K]` each; 0 and -inf where a
    token has fewer."""
    columns = [row.sample.top_logprobs for row in rows]
    counts = [
        torch.zeros_like(row.ids) if column is None else torch.tensor(column.offsets.tolist()).diff()
        for row, column in zip(rows, columns, strict=True)
    ]
    width = max(1, *(int(each.max()) for each in counts))
    made, logprobs = list[Row](), list[Tensor]()
    for row, column, count in zip(rows, columns, counts, strict=True):
        if missing := int((row.mask & (count == 0)).sum()):
            raise TokenContractError(
                f"sample {row.sample.sample_id}: {missing} of {int(row.mask.sum())} trained tokens have no top "
                "log-probabilities, which score centering needs; sample with rollout.top_logprobs = 128 (or another K)"
            )
        is_known = torch.arange(width) < count[:, None]
        ids, values = torch.zeros(is_known.shape, dtype=torch.int64), torch.full(is_known.shape, -torch.inf)
        if column is not None:
            ids[is_known] = torch.tensor(column.token_ids.tolist())
            values[is_known] = torch.tensor(array("d", column.logprobs), dtype=torch.float32)
        made.append(replace(row, head_ids=ids))
        logprobs.append(values)
    return made, logprobs


def rows_from_groups(
    groups: Sequence[Sequence[Sample]], temperature: float = 1.0, images: ReadImage | None = None
) -> list[Row]:
    read = images and cache(images)  # most images are in many rows
    return [
        row_from_sample(sample, sample.group or f"group-{number}", temperature, read)
        for number, group in enumerate(groups)
        for sample in group
    ]


def join_tables(rows: Sequence[ScoredRow], tables: Sequence[Tensor | None], fill: int) -> list[Tensor]:
    like = next(table for table in tables if table is not None)
    return [
        like.new_full((row.length, *like.shape[1:]), fill) if table is None else table
        for row, table in zip(rows, tables, strict=True)
    ]


def token_names(rows: Sequence[ScoredRow]) -> list[Array]:
    """What decides a forward pass at each token: its id and the replayed experts."""
    columns = [[row.ids for row in rows]]
    for tables, fill in (([row.experts for row in rows], FREE), ([row.expert_weights for row in rows], 0)):
        if any(table is not None for table in tables):
            columns.append(join_tables(rows, tables, fill))
    return [
        np.concatenate([part.reshape(len(part), -1).contiguous().numpy().view(np.uint8) for part in parts], 1)
        for parts in zip(*columns, strict=True)
    ]


def list_sessions(rows: Sequence[Row]) -> list[list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(row.session, []).append(number)
    return list(found.values())


def is_truncated(row: Row) -> bool:
    """Whether a turn ended at its limit of tokens. Old files name the last turn's end alone."""
    return row.sample.finish_reason == Finish.LENGTH or any(
        turn.row.finish == Finish.LENGTH for turn in read_turns(row.sample)
    )


def mask_truncated(rows: Sequence[Row]) -> list[Row]:
    cut = {row.session for row in rows if is_truncated(row)}
    return [replace(row, mask=torch.zeros_like(row.mask)) if row.session in cut else row for row in rows]


def session_advantages(rows: Sequence[Row], baseline: Baseline, config: AdvantageConfig | None = None) -> list[float]:
    sessions = group_sessions((*row.session, row.reward) for row in rows)
    values, groups = torch.tensor(sessions.rewards, dtype=torch.float64), sessions.groups
    eps = (config or AdvantageConfig()).epsilon
    ways: Mapping[Baseline, Callable[[], Tensor]] = {
        "grpo": lambda: grpo_advantages(values, groups, eps=eps),
        "grpo_batch": lambda: grpo_advantages(values, groups, eps=eps, scale="batch"),
        "dr_grpo": lambda: grpo_advantages(values, groups, std=False),
        "rloo": lambda: rloo_advantages(values, groups),
        "whitened": lambda: whitened_advantages(values, eps=eps),
        "none": lambda: values,
    }
    made = ways[baseline]().tolist()
    return [made[number] for number in sessions.of_sample]


def longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def pack(lengths: Sequence[int], budget: int, *, padded: bool = False) -> list[list[int]]:
    """Bins of row numbers that cost at most `budget` tokens: the sum of their rows or, `padded`, their number times the
    longest. A longer row is a bin by itself."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in longest_first(lengths):
        for place, left in enumerate(room):
            cost = lengths[bins[place][0]] if padded else lengths[row]  # the first row of a bin is its longest
            if cost <= left:
                bins[place].append(row)
                room[place] -= cost
                break
        else:
            bins.append([row])
            room.append(budget - lengths[row])
    return [sorted(found) for found in bins]


def share(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Balanced by tokens: longest first, to the rank that has least."""
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for row in longest_first(lengths):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += lengths[row]
    return [sorted(rows) for rows in shares]


def split_even(count: int, parts: int) -> list[range]:
    """`parts` runs whose sizes differ by at most one; empty runs are left out."""
    bounds = [count * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds) if b > a]


@record
class Minibatch:
    """One optimiser update. `rows` are those of all ranks, the rest is this rank's. `idle` rows are counted, not
    trained on."""

    rows: tuple[int, ...]
    active: tuple[tuple[int, ...], ...]  # forward passes; empty ones keep the ranks in step
    idle: tuple[tuple[int, ...], ...]

    @property
    def bins(self) -> tuple[tuple[int, ...], ...]:
        return (*self.active, *self.idle)

    @property
    def mine(self) -> list[int]:
        return [row for bin_ in self.bins for row in bin_]


@record
class Packing:
    budget: int
    padded: bool
    rank: int = 0
    world: int = 1
    tree: bool = False

    def bins(self, rows: Sequence[Row], numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """This rank's forward passes; every rank has as many, some perhaps empty."""
        if not numbers:
            return ()
        if self.tree and not any(rows[i].images for i in numbers):
            runs, costs = join_runs([rows[i] for i in numbers], self.budget, self.world)
        else:
            runs, costs = [[k] for k in range(len(numbers))], [rows[i].length for i in numbers]
        shares = share(costs, self.world)
        packed = [pack([costs[k] for k in found], self.budget, padded=self.padded) for found in shares]
        most = max(len(bins) for bins in packed)
        own = shares[self.rank]
        mine = [tuple(sorted(numbers[i] for k in found for i in runs[own[k]])) for found in packed[self.rank]]
        return (*mine, *(() for _ in range(most - len(mine))))


def join_runs(rows: Sequence[ScoredRow], budget: int, ranks: int) -> tuple[list[list[int]], list[int]]:
    """Rows that share enough, in runs that fit a pass and leave work for every rank; and the tokens of each run."""
    order, shared = sort_by_prefix(token_names(rows))
    fresh = [rows[row].length - common for row, common in zip(order, shared, strict=True)]
    most = min(budget, -(-sum(fresh) // ranks))
    runs, costs = list[list[int]](), list[int]()
    for row, common, cost in zip(order, shared, fresh, strict=True):
        if runs and common >= rows[row].length * WORTH_SHARING and costs[-1] + cost <= most:
            runs[-1].append(row)
            costs[-1] += cost
        else:
            runs.append([row])
            costs.append(rows[row].length)
    return runs, costs


def plan_minibatches(
    rows: Sequence[Row],
    is_trained: Sequence[bool],
    packing: Packing,
    *,
    parts: int,
    shuffle_seed: tuple[object, ...] | None = None,
) -> list[Minibatch]:
    sessions = list_sessions(rows)
    if shuffle_seed is not None:
        random.Random(repr(shuffle_seed)).shuffle(sessions)
    made: list[Minibatch] = []
    for part in split_even(len(sessions), parts):
        numbers = sorted(number for place in part for number in sessions[place])
        active = packing.bins(rows, [i for i in numbers if is_trained[i]])
        idle = packing.bins(rows, [i for i in numbers if not is_trained[i]])
        made.append(Minibatch(rows=tuple(numbers), active=active, idle=idle))
    return made
