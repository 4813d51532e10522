"""Requests, and their continuous batching: who runs next, how many tokens of each, in which cache blocks. No arithmetic.

Prefill and decode are mixed; requests are served in order of arrival. A running request is preempted (its blocks freed,
its tokens kept and recomputed later) only to make room for an earlier one. A request whose missing prefix is being
computed by another one waits a step or two and then shares it.
"""

import bisect
import hashlib
import itertools
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from tokentrue.engine.images import RequestImages
from tokentrue.ids import TokenIds
from tokentrue.records import record
from tokentrue.routing_replay import join_routing
from tokentrue.types import Chunk, Completion, Finish, RoutedExperts, Sampling, SamplingMask, spans_from_runs


@record
class StepInputs:
    """The newest `counts[i]` tokens of each sequence, from position `starts[i]`; `ids` are back to back."""

    ids: list[int]
    starts: list[int]
    counts: list[int]
    blocks: list[list[int]]  # cache blocks of each sequence
    adapters: list[str | None]
    state_slots: list[int]  # recurrent-state slots of a hybrid model; else empty
    state_copies: list[tuple[int, int]]  # between state slots, in order, before the step
    images: list[RequestImages | None]  # of each sequence; empty if none has any

    @property
    def rows(self) -> int:
        return len(self.ids)


_numbers = itertools.count()


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@record
class Sampled:
    token_id: int
    logprob: float
    raw_logprob: float
    top: dict[int, float] | None = None
    kept: bytes = b""  # the ids that filters kept, little-endian int32


class Request(msgspec.Struct, kw_only=True, eq=False):
    """Mutable, owned by the engine's thread. `tokens[:computed]` have their keys and values in `blocks`.

    Columns of numbers instead of one object per token: many objects would slow down garbage collection.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int]
    max_tokens: int
    listener: "Callable[[Request], None] | None" = None  # called in the engine's thread for new tokens, and at the end
    adapter: str | None = None
    images: RequestImages | None = None
    prefix: bytes = b""  # seed of its cache block names, different for different weights
    wants_prompt: bool = False
    wants_routes: bool = False
    number: int = msgspec.field(default_factory=lambda: next(_numbers))
    arrived_s: float = msgspec.field(default_factory=time.monotonic)
    first_token_s: float | None = None
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    tokens: list[int] = []
    computed: int = 0
    state_slot: int | None = None  # recurrent-state slot of a hybrid model
    blocks: list[int] = []
    hashes: list[bytes] = []
    logprobs: list[float] = []
    raw_logprobs: list[float] = []  # if `shaped`; else they equal `logprobs`
    tops: list[dict[int, float]] = []
    routes: list[RoutedExperts] = []  # from the pass that computed them first
    kept: list[bytes] = []  # if `shaped`: the ids that filters kept for each token
    versions: list[int] = []  # updated last: other threads may read this many tokens
    prompt_logprobs: list[float] = []
    finish: Finish | None = None
    stopped_by: int | str | None = None
    error: Exception | None = None
    shaped: bool = False  # filters apply: the distribution is not softmax(logits / temperature); set below

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.shaped = bool(self.sampling.filters)

    @property
    def remaining(self) -> int:
        """Tokens whose keys are not cached yet; 1 in plain decoding."""
        return len(self.tokens) - self.computed

    @property
    def num_sampled(self) -> int:
        return len(self.versions)

    @property
    def num_routed(self) -> int:
        """Positions whose experts are known."""
        return self.routes[-1].end if self.routes else 0

    @property
    def sampled_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    def take(self, sampled: Sampled, version: int) -> None:
        if self.shaped:
            self.raw_logprobs.append(sampled.raw_logprob)
            self.kept.append(sampled.kept)
        if self.sampling.top_logprobs:
            self.tops.append(sampled.top or {})
        self.take_run((sampled.token_id,), (sampled.logprob,), version)

    def take_run(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        self.tokens.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(token_ids))
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()

    def chunks(self, start: int) -> Iterator[Chunk]:
        """The sampled tokens from `start` on, one chunk per policy version."""
        prompt = len(self.prompt_ids)
        for version, run in itertools.groupby(self.versions[start:]):
            end = start + len(list(run))
            yield Chunk(
                token_ids=tuple(self.tokens[prompt + start : prompt + end]),
                logprobs=tuple(self.logprobs[start:end]),
                policy_version=version,
                sampling_mask=mask_of(self.kept[start:end]) if self.sampling.truncates else None,
            )
            start = end

    def completion(self, fingerprint: str) -> Completion:
        assert self.finish is not None
        return Completion(
            token_ids=TokenIds(self.sampled_ids),
            logprobs=tuple(self.logprobs),
            finish=self.finish,
            versions=spans_from_runs((len(list(run)), version) for version, run in itertools.groupby(self.versions)),
            prompt_tokens=len(self.prompt_ids),
            stopped_by=self.stopped_by,
            top_logprobs=tuple(self.tops) if self.sampling.top_logprobs else None,
            raw_logprobs=tuple(self.raw_logprobs) if self.shaped else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.wants_prompt else None,
            routed_experts=join_routing(self.routes) if self.routes else None,
            sampling_mask=mask_of(self.kept) if self.sampling.truncates else None,
            fingerprint=fingerprint,
            prompt_digest=TokenIds(self.prompt_ids).sha256(),
        )


def mask_of(rows: Sequence[bytes]) -> SamplingMask:
    offsets = [0, *itertools.accumulate(len(row) // 4 for row in rows)]
    return SamplingMask(token_ids=TokenIds.from_bytes(b"".join(rows)), offsets=TokenIds(offsets))


# ---- memory
def block_hash(parent: bytes, tokens: Sequence[int], images: bytes = b"") -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes() + images, key=parent, digest_size=16).digest()


class BlockPool:
    """Cache blocks. A full block is named by the hash of its tokens, its images and the previous block's name: equal names mean
    equal prefixes from position 0 and so equal contents. Freed blocks keep their name until they are reused, oldest
    first. Block 0 is the null block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._named: dict[bytes, int] = {}
        self._name: dict[int, bytes] = {}
        self.routes: dict[bytes, RoutedExperts] = {}  # experts of a named block, where a request recorded them

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def take(self) -> int:
        """Contents are undefined; the caller has checked `num_free`."""
        block, _ = self._free.popitem(last=False)
        name = self._name.pop(block, None)
        if name is not None:
            del self._named[name]
            self.routes.pop(name, None)
        self._references[block] = 1
        return block

    def share(self, name: bytes) -> int | None:
        block = self._named.get(name)
        if block is None:
            return None
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1
        return block

    def has(self, name: bytes) -> bool:
        return name in self._named

    def name(self, block: int, name: bytes) -> None:
        """`block` is full and computed. If an equal block already has the name, this one stays private."""
        if name not in self._named and block not in self._name:
            self._named[name] = block
            self._name[block] = name

    def release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if block not in self._name:  # nothing to remember: use it first
                self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Call after a weight change: all contents are stale."""
        self._named.clear()
        self._name.clear()
        self.routes.clear()


ZERO = 0


class StatePool:
    """Recurrent states of a hybrid model: a slot per running request, and snapshots under the name of the last block.
    Copies between slots are queued and executed, in order, before the next step. Slot 0 is always zero."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, 0, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._snapshots)

    def take(self) -> int:
        """A slot in the zero state; evicts the oldest snapshot if needed."""
        slot = self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]
        self._copies.append((ZERO, slot))
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def has(self, name: bytes) -> bool:
        return name in self._snapshots

    def restore(self, name: bytes) -> int:
        self._snapshots.move_to_end(name)  # so that taking a slot does not evict it
        slot = self.take()
        self._copies.append((self._snapshots[name], slot))
        return slot

    def snapshot(self, name: bytes, slot: int) -> None:
        """Copies `slot` under `name`, unless that exists or no slot is free."""
        if name in self._snapshots or not (self._free or self._snapshots):
            return
        kept = self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]
        self._copies.append((slot, kept))
        self._snapshots[name] = kept

    def forget(self) -> None:
        self._free.extend(self._snapshots.values())
        self._snapshots.clear()

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to), in order; the caller executes them now."""
        copies, self._copies = self._copies, []
        return copies


@record
class ScheduleLimits:
    max_requests: int = 256  # running at once
    step_tokens: int = 2048  # new tokens per step, all requests together
    chunk_tokens: int = 512  # tokens of one prompt per step
    max_waiting: int = 4096


@dataclass(frozen=True, slots=True)
class Work:
    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.request.tokens)


def cut_steps(
    scheduler: "Scheduler",
    ids: Sequence[int],
    pieces: Sequence[int],
    adapter: str | None = None,
    images: RequestImages | None = None,
) -> list[StepInputs]:
    """Steps that compute `ids` piece by piece (cycling through `pieces`); their blocks are free afterwards."""
    request = Request(
        prompt_ids=tuple(ids), sampling=Sampling(), seed=0, stop_ids=frozenset(), max_tokens=1, adapter=adapter, images=images
    )  # fmt: skip
    scheduler.grow(request, len(ids))
    steps, start = list[StepInputs](), 0
    for piece in itertools.cycle(pieces):
        count = min(piece, len(ids) - start)
        if count == 0:
            break
        steps.append(scheduler.inputs([Work(request, start, count)]))
        start += count
    scheduler.free(request)
    return steps


class Scheduler:
    def __init__(self, pool: BlockPool, limits: ScheduleLimits, *, states: StatePool | None = None) -> None:
        self.pool = pool
        self.states = states
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.prefix_hits = 0
        self.prefix_queries = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def next_batch(self) -> list[Work]:
        """Decodes first, then pieces of prompts, all with their blocks."""
        budget = self.limits.step_tokens
        batch: list[Work] = []
        for request in list(self.running):
            if budget == 0:
                break
            if request.phase is not Phase.RUNNING:
                continue  # preempted for an earlier one in this loop
            count = self.piece(request, budget)
            if self.make_room(request, request.computed + count):
                batch.append(Work(request, request.computed, count))
                budget -= count
        batch = [work for work in batch if work.request.phase is Phase.RUNNING]
        batch += self.admit(budget)
        return sorted(batch, key=lambda work: work.count > 1)

    def piece(self, request: Request, budget: int) -> int:
        count = min(request.remaining, budget, self.limits.chunk_tokens)
        if self.states is not None:
            # A piece ends where the prompt's last whole block does, so that its state can be kept.
            border = (len(request.tokens) - 1) // self.pool.block_size * self.pool.block_size
            if request.computed < border < request.computed + count:
                return border - request.computed
        return count

    def admit(self, budget: int) -> Iterable[Work]:
        deferred: list[Request] = []
        coming = {name for request in self.running for name in self.names_in_work(request)}
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_requests:
            request = self.waiting.popleft()
            names = self.prefix_names(request)
            if any(name in coming and not self.pool.has(name) for name in names):
                deferred.append(request)
                continue
            self.share_prefix(request, names)
            count = self.piece(request, budget)
            if not self.grow(request, request.computed + count):
                self.free(request)
                self.waiting.appendleft(request)
                break
            request.phase = Phase.RUNNING
            bisect.insort(self.running, request, key=lambda one: one.number)  # by arrival, also after a preemption
            coming.update(self.names_in_work(request))
            budget -= count
            yield Work(request, request.computed, count)
        self.waiting.extendleft(reversed(deferred))

    def inputs(self, batch: Sequence[Work]) -> StepInputs:
        """The step as numbers, with the queued copies between state slots."""
        requests = [work.request for work in batch]
        return StepInputs(
            ids=[token for work in batch for token in work.request.tokens[work.start : work.start + work.count]],
            starts=[work.start for work in batch], counts=[work.count for work in batch], blocks=[list(r.blocks) for r in requests],
            adapters=[r.adapter for r in requests], state_slots=[r.state_slot for r in requests if r.state_slot is not None],
            state_copies=[] if self.states is None else self.states.take_copies(),
            images=[r.images for r in requests] if any(r.images for r in requests) else [],
        )  # fmt: skip

    # ---- prefixes
    def prefix_names(self, request: Request) -> list[bytes]:
        """Names of full blocks that could be shared. The last token is always computed: its logits are needed."""
        if request.wants_prompt and not request.num_sampled:
            return []  # every prompt position's logits are wanted
        return self.names(request, (len(request.tokens) - 1) // self.pool.block_size)

    def names(self, request: Request, count: int) -> list[bytes]:
        """Names of its first `count` blocks, which are full."""
        size = self.pool.block_size
        for n in range(len(request.hashes), count):
            parent = request.hashes[-1] if n else request.prefix
            start, end = n * size, (n + 1) * size
            images = b"" if request.images is None else request.images.names_in(start, end)
            request.hashes.append(block_hash(parent, request.tokens[start:end], images))
        return request.hashes[:count]

    def names_in_work(self, request: Request) -> list[bytes]:
        size = self.pool.block_size
        return request.hashes[request.computed // size :] if request.remaining > 1 else []

    def share_prefix(self, request: Request, names: list[bytes]) -> None:
        if request.wants_routes:  # as far as the experts of every position are known
            known = request.num_routed // self.pool.block_size
            unknown = (i for i, name in enumerate(names) if i >= known and name not in self.pool.routes)
            names = names[: next(unknown, len(names))]
        if self.states is not None:  # as far as a snapshot of the state goes
            names = names[: max((i + 1 for i, name in enumerate(names) if self.states.has(name)), default=0)]
            if not all(self.pool.has(name) for name in names):
                names = []
        for name in names:
            block = self.pool.share(name)
            if block is None:
                break
            request.blocks.append(block)
        if self.states is not None:
            request.state_slot = self.states.restore(names[-1]) if names else self.states.take()
        request.computed = len(request.blocks) * self.pool.block_size
        if request.wants_routes:
            for index, name in enumerate(names[: len(request.blocks)]):
                start = index * self.pool.block_size
                if start + self.pool.block_size > request.num_routed:
                    part = replace(self.pool.routes[name], start=start)
                    request.routes.append(part.cut(request.num_routed, part.end))
        self.prefix_hits += request.computed
        self.prefix_queries += len(request.tokens)

    # ---- blocks
    def grow(self, request: Request, length: int) -> bool:
        """Allocates blocks for `length` tokens, if there are enough."""
        missing = -(-length // self.pool.block_size) - len(request.blocks)
        if missing > self.pool.num_free:
            return False
        request.blocks.extend(self.pool.take() for _ in range(missing))
        if self.states is not None and request.state_slot is None:
            request.state_slot = self.states.take()
        return True

    def make_room(self, request: Request, length: int) -> bool:
        """Grows by preempting later arrivals; False if the request itself is preempted."""
        while not self.grow(request, length):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.free(request)
        request.phase = Phase.WAITING
        self.preemptions += 1
        self.waiting.appendleft(request)

    def free(self, request: Request) -> None:
        for block in reversed(request.blocks):  # so that the oldest free block is the end of a prefix, not its start
            self.pool.release(block)
        request.blocks.clear()
        request.computed = 0
        if self.states is not None and request.state_slot is not None:
            self.states.release(request.state_slot)
            request.state_slot = None

    # ---- results
    def record(self, work: Work, *, ahead: bool = False) -> None:
        """The keys of this piece are cached: names its full blocks. `ahead`: its recurrent state is already that of
        later tokens, so no snapshot can be taken."""
        request, size = work.request, self.pool.block_size
        request.computed = work.start + work.count
        first, names = work.start // size, self.names(request, request.computed // size)
        for block, name in zip(request.blocks[first:], names[first:], strict=False):
            self.pool.name(block, name)
        if self.states is not None and request.state_slot is not None and request.computed % size == 0 and not ahead:
            self.states.snapshot(names[-1], request.state_slot)

    def record_routes(self, request: Request, routes: RoutedExperts) -> None:
        """Appends the experts of its next positions; blocks that became known keep theirs for other requests."""
        size, before = self.pool.block_size, request.num_routed
        request.routes.append(replace(routes, start=before))
        for index in range(before // size, min(request.num_routed // size, len(request.hashes))):
            name, start, end = request.hashes[index], index * size, (index + 1) * size
            if self.pool.has(name) and name not in self.pool.routes:
                parts = [part.cut(start, end) for part in request.routes if part.start < end and part.end > start]
                self.pool.routes[name] = join_routing(parts)

    def finish(self, request: Request) -> None:
        if request.phase is Phase.RUNNING:
            self.running.remove(request)
        elif request.phase is Phase.WAITING:
            self.waiting.remove(request)
        self.free(request)
        request.phase = Phase.FINISHED

    def restart(self) -> None:
        """Call after a weight change: preempts all requests and drops the cache."""
        for request in reversed(list(self.running)):
            self.preempt(request)
        self.pool.forget()
        if self.states is not None:
            self.states.forget()
