"""What a trainer replays to compute the rollout's distribution, as raw little-endian bytes."""

from array import array
from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import accumulate, pairwise
from math import prod
from typing import Annotated

from msgspec import Meta

from tokentrue.errors import TokenContractError
from tokentrue.ids import EMPTY, TokenIds
from tokentrue.records import record

Count = Annotated[int, Meta(ge=0)]
Width = Annotated[int, Meta(ge=1, le=4096)]  # bounded: a damaged number must not allocate gigabytes
FREE = -1
"""Unknown expert: the trainer's router chooses at this position."""
_FREE_BYTES = FREE.to_bytes(2, "little", signed=True)
_ZERO_WEIGHT = bytes(4)


@record
class RoutedExperts:
    """Routed experts by position. `data` is little-endian int16 of `shape` `[positions, layers, top_k]`, experts in
    slot order.

    Row i belongs to position `start + i` of prompt and sampled ids; the last sampled token is never an input, so it
    has no row. `weights`, little-endian float32 of the same shape, multiplied the experts' outputs."""

    shape: tuple[Count, Width, Width]
    data: bytes
    start: Count = 0
    weights: bytes | None = None

    def __post_init__(self) -> None:
        count = prod(self.shape)
        if len(self.data) != 2 * count:
            raise TokenContractError(f"routed experts: {len(self.data)} bytes do not make int16 of shape {self.shape}")
        if self.weights is not None and len(self.weights) != 4 * count:
            raise TokenContractError(
                f"routed experts: {len(self.weights)} bytes do not make float32 weights of shape {self.shape}"
            )
        if self.start < 0:
            raise TokenContractError(f"routed experts: start at position {self.start}")

    @property
    def end(self) -> int:
        return self.start + self.shape[0]

    def cut(self, start: int, end: int) -> "RoutedExperts":
        _, layers, top_k = self.shape
        first = max(start, self.start)
        count = max(0, min(end, self.end) - first)
        at, stop = (first - self.start) * layers * top_k, (first - self.start + count) * layers * top_k
        weights = None if self.weights is None else self.weights[4 * at : 4 * stop]
        return RoutedExperts(
            shape=(count, layers, top_k), data=self.data[2 * at : 2 * stop], start=first, weights=weights
        )


def join_routing(parts: Sequence[RoutedExperts]) -> RoutedExperts:
    """One table; parts are in order of position, and gaps between them are FREE."""
    if len({part.shape[1:] for part in parts}) != 1:
        raise TokenContractError(f"routed experts differ in shape: {sorted({part.shape[1:] for part in parts})}")
    _, layers, top_k = parts[0].shape
    has_weights = all(part.weights is not None for part in parts)
    data, weights, at = bytearray(), bytearray(), parts[0].start
    for part in parts:
        if part.start < at:
            raise TokenContractError(f"routed experts: position {part.start} is recorded twice")
        gap = (part.start - at) * layers * top_k
        data += _FREE_BYTES * gap + part.data
        weights += _ZERO_WEIGHT * gap + (part.weights or b"")
        at = part.end
    shape = (at - parts[0].start, layers, top_k)
    return RoutedExperts(
        shape=shape, data=bytes(data), start=parts[0].start, weights=bytes(weights) if has_weights else None
    )


@record
class SamplingMask:
    """The ids that top-p, top-k and min-p kept, as compressed sparse rows: row i is `token_ids[offsets[i]:offsets[i +
    1]]`. An empty row means that nothing was removed, or nothing was sampled.

    >>> mask = SamplingMask.from_rows([[5, 9], [], [7]])
    >>> mask.offsets, mask.row(0)
    (TokenIds([0, 2, 2, 3]), TokenIds([5, 9]))"""

    token_ids: TokenIds
    offsets: TokenIds

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", TokenIds(self.token_ids))
        object.__setattr__(self, "offsets", TokenIds(self.offsets))
        ends = self.offsets.tolist()
        if not ends or ends[0] != 0 or ends[-1] != len(self.token_ids) or any(b < a for a, b in pairwise(ends)):
            raise TokenContractError(f"sampling mask: offsets must rise from 0 to {len(self.token_ids)}")

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> "SamplingMask":
        offsets = accumulate(map(len, rows), initial=0)
        return cls(token_ids=TokenIds(i for row in rows for i in row), offsets=TokenIds(offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> TokenIds:
        return self.token_ids[self.offsets[index] : self.offsets[index + 1]]

    def rows(self) -> list[TokenIds]:
        return [self.row(index) for index in range(len(self))]

    def cut(self, start: int, end: int) -> "SamplingMask":
        first = self.offsets[start]
        offsets = [value - first for value in self.offsets[start : end + 1]]
        return SamplingMask(token_ids=self.token_ids[first : self.offsets[end]], offsets=TokenIds(offsets))

    def first_missing(self, sampled_ids: Sequence[int]) -> int | None:
        rows = enumerate(zip(sampled_ids, self.rows(), strict=False))
        return next((index for index, (token, row) in rows if row and token not in row), None)


@record
class TopLogprobs(SamplingMask):
    """The sampler's most likely ids of each token and their log-probabilities, little-endian float64."""

    logprobs: bytes = b""

    def __post_init__(self) -> None:
        SamplingMask.__post_init__(self)
        if len(self.logprobs) != 8 * len(self.token_ids):
            raise TokenContractError(
                f"top log-probabilities: {len(self.logprobs)} bytes do not make float64 for {len(self.token_ids)} ids"
            )

    @classmethod
    def from_tops(cls, tops: Sequence[tuple[Mapping[int, float], int]]) -> "TopLogprobs":
        """From each token's log-probabilities and how many were asked for: engines add the sampled id."""
        known = [[(token, value) for token, value in top.items() if -9000.0 < value <= 0.0] for top, _ in tops]
        chosen = [nlargest(count, row, key=lambda pair: pair[1]) for row, (_, count) in zip(known, tops, strict=True)]
        mask = SamplingMask.from_rows([[token for token, _ in row] for row in chosen])
        values = array("d", [value for row in chosen for _, value in row])
        return cls(token_ids=mask.token_ids, offsets=mask.offsets, logprobs=values.tobytes())


def join_masks(parts: Sequence[SamplingMask]) -> SamplingMask:
    offsets = [0]
    for part in parts:
        base = offsets[-1]
        offsets += [base + value for value in part.offsets[1:]]
    return SamplingMask(token_ids=TokenIds.concat(part.token_ids for part in parts), offsets=TokenIds(offsets))


def join_masks_if_whole(parts: Sequence[SamplingMask | None]) -> SamplingMask | None:
    """None if any part has none: an empty row would mean that nothing was removed."""
    known = [part for part in parts if part is not None]
    return join_masks(known) if known and len(known) == len(parts) else None


def empty_rows(count: int) -> SamplingMask:
    return SamplingMask(token_ids=EMPTY, offsets=TokenIds([0] * (count + 1)))


def own_routing(routing: RoutedExperts | None, *, parent_length: int, length: int) -> RoutedExperts | None:
    """What a turn adds to its parent's routing, including the parent's last sampled token, which was not an input
    before. The lengths count prompt and sampled tokens."""
    if routing is None:
        return None
    if routing.end > max(0, length - 1):
        raise TokenContractError(f"routed experts end at position {routing.end - 1}, the last input is at {length - 2}")
    return routing.cut(max(0, parent_length - 1), length - 1)
