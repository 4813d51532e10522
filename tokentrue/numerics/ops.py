"""The operators whose bits must not depend on the batch: one interface, one implementation per device.

Invariant of every method: the result of a row (a token, a query) depends only on that row's inputs; never on the other
rows of the call, the chunking of its prefill, the page its keys are in, or on prefill versus decode. Engine and trainer
call the same methods, so equal inputs give equal bits on both sides.

Shapes: T tokens (all sequences of a step back to back), S sequences, H query heads, J key/value heads (H % J == 0), D
head size, K/N in/out features, V vocabulary, E experts, I expert width, B block (page) size.

Paged cache of one layer: `k_cache`, `v_cache` `[num_blocks, J, B, D]`, from `Ops.new_cache`. Block 0 is never allocated
and always zero: padding of the block tables. Entries are always finite. The token at position p of a sequence is in
block `table[p // B]`, row `p % B`; its slot is `block * B + p % B`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Self

import torch
from torch import Tensor

from tokentrue.records import record

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Linears = set[tuple[int, int, bool]]  # (K, N, bias)
Heads = set[tuple[int, int, int]]  # (H, J, D)


@record
class ModelShapes:
    """(K, N, bias) of every linear by dtype, routers and experts included, and (H, J, D) of every attention; `rows`:
    (K, N) of those that are cut into leaves."""

    linears: Mapping[torch.dtype, Linears]
    heads: frozenset[tuple[int, int, int]]
    dtype: torch.dtype
    rows: frozenset[tuple[int, int]] = frozenset()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits: no tolerance, and -0 is not 0."""
    kind = INTEGERS[a.element_size()]
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@record
class AttentionSpec:
    scale: float
    window: int | None = None  # a query at position p sees keys p-window+1 .. p
    softcap: float | None = None  # scores become softcap*tanh(s/softcap)
    sinks: Tensor | None = None  # [H] (gpt-oss): an additional score of each query head, without a value
    causal: bool = True  # False (vision, `Ops.attention` alone): every query sees all keys of its sequence


@record(eq=False)
class Branches:
    """Where the keys of a packed tree's segments are; all int32."""

    path: Tensor  # [L]: the token of the pack at each place of the rows, which lie end to end
    table: Tensor  # [S, 3]: where a row through the segment starts in `path`, how much of it ends with the segment, and
    # the end of the segment's descendants in the pack
    positions: Tensor  # [T]: of each token in its row


@record
class Packed:
    """Whole sequences back to back (training), from position 0; with `branches` segments of a tree, a token's
    descendants after it."""

    cu_seqlens: Tensor  # int32 [S+1], on the device: where each starts
    lengths: tuple[int, ...]  # the same on the host
    branches: Branches | None = None

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Self:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(cu_seqlens=ends.to(device), lengths=lengths)


@record
class PagedBatch:
    """One engine step: the newest `q_lens[i]` tokens of each sequence, back to back.

    Keys of the new tokens are stored before attention reads. Host tuples are for planning; a captured graph reads only
    the device tensors (padding rows have slot 0 and context length 0 or 1).
    """

    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], where each new token's key and value go
    cu_q: Tensor  # int32 [S+1]
    context_lens: Tensor  # int32 [S], keys that the sequence's last new token sees, itself included
    block_tables: Tensor  # int32 [S, W], padded with 0
    q_lens: tuple[int, ...]
    contexts: tuple[int, ...]  # context_lens on the host
    num_decodes: int  # the first ones, with one query each
    plan: Any = None  # derived from q_lens; given for a captured step that is replayed with other lengths
    rope: Tensor | None = None  # int64 [T] or [3,T]: positions of the rotary embedding where images shift them


class NormForm(IntEnum):
    """What follows n = x / sqrt(mean(x²) + eps) in float32."""

    PLAIN = 0  # round(n), then times weight, rounded again (Llama, Qwen3)
    UNIT_OFFSET = 1  # n * (1 + weight) in float32, one rounding (Gemma, Qwen3-Next)
    ONE_ROUNDING = 2  # n * weight in float32, one rounding (OLMo, gpt-oss)


@record
class Norm:
    weight: Tensor
    eps: float
    form: NormForm


@record
class HeadNorm:
    """RMS norm over the head size of queries and keys, before the rotary embedding."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    form: NormForm = NormForm.PLAIN


@record
class LowRank:
    """One adapted linear of a LoRA adapter: A [r, K], B [N, r]."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(slots=True)
class LowRankStack:
    """The adapted parts of one merged product, of all loaded adapters."""

    ends: tuple[int, ...]  # of the product's projections: columns
    parts: dict[int, tuple[LowRank | None, ...]] = field(default_factory=dict)  # slot -> one for each projection
    packed: Any = None  # a device's joint form of all parts, if any


@dataclass(slots=True, kw_only=True)
class RowSlots:
    """Which adapter changes each token row of a step."""

    slots: Tensor  # int64 [T] on the device; `count` for a row without an adapter
    count: int
    by_slot: Mapping[int, Tensor]  # the rows of each slot; empty in a captured step
    groups: Any = None  # what a device derives from `slots`, once a step


@record(eq=False)
class DeltaInputs:
    """Of one gated-delta layer, by key head (J; G value heads each): projections q, k [T,J,K], v [T,J,G*V], b, a
    [T,J,G], the convolution's weight [C,taps] over all channels of q, then k, then v, and A_log, dt_bias [H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    a: Tensor
    convolution: Tensor
    a_log: Tensor
    dt_bias: Tensor

    @property
    def value_heads(self) -> int:
        return self.b.shape[1] * self.b.shape[2]

    @property
    def value_size(self) -> int:
        return self.v.shape[2] // self.b.shape[2]


@record(eq=False)
class DeltaStates:
    """Last inputs of the convolution [slots,taps-1,C] and states [slots,H,K,V] float32 (a device may order a head's values
    otherwise); `slots` [S] of the sequences."""

    history: Tensor
    state: Tensor
    slots: Tensor


@record
class ClampedSwiglu:
    """gpt-oss: gate at most `limit`, up within ±`limit`, then (up + 1) * (gate * sigmoid(gate * alpha)), rounded after
    each.
    """

    alpha: float
    limit: float


@record
class ExpertWeights:
    """As the model stores them: gate_up [E,2I,K] and down [E,K,I], gate before up; biases [E,2I] and [E,K].
    `interleaved` (gpt-oss): gate_up [E,K,2I] with gate and up alternating, down [E,I,K].
    """

    gate_up: Tensor
    down: Tensor
    act: str | ClampedSwiglu
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    interleaved: bool = False

    def matrices(self, expert: int) -> tuple[Tensor, Tensor]:
        """[2I,K] and [K,I], perhaps transposed views."""
        gate_up, down = self.gate_up[expert], self.down[expert]
        return (gate_up.t(), down.t()) if self.interleaved else (gate_up, down)

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            return both[..., ::2], both[..., 1::2]
        gate, up = both.chunk(2, -1)
        return gate, up


@record(eq=False)
class Ranks:
    """Processes that share every layer; `gather` returns the tensor of each, in order."""

    index: int
    size: int
    gather: Callable[[Tensor], Sequence[Tensor]]


def join(parts: Sequence[Tensor]) -> Tensor:
    """Sum of a power of two of tensors: neighbours in pairs, then pairs of pairs."""
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def round_sum(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A float32 sum and its bias, rounded once."""
    return (total if bias is None else total + bias.float()).to(dtype)


def apply_rotation(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Values beyond the width of `cos` are unchanged. Computes in `cos`'s dtype if that is wider."""
    width = cos.shape[-1]
    if cos.dtype != x.dtype:
        return apply_rotation(x.to(cos.dtype), cos, signed_sin).to(x.dtype)
    if width < x.shape[-1]:
        return torch.cat((apply_rotation(x[..., :width], cos, signed_sin), x[..., width:]), -1)
    return (x * cos).add_(torch.cat((x[..., width // 2 :], x[..., : width // 2]), -1).mul_(signed_sin))


class Ops(ABC):
    """All exact operators of one device. (grad) works under autograd; the others are for inference only. Results are
    rounded to the tensor's dtype exactly where a docstring says so.
    """

    block_size: int
    # Whether `token_logprobs` and `logits_gradient` take logits in the model's dtype.
    reads_16bit: bool = False
    # While it is a list, every mixture of experts appends its choice [T,k] and the weights.
    routes: list[tuple[Tensor, Tensor]] | None = None
    _rotation: tuple[Tensor, Tensor, Tensor] | None = None
    # Parts of K in row-parallel products, see `numerics.leaves`; 1: one sum.
    leaves: int = 1
    ranks: Ranks | None = None

    # ---- rows x features
    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """(grad) x [..., K] @ weight [N, K]^T + bias; float32 sum, one rounding. Column n does not depend on N."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, form: NormForm = NormForm.PLAIN) -> Tensor:
        """(grad) Over the last dimension in float32, scaled and rounded as `form` says."""

    @abstractmethod
    def activation(self, x: Tensor, kind: str) -> Tensor:
        """(grad) `silu` as x/(1+exp(-x)), `gelu_pytorch_tanh`, …, computed in float32, rounded to x's dtype."""

    def function(self, x: Tensor, name: str) -> Tensor:
        """`torch.cos` or `torch.sin`, each value by itself."""
        return getattr(torch, name)(x)

    @abstractmethod
    def act_mul(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        """(grad) activation(gate) * up, rounded after each; both may be views of one `[..., 2*I]` tensor."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T,H,D], cos/sin [T,R] (model dtype): x*cos + rotate_half(x)*sin, rounded after each product and after the
        sum, without fused multiply-add, as Hugging Face's `apply_rotary_pos_emb`.

        With R < D only the first R values of a head are rotated. With float32 cos/sin the sum is rounded once (OLMo-3).
        """
        if self._rotation is None or self._rotation[0] is not cos:  # the same for every layer of a step
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)  # (-x)*sin and x*(-sin) have the same bits
            self._rotation = (cos, cos.unsqueeze(1), signed.unsqueeze(1))
        return apply_rotation(x, *self._rotation[1:])

    @abstractmethod
    def log_softmax(self, logits: Tensor) -> Tensor:
        """Over the last dimension, in and out float32."""

    def leaf_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, *, rounded: bool = True
    ) -> Tensor:
        """`join` of the float32 products of `leaves` parts of K; float32 without bias unless `rounded`."""
        pairs = zip(x.float().chunk(leaves, -1), self.leaf_weights(weight, leaves), strict=True)
        total = join([self.linear(part.contiguous(), own) for part, own in pairs])
        return round_sum(total, bias, x.dtype) if rounded else total

    def leaf_weights(self, weight: Tensor, leaves: int) -> list[Tensor]:
        return [part.float().contiguous() for part in weight.chunk(leaves, -1)]

    def experts(self, x: Tensor, index: Tensor, weight: Tensor, experts: ExpertWeights) -> Tensor:
        """(grad) x [T,K], index/weight [T,k] -> [T,K]."""
        return self.add_slots(self.expert_rows(x, index, experts), weight)

    @abstractmethod
    def expert_rows(self, x: Tensor, index: Tensor, experts: ExpertWeights) -> Tensor:
        """[T*k,K]: per slot linear, bias, gate_values, linear, bias, each rounded to x's dtype; any values for an index
        past the last expert."""

    @abstractmethod
    def add_slots(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[T,K]: rows times weight, rounded; slots added in order, in the rows' dtype."""

    @abstractmethod
    def delta_rule(self, inputs: DeltaInputs, sequences: Packed, states: DeltaStates | None) -> Tensor:
        """Convolution and gated delta rule over the next tokens of each sequence: [T,H,V] in the model's dtype.
        `states`, if given, are where the sequences start and are replaced by those after the last token.
        """

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(grad) rms_norm(x [T,H,V]) (plain form) times silu(gate) in float32, rounded; gate [T,J,G*V]."""
        normed = self.rms_norm(x, weight, eps, form=NormForm.PLAIN)
        return (normed.float() * self.activation(gate.reshape(x.shape).float(), "silu")).to(x.dtype)

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T,H*D] times sigmoid(gate [T,H,D]), rounded after each."""
        return x * self.activation(gate.flatten(1), "sigmoid")

    # ---- attention
    @abstractmethod
    def attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
        """(grad) q [T,H,D], k/v [T,J,D] -> [T,H,D]; in each sequence or along a tree's rows, with the bits of
        `paged_attention`."""

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        pass

    @abstractmethod
    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec
    ) -> Tensor:
        """q [T,H,D] -> [T,H,D], keys and values from the pages; prefill chunks and decodes mixed."""

    def pack(self, weights: Iterable[Tensor]) -> None:  # noqa: B027
        """Prepares a faster form with the same bits; these weights are constant until the next call."""

    def new_cache(self, num_blocks: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, shaped [num_blocks, J, B, D]."""
        return torch.zeros(num_blocks, heads, self.block_size, head_dim, dtype=dtype, device=device)

    # ---- self-knowledge
    @abstractmethod
    def contract(self) -> Mapping[str, str]:
        """Operator -> implementation, tile and accumulation dtype, as text: goes into the fingerprint."""

    @abstractmethod
    def self_test(self, *, linears: Linears, heads: Heads, dtype: torch.dtype) -> list[str]:
        """Checks the invariant on this machine for these shapes, and falls back where it does not hold.

        Returns one sentence per fallback; raises ExactnessError if there is none.
        """

    # ---- compositions: override to fuse, never to change a bit
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, form: NormForm = NormForm.PLAIN
    ) -> tuple[Tensor, Tensor]:
        """residual' = residual + x (rounded); returns (rms_norm(residual'), residual')."""
        total = residual + x
        return self.rms_norm(total, weight, eps, form=form), total

    def add_low_rank(self, y: Tensor, x: Tensor, low: LowRank) -> Tensor:
        """(grad) y + linear(linear(x, A), B) * scale: products in the adapter's dtype, the sum in the wider one."""
        delta = self.linear(self.linear(x.to(low.a.dtype), low.a), low.b) * low.scale
        return (y + delta).to(y.dtype)

    def pack_low_ranks(self, stack: LowRankStack, count: int) -> None:  # noqa: B027
        """Prepares a faster form with the same bits, after the parts of `stack` (`count` slots) have changed."""

    def adapted_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stack: LowRankStack, rows: RowSlots
    ) -> Tensor:
        """The merged product [T,N] of x [T,K], with `add_low_rank` of each row's adapter per projection."""
        y = self.linear(x, weight, bias)
        for slot, at in rows.by_slot.items():
            start = 0
            for low, end in zip(stack.parts.get(slot, ()), stack.ends, strict=False):
                if low is not None:
                    part = y[:, start:end].index_select(0, at)
                    y[at, start:end] = self.add_low_rank(part, x.index_select(0, at), low)
                start = end
        return y

    def route(self, logits: Tensor, top_k: int, normalise: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(grad) Weights [T,k] in logits' dtype, and experts: softmax of logits [T,E] in float32, its `top_k` largest
        (or those of `given` experts), over their sum if `normalise`."""
        probs = torch.softmax(logits.float(), -1)
        weight, index = torch.topk(probs, top_k, dim=-1) if given is None else (probs.gather(-1, given), given)
        weight = weight / weight.sum(-1, keepdim=True) if normalise else weight
        return weight.to(logits.dtype), index

    def gate_values(self, gate: Tensor, up: Tensor, act: str | ClampedSwiglu) -> Tensor:
        if isinstance(act, str):
            return self.act_mul(gate, up, act)
        gate, up = gate.clamp(max=act.limit), up.clamp(min=-act.limit, max=act.limit)
        return (up + 1) * (gate * self.activation(gate * act.alpha, "sigmoid"))

    def gated_linear(self, x: Tensor, gate_up: Tensor, kind: str) -> Tensor:
        """(grad) act_mul of the two halves of linear(x, gate_up [2*I, K]); rounded after each."""
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return self.act_mul(gate, up, kind)

    def norm_linear(
        self, h: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, kind: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """(linear, or with `kind` gated_linear, of add_rms_norm(h, residual); residual + h). For inference."""
        normed, total = self.add_rms_norm(h, residual, norm.weight, norm.eps, form=norm.form)
        return (self.linear(normed, weight, bias) if kind is None else self.gated_linear(normed, weight, kind)), total

    def logits_gradient(self, logits: Tensor, ids: Tensor, grads: Tensor, *, entropy: bool) -> Tensor:
        """[R,V]: d/dlogits of grads[r,0] * logprob(ids[r]) + grads[r,1] * entropy (if requested)."""
        table = self.log_softmax(logits.float())
        probs = table.exp()
        gradient = probs * -grads[:, :1]
        if entropy:
            table = table.masked_fill(table == -torch.inf, 0.0)  # ids that filters removed: probability 0
            gradient -= probs * (table - (probs * table).sum(-1, keepdim=True)) * grads[:, 1:]
        return gradient.scatter_add_(1, ids[:, None], grads[:, :1])

    def token_logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        """log_softmax(logits [R,V] float32)[r, ids[r]]."""
        return self.log_softmax(logits).gather(-1, ids[:, None]).squeeze(-1)

    def prepare_qkv(
        self, qkv: Tensor, heads: tuple[int, int, int], norm: HeadNorm | None, cos: Tensor | None, sin: Tensor | None,
        k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, *, gated: bool = False,
    ) -> Tensor:  # fmt: skip
        """qkv [T, (H+2J)*D] of one merged linear: head norms, rotary (cos/sin [T,R]) if any, keys and values into the
        pages; returns q [T,H,D]. Queries and keys go together: half the calls. `gated`: a gate follows each query head.
        """
        h, j, d = heads
        if gated:
            wide = 2 * h * d
            qkv = torch.cat((qkv[:, :wide].view(-1, h, 2, d)[:, :, 0].flatten(1), qkv[:, wide:]), -1)
        split = qkv.view(-1, h + 2 * j, d)
        qk, v = split[:, : h + j], split[:, h + j :]
        if norm is not None:
            q = self.rms_norm(qk[:, :h], norm.q_weight, norm.eps, form=norm.form)
            qk = torch.cat((q, self.rms_norm(qk[:, h:], norm.k_weight, norm.eps, form=norm.form)), 1)
        if cos is not None and sin is not None:
            qk = self.rotary(qk, cos, sin)
        self.store_kv(qk[:, h:], v, k_cache, v_cache, batch.slots)
        return qk[:, :h]
