"""A Llama in plain functions, so that one program holds every source of mismatch of `experiments.grid`: the trainer's
forward pass over whole sequences, and an engine's over one token at a time with a cache.

Several runs are one program: every weight and every activation has a leading dimension of runs, and a product is one
batched product over them. A run's weights are views of one row of a flat tensor [runs, parameters], so that a copy, a
cast and an optimiser step are one kernel each. Shape suffixes: S runs, B rows of a run, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Linear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`experts` > 1: every third layer is a mixture, of which a token takes two."""

    width: int = 576
    layers: int = 30
    heads: int = 9
    cache_heads: int = 3
    head_width: int = 64
    inner: int = 1536
    vocabulary: int = 8192
    rope_base: float = 1e5
    epsilon: float = 1e-5
    experts: int = 1

    def is_mixture(self, layer: int) -> bool:
        return self.experts > 1 and layer % 3 == 2

    @property
    def mixtures(self) -> int:
        return sum(self.is_mixture(n) for n in range(self.layers))

    def parameters(self) -> dict[str, tuple[int, ...]]:
        d, inner = self.width, self.inner
        q, kv = self.heads * self.head_width, self.cache_heads * self.head_width
        found: dict[str, tuple[int, ...]] = {"embed": (self.vocabulary, d), "norm": (d,)}
        for n in range(self.layers):
            each = (self.experts,) if self.is_mixture(n) else ()
            found |= {
                f"{n}.norm1": (d,),
                f"{n}.norm2": (d,),
                f"{n}.qkv": (q + 2 * kv, d),
                f"{n}.out": (d, q),
                f"{n}.up": (*each, 2 * inner, d),
                f"{n}.down": (*each, d, inner),
            }
            if each:
                found[f"{n}.router"] = (self.experts, d)
        return found

    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters().values())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Parameters by name, with the leading dimensions of `flat`."""
        found, start = {}, 0
        for name, shape in self.parameters().items():
            end = start + math.prod(shape)
            found[name] = flat[..., start:end].unflatten(-1, shape)
            start = end
        return found


def load_shape(model: Path, vocabulary: int) -> Shape:
    said = json.loads((model / "config.json").read_text())
    base = (said.get("rope_parameters") or {}).get("rope_theta") or said["rope_theta"]
    width, heads = said["hidden_size"], said["num_attention_heads"]
    return Shape(
        width=width, layers=said["num_hidden_layers"], heads=heads, cache_heads=said["num_key_value_heads"],
        head_width=said.get("head_dim") or width // heads, inner=said["intermediate_size"],
        vocabulary=min(vocabulary, said["vocab_size"]), rope_base=float(base), epsilon=float(said["rms_norm_eps"]),
    )  # fmt: skip


def flatten(shape: Shape, state: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    """The flat float32 weights of a Hugging Face Llama's state, its vocabulary cut to `ids`."""
    flat = torch.empty(shape.size())
    views = shape.views(flat)
    views["embed"].copy_(state["model.embed_tokens.weight"][torch.tensor(ids)])
    views["norm"].copy_(state["model.norm.weight"])
    for n in range(shape.layers):
        layer = {key.removeprefix(f"model.layers.{n}."): value for key, value in state.items() if f".{n}." in key}
        parts = {
            "norm1": layer["input_layernorm.weight"],
            "norm2": layer["post_attention_layernorm.weight"],
            "qkv": torch.cat(
                [
                    interleave(layer["self_attn.q_proj.weight"], shape.heads),
                    interleave(layer["self_attn.k_proj.weight"], shape.cache_heads),
                    layer["self_attn.v_proj.weight"],
                ]
            ),
            "out": layer["self_attn.o_proj.weight"],
            "up": torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]),
            "down": layer["mlp.down_proj.weight"],
        }
        for name, value in parts.items():
            views[f"{n}.{name}"].copy_(value)
    return flat


def upcycle(dense: Shape, flat: Tensor, mixture: Shape, *, noise: float = 0.1, seed: int = 0) -> Tensor:
    """Sparse upcycling (arXiv 2212.05055): every expert is the dense layer, here with `noise` of its own (relative to
    the weights' spread), so that it matters which one a token takes."""
    random = torch.Generator().manual_seed(seed)
    made = torch.empty(mixture.size())
    views, source = mixture.views(made), dense.views(flat)
    for name, view in views.items():
        if name.endswith(".router"):
            view.normal_(0, 0.5 / math.sqrt(mixture.width) * 2, generator=random)
        elif view.dim() == 3:
            spread = noise * source[name].std()
            view.copy_(source[name].expand_as(view) + spread * torch.randn(view.shape, generator=random))
        else:
            view.copy_(source[name])
    return made


def rope_table(shape: Shape, length: int, device: torch.device) -> Tensor:
    """[T, head_width / 2], complex."""
    half = shape.head_width // 2
    rates = shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection so that the two numbers that rotate together are neighbours: `rotate` is then a
    product of complex numbers, three kernels instead of nine."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """In float32, rounded once."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """[S, ..., in] and [S, out, in]: [S, ..., out]."""
    rows = x.flatten(1, -2)
    if x.device.type == "cpu":  # few CPUs multiply bfloat16 fast: sums in float32, rounded once
        rows, weight = rows.float(), weight.float()
    return torch.bmm(rows, weight.transpose(1, 2)).to(x.dtype).view(*x.shape[:-1], -1)


def embed(ids: Tensor, weights: Weights) -> Tensor:
    runs = torch.arange(len(ids), device=ids.device).view(-1, *[1] * (ids.dim() - 1))
    return weights["embed"][runs, ids]


def normalise(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, epsilon) * weight.view(len(weight), *[1] * (x.dim() - 2), -1)


def feed_forward(
    shape: Shape, weights: Weights, n: int, x: Tensor, product: Linear, routed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The layer's output and, of a mixture, the experts that each token took ([..., 2], `routed` where it is given)."""
    up, down = weights[f"{n}.up"], weights[f"{n}.down"]
    if not shape.is_mixture(n):
        gate, value = product(x, up).chunk(2, dim=-1)
        return product(F.silu(gate) * value, down), None
    scores = linear(x.float(), weights[f"{n}.router"].float()).softmax(-1)
    chosen = scores.topk(2, dim=-1).indices if routed is None else routed
    kept = scores.gather(-1, chosen)
    share = torch.zeros_like(scores).scatter(-1, chosen, kept / kept.sum(-1, keepdim=True))
    total = torch.zeros_like(x)
    for e in range(shape.experts):  # every expert sees every token: simple, and the same sum for any routing
        gate, value = product(x, up[:, e]).chunk(2, dim=-1)
        total = total + share[..., e : e + 1].to(x.dtype) * product(F.silu(gate) * value, down[:, e])
    return total, chosen


def forward(
    shape: Shape, weights: Weights, ids_SBT: Tensor, positions_SBT: Tensor, bias_SBTT: Tensor, rope: Tensor, *,
    product: Linear = linear, routed: Tensor | None = None, cache: Callable[[int, Tensor, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The trainer's pass over whole rows, also the engine's over prompts (then `cache` takes keys and values): hidden
    states and the experts taken, [mixture layers, S, B, T, 2]. `bias` is added to attention's scores."""
    length = ids_SBT.shape[2]
    x = embed(ids_SBT, weights)
    turn = rope[positions_SBT].view(-1, length, 1, shape.head_width // 2)
    bias = bias_SBTT.flatten(0, 1)[:, None]
    heads, kv, width = shape.heads, shape.cache_heads, shape.head_width
    taken: list[Tensor] = []
    for n in range(shape.layers):
        h = normalise(x, weights[f"{n}.norm1"], shape.epsilon)
        qkv = product(h, weights[f"{n}.qkv"]).view(-1, length, heads + 2 * kv, width)
        q, k = rotate(qkv[:, :, : heads + kv], turn).split([heads, kv], dim=2)
        v = qkv[:, :, heads + kv :]
        if cache is not None:
            cache(n, k, v)
        k, v = (part.repeat_interleave(heads // kv, 2) for part in (k, v))
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), attn_mask=bias)
        x = x + product(mixed.transpose(1, 2).reshape(*ids_SBT.shape, heads * width), weights[f"{n}.out"])
        h = normalise(x, weights[f"{n}.norm2"], shape.epsilon)
        which = None if routed is None or not shape.is_mixture(n) else routed[len(taken)]
        made, chosen = feed_forward(shape, weights, n, h, product, which)
        if chosen is not None:
            taken.append(chosen)
        x = x + made
    return normalise(x, weights["norm"], shape.epsilon), torch.stack(taken) if taken else None


def causal_bias(ids_SBT: Tensor, dtype: torch.dtype) -> Tensor:
    length = ids_SBT.shape[2]
    bias = torch.full((length, length), -torch.inf, dtype=dtype, device=ids_SBT.device).triu(1)
    return bias.expand(*ids_SBT.shape, length)


class Cache:
    """Keys and values of every layer, [layers, S · B, heads, T, head_width]. `copies` neighbours of the B rows have one prompt."""

    def __init__(
        self, shape: Shape, rows: int, length: int, *, dtype: torch.dtype, device: torch.device, copies: int = 1
    ) -> None:
        size = (shape.layers, rows, shape.cache_heads, length, shape.head_width)
        self.dtype, self.copies = dtype, copies
        kept = torch.uint8 if dtype.itemsize == 1 else dtype  # few kernels index float8
        self.keys, self.values = (torch.zeros(size, dtype=kept, device=device) for _ in range(2))

    def pack(self, x: Tensor) -> Tensor:
        return x if self.dtype.itemsize > 1 else x.contiguous().clamp(-448, 448).to(self.dtype).view(torch.uint8)

    def unpack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x if self.dtype.itemsize > 1 else x.view(self.dtype).to(dtype)

    def write_prompt(self, n: int, k: Tensor, v: Tensor) -> None:
        for kept, new in ((self.keys, k), (self.values, v)):
            kept[n, :, :, : new.shape[1]] = self.pack(new.transpose(1, 2)).repeat_interleave(self.copies, 0)


def decode(
    shape: Shape, weights: Weights, ids_SB: Tensor, at_SB: Tensor, rope: Tensor, cache: Cache, *,
    product: Linear = linear,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The engine's pass: one token per row, at each row's own position."""
    at, length = at_SB.flatten(), cache.keys.shape[3]
    rows = len(at)
    every = torch.arange(rows, device=at.device)
    x = embed(ids_SB, weights)
    turn = rope[at, None]
    heads, kv, width = shape.heads, shape.cache_heads, shape.head_width
    hidden = torch.arange(length, device=at.device)[None, :] > at[:, None]
    bias = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -torch.inf)[:, None, None]
    taken: list[Tensor] = []
    for n in range(shape.layers):
        h = normalise(x, weights[f"{n}.norm1"], shape.epsilon)
        qkv = product(h, weights[f"{n}.qkv"]).view(rows, heads + 2 * kv, width)
        q, k = rotate(qkv[:, : heads + kv], turn).split([heads, kv], dim=1)
        cache.keys[n][every, :, at] = cache.pack(k)
        cache.values[n][every, :, at] = cache.pack(qkv[:, heads + kv :])
        keys, values = (cache.unpack(kept[n], x.dtype) for kept in (cache.keys, cache.values))
        scores = q.view(rows, kv, heads // kv, width) @ keys.transpose(-1, -2)
        shares = torch.add(bias, scores, alpha=width**-0.5).softmax(-1, dtype=torch.float32).to(x.dtype)
        x = x + product((shares @ values).reshape(*ids_SB.shape, heads * width), weights[f"{n}.out"])
        h = normalise(x, weights[f"{n}.norm2"], shape.epsilon)
        made, chosen = feed_forward(shape, weights, n, h, product, None)
        if chosen is not None:
            taken.append(chosen)
        x = x + made
    return normalise(x, weights["norm"], shape.epsilon), torch.stack(taken) if taken else None


def head(hidden: Tensor, weights: Weights) -> Tensor:
    """Log-probabilities over the vocabulary, in float32."""
    return linear(hidden, weights["embed"]).float().log_softmax(-1)
