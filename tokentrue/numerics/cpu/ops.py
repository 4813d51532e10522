"""Exact operators on the CPU, from plain torch. `self_test` first compares bits for every shape of the model."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics.cpu.arithmetic import (
    ACTIVATIONS,
    PLAIN_ROWS,
    TILE,
    Linear,
    Product,
    compute,
    make_wide_values,
    onednn_product,
    plain_product,
    tiled_product,
    transposed_product,
)
from tokentrue.numerics.cpu.attention import KEYS, TILES, PagedAttention, attention
from tokentrue.numerics.delta import plain_rule
from tokentrue.numerics.ops import (
    AttentionSpec,
    DeltaInputs,
    DeltaStates,
    ExpertWeights,
    Heads,
    Linears,
    NormForm,
    Ops,
    Packed,
    PagedBatch,
    same_bits,
)
from tokentrue.numerics.selftest import differing_cuts, differing_runs, fill_pages


class CpuOps(Ops):
    block_size = 16

    def __init__(self) -> None:
        # K for which oneDNN's float32 rows depend on the batch, whatever N: merged weights must agree.
        self.structural: set[int] = set()
        # K for which ordinary products have oneDNN's bits.
        self.plain: set[int] = set()
        self.has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()
        self.paged = PagedAttention(self.block_size)
        self._packed: dict[tuple[int, int], tuple[Product, Tensor]] = {}
        self._leaves: dict[int, list[Tensor]] | None = None  # by address, once weights are packed

    # ---- rows x features
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        grad = torch.is_grad_enabled()
        packed = self._packed.get((weight.data_ptr(), weight.shape[0])) if self._packed and not grad else None
        if packed is not None and x.dim() == 2 and x.is_contiguous():  # an engine step: the fast path
            return packed[0](x, packed[1], bias)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        form, packed_weight = packed or (self.product(weight, flat.shape[0]), weight)
        if flat.shape[0] == 0:
            out = flat.new_empty(0, weight.shape[0])
        elif grad and (x.requires_grad or weight.requires_grad):
            out = Linear.apply(flat, weight, bias, form)
        else:
            out = form(flat, packed_weight, bias)
        return out.view(*x.shape[:-1], weight.shape[0])  # pyright: ignore

    def product(self, weight: Tensor, rows: int) -> Product:
        if not self.fits_onednn(weight):
            return tiled_product
        return plain_product if weight.shape[1] in self.plain and rows >= PLAIN_ROWS else onednn_product

    def fits_onednn(self, weight: Tensor) -> bool:
        n, k = weight.shape
        return n > 1 and weight.dtype == torch.float32 and self.has_onednn and k not in self.structural

    def pack(self, weights: Iterable[Tensor]) -> None:
        self._packed.clear()
        self._leaves = {}
        self._packed.update(self.packed_forms(weights))

    def packed_forms(self, weights: Iterable[Tensor]) -> Iterator[tuple[tuple[int, int], tuple[Product, Tensor]]]:
        for weight in filter(self.fits_onednn, weights):
            if weight.shape[1] in self.plain:
                form: tuple[Product, Tensor] = (transposed_product, weight.t().contiguous())
            else:
                form = (onednn_product, torch.ops.mkldnn._reorder_linear_weight(weight, None))
            yield (weight.data_ptr(), weight.shape[0]), form

    def leaf_weights(self, weight: Tensor, leaves: int) -> list[Tensor]:
        """An engine's weights are constant, so they are cut once."""
        if self._leaves is None:
            return super().leaf_weights(weight, leaves)
        key = weight.data_ptr()
        if key not in self._leaves:
            self._leaves[key] = super().leaf_weights(weight, leaves)
            self._packed.update(self.packed_forms(self._leaves[key]))
        return self._leaves[key]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, form: NormForm = NormForm.PLAIN) -> Tensor:
        if x.dtype == torch.float32 and weight.dtype == torch.float32 and form is not NormForm.UNIT_OFFSET:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
        if form is not NormForm.PLAIN:
            return (normed * (1.0 + weight.float() if form is NormForm.UNIT_OFFSET else weight.float())).to(x.dtype)
        return weight * normed.to(x.dtype)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        if kind not in ACTIVATIONS:
            raise ExactnessError(f"activation {kind!r} has no exact form; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[kind](x.float()).to(x.dtype)

    def function(self, x: Tensor, name: str) -> Tensor:
        return compute(name, x)

    def delta_rule(self, inputs: DeltaInputs, sequences: Packed, states: DeltaStates | None) -> Tensor:
        return plain_rule(self, inputs, sequences.lengths, states)

    def act_mul(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
            return self.activation(gate, kind) * up
        return self.activation(gate, kind).mul_(up)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return F.log_softmax(logits, -1)

    def expert_rows(self, x: Tensor, index: Tensor, experts: ExpertWeights) -> Tensor:
        """Copies transposed weights: the start-up checks cover only contiguous rows."""
        flat, number = index.reshape(-1), experts.gate_up.shape[0]
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=number)[:number].tolist()
        rows = x.index_select(0, order // index.shape[1])
        outs, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                gate_up, down = experts.matrices(expert)
                both = self.linear(rows[start : start + count], gate_up.contiguous())
                both = both if experts.gate_up_bias is None else both + experts.gate_up_bias[expert]
                out = self.linear(self.gate_values(*experts.split(both), experts.act), down.contiguous())
                outs.append(out if experts.down_bias is None else out + experts.down_bias[expert])
                start += count
        if start < len(flat):
            outs.append(x.new_zeros(len(flat) - start, x.shape[1]))
        return torch.cat(outs).index_select(0, torch.argsort(order))

    def add_slots(self, rows: Tensor, weight: Tensor) -> Tensor:
        scaled = rows.view(*weight.shape, -1) * weight.unsqueeze(-1).to(rows.dtype)
        total = scaled[:, 0]
        for slot in range(1, weight.shape[1]):
            total = total + scaled[:, slot]
        return total

    # ---- attention
    def attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
        return attention(q, k, v, packed, spec)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec
    ) -> Tensor:
        return self.paged(q, k_cache, v_cache, batch, spec)

    def new_cache(self, num_blocks: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Head-major underneath, so that gathered pages of a head lie as one run of keys.
        return torch.zeros(heads, num_blocks, self.block_size, head_dim, dtype=dtype, device=device).transpose(0, 1)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        for new, target in ((k, k_cache), (v, v_cache)):
            pages = target.transpose(0, 1)
            pages.view(pages.shape[0], -1, pages.shape[-1]).index_copy_(1, slots, new.transpose(0, 1))

    # ---- self-knowledge
    def contract(self) -> Mapping[str, str]:
        tiles = f"{TILE}-row tiles"
        linear = "oneDNN linear, rows >= 2, or a product equal to it in bits, float32" if self.has_onednn else tiles
        return {
            "linear.float32": linear + (f"; {tiles} for K in {sorted(self.structural)}" if self.structural else ""),
            "linear.16-bit": tiles,
            "attention": f"float32 fold over {KEYS}-key blocks, query tiles {'/'.join(map(str, TILES))}, "
            f"rows >= {self.paged.rows}, sink last",
            "rms_norm": "float32, torch rms_norm per row",
            "activation": "float32; silu as x/(1+exp(-x)), sigmoid as 1/(1+exp(-x)), "
            "softplus as max(x,0)+log1p(exp(-|x|))",
            "rotary": "elementwise, rounded after each product",
            "experts": "per-expert linear, then bias; slots added in order",
            "log_softmax": "float32, torch log_softmax per row",
        }

    def self_test(self, *, linears: Linears, heads: Heads, dtype: torch.dtype) -> list[str]:
        check_functions(dtype)
        notes = self.check_linears(linears, dtype)
        return notes + self.check_heads(heads) if heads else notes

    def check_linears(self, linears: Linears, dtype: torch.dtype) -> list[str]:
        threads, notes, plain = torch.get_num_threads(), [], dict[int, bool]()
        for k, n, bias in sorted(linears):
            if dtype == torch.float32 and self.has_onednn and n > 1:
                if rows_independent(onednn_product, k, n, bias, dtype, threads):
                    plain[k] = plain.get(k, True) and plain_equals_onednn(k, n, bias, threads)
                    continue
                self.structural.add(k)
                notes.append(
                    f"linear {k}x{n} {dtype}: oneDNN's rows depend on the batch here; {TILE}-row tiles instead"
                )
            if not rows_independent(tiled_product, k, n, bias, dtype, threads):
                raise ExactnessError(
                    f"linear {k}x{n} {dtype}: even a fixed {TILE}-row tile gives a row different bits at different places"
                )
        if dtype == torch.float32:
            self.plain = (self.plain | {k for k, holds in plain.items() if holds}) - self.structural
        return notes

    def check_heads(self, heads: Heads) -> list[str]:
        threads, notes, least = torch.get_num_threads(), [], 1
        for h, j, d in sorted(heads):
            for rows in (least, *LEAST_ROWS):
                if rows >= least and attention_independent(max(rows, h // j), h, j, d, threads):
                    least = max(rows, h // j)
                    break
            else:
                raise ExactnessError(
                    f"attention with {h}/{j} heads of {d}: no row count up to {LEAST_ROWS[-1]} is independent of the batch"
                )
            if least > 8:
                notes.append(f"attention {h}/{j}x{d}: at least {least} rows per product")
        self.paged.rows = least
        return notes


# What follows is cached by shape, dtype and thread count: properties of the machine, not of a model.
ROWS = (1, 2, 3, 8, 17, 32, 33, 64, 129, 256)
ELEMENTWISE = ("exp", "log", "log1p", "tanh", "sqrt", "reciprocal", "cos", "sin", "erf")
POSITIVE = ("log", "log1p", "sqrt")
COMPUTED_APART = ("cos", "sin", "erf")
ROWWISE = ("softmax", "sum", "mean", "log_softmax")
WIDTHS = (4, 8, 60, 128, 2000)
LEAST_ROWS = (2, 4, 8, 16, 32)


def check_functions(dtype: torch.dtype) -> None:
    """Of `modules.ARITHMETIC` those that are more than one rounded operation."""
    for name in ELEMENTWISE:
        for kind in {dtype, torch.float32}:
            if not elements_independent(name, kind):
                raise ExactnessError(
                    f"torch.{name} in {kind}: a value's bits depend on its place or its neighbours on this machine"
                )
    for name in ROWWISE:
        if not all(sums_independent(name, width, torch.get_num_threads()) for width in WIDTHS):
            raise ExactnessError(f"torch.{name} over a row: bits depend on the number of rows on this machine")


@cache
def elements_independent(name: str, dtype: torch.dtype) -> bool:
    x = make_wide_values(4099).to(dtype)
    function = partial(compute, name) if name in COMPUTED_APART else getattr(torch, name)
    cuts = product(range(0, 120, 7), (1, 3, 8, 17, 33))
    return not any(differing_cuts(function, x.abs() if name in POSITIVE else x, cuts))


@cache
def sums_independent(name: str, width: int, threads: int) -> bool:
    x = torch.randn(200, width, generator=torch.Generator().manual_seed(width))
    return not any(differing_cuts(partial(getattr(torch, name), dim=-1), x, product((0, 1, 7, 64), (1, 2, 3, 17, 100))))


@cache
def plain_equals_onednn(k: int, n: int, bias: bool, threads: int) -> bool:
    """True if ordinary and transposed products have oneDNN's bits for every row count that uses them."""
    x, w, b = example(k, n, bias, torch.float32)
    transposed = w.t().contiguous()
    with torch.no_grad():
        wanted = onednn_product(x, w, b)
        for m in (*ROWS, *range(4, 16), 24, 48, 100, 128, 200):
            rows = x[:m].contiguous()
            if not same_bits(transposed_product(rows, transposed, b), wanted[:m]):
                return False
            if m >= PLAIN_ROWS and not same_bits(plain_product(rows, w, b), wanted[:m]):
                return False
    return True


def example(k: int, n: int, bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(k * 1000003 + n)
    x = torch.randn(ROWS[-1], k, generator=generator).to(dtype)
    w = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    return x, w, torch.randn(n, generator=generator).to(dtype) if bias else None


@cache
def rows_independent(form: Product, k: int, n: int, bias: bool, dtype: torch.dtype, threads: int) -> bool:
    """Rows of a large product against the same rows in smaller ones, at other positions, and with another N."""
    x, w, b = example(k, n, bias, dtype)
    cuts = ((start, m) for m in ROWS for start in (0, ROWS[-1] - m))
    with torch.no_grad():
        if any(differing_cuts(lambda rows: form(rows, w, b), x, cuts)):
            return False
        few, wide_bias = x[:5].contiguous(), None if b is None else torch.cat((b, b))
        return n == 1 or same_bits(form(few, torch.cat((w, w)), wide_bias), form(few, w, b).repeat(1, 2))


@cache
def attention_independent(rows: int, h: int, j: int, d: int, threads: int) -> bool:
    """Whole sequences against decodes, chunks and batches of the same queries."""
    random = torch.Generator().manual_seed(h * 1009 + d)
    ops, keys, spec = CpuOps(), 3 * KEYS, AttentionSpec(scale=d**-0.5)
    ops.paged.rows = rows
    q, k, v = (torch.randn(keys, heads, d, generator=random) for heads in (h, j, j))
    starts = (0, 1, 100, 127, 128, 255, 256)
    runs = [(first, tile) for tile in TILES for first in (*starts, keys - tile) if first % KEYS + tile <= KEYS]
    with torch.no_grad():
        whole = ops.attention(q, k, v, Packed.of((keys,)), spec)
        q_two, k_two, v_two, wanted = (torch.cat((x, x[:200])) for x in (q, k, v, whole))
        if not same_bits(ops.attention(q_two, k_two, v_two, Packed.of((keys, 200)), spec), wanted):
            return False
        pages = fill_pages(ops, k, v, random)
        return not any(differing_runs(ops, q, whole, pages, spec, runs, copies) for copies in (1, 3))
