"""Reads a Hugging Face decoder as a list of layers, for a paged forward pass without the Python of the model classes.

Parameters stay in the model (q, k, v and gate, up become views of one merged tensor each). Modules that are not of the
plain dense form run their own code on exact operators. Reading can fail silently, so the loader proves it: the first
logits must equal the model's, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokentrue.errors import ExactnessError
from tokentrue.numerics import AttentionSpec, HeadNorm, Norm, Ops, PagedBatch
from tokentrue.numerics.delta import GatedDelta
from tokentrue.numerics.exact import head_size
from tokentrue.numerics.modules import activation_kind, norm_kind
from tokentrue.records import record


def read_norm(name: str, module: nn.Module) -> Norm:
    eps, form = norm_kind(name, module)
    return Norm(weight=module.weight.data, eps=eps, form=form)  # pyright: ignore


class Product(NamedTuple):
    weight: Tensor
    bias: Tensor | None


def read_product(module: nn.Linear) -> Product:
    return Product(module.weight.data, None if module.bias is None else module.bias.data)


@record
class LatentAttention:
    """q = up(norm(down(x))) (or one product); latent and rotary key = kv_down(x); keys and values =
    kv_up(norm(latent)).

    Expanded keys and values are cached, as the trainer expands them: multiplying queries by the expansion instead
    changes the order of the sums, and the bits. Values are padded to the size of keys.
    """

    q_down: Product | None
    q_norm: Norm | None
    q_up: Product
    kv_down: Product
    kv_norm: Norm
    kv_up: Product
    out: Product
    spec: AttentionSpec
    rope: str
    plain_size: int  # key values without rotary embedding; `rotary_size` values with one follow
    rotary_size: int
    value_size: int
    pairs: bool  # rotary pairs lie side by side, not in halves

    def attend(
        self, ops: Ops, h: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor], batch: PagedBatch
    ) -> Tensor:
        """[T, H*V] of hidden states [T,K]; writes the step's keys and values to the cache."""
        size = self.plain_size + self.rotary_size
        q = h if self.q_down is None else ops.linear(h, *self.q_down)
        q = q if self.q_norm is None else ops.rms_norm(q, self.q_norm.weight, self.q_norm.eps, form=self.q_norm.form)
        q = ops.linear(q, *self.q_up).view(h.shape[0], -1, size)
        down = ops.linear(h, *self.kv_down)
        latent, turning = down[:, : -self.rotary_size].contiguous(), down[:, None, -self.rotary_size :]
        latent = ops.rms_norm(latent, self.kv_norm.weight, self.kv_norm.eps, form=self.kv_norm.form)
        expanded = ops.linear(latent, *self.kv_up).view(h.shape[0], -1, self.plain_size + self.value_size)
        key, value = expanded.split((self.plain_size, self.value_size), -1)
        q = torch.cat((q[..., : self.plain_size], ops.rotary(self.halves(q[..., self.plain_size :]), cos, sin)), -1)
        turned = ops.rotary(self.halves(turning), cos, sin)
        key = torch.cat((key, turned.expand(-1, key.shape[1], -1)), -1)
        ops.store_kv(key, F.pad(value, (0, size - self.value_size)), *cache, batch.slots)
        return ops.paged_attention(q, *cache, batch, self.spec)[..., : self.value_size].flatten(1)

    def halves(self, x: Tensor) -> Tensor:
        """Reorders pairs to the layout of `Ops.rotary`."""
        return torch.cat((x[..., ::2], x[..., 1::2]), -1) if self.pairs else x


def read_latent(name: str, attention: Any) -> LatentAttention:
    strange = {child for child, _ in attention.named_children()} - LATENT_PARTS
    if strange or attention.v_head_dim > attention.qk_head_dim:
        wide = f"values of {attention.v_head_dim} for keys of {attention.qk_head_dim}"
        what = f"parts {sorted(strange)}" if strange else wide
        raise ExactnessError(f"{name} ({type(attention).__name__}) has no exact form: {what}")

    low = attention.q_lora_rank is not None
    return LatentAttention(
        q_down=read_product(attention.q_a_proj) if low else None, q_up=read_product(attention.q_b_proj if low else attention.q_proj),
        q_norm=read_norm(f"{name}.q_a_layernorm", attention.q_a_layernorm) if low else None,
        kv_down=read_product(attention.kv_a_proj_with_mqa), kv_norm=read_norm(f"{name}.kv_a_layernorm", attention.kv_a_layernorm),
        kv_up=read_product(attention.kv_b_proj), out=read_product(attention.o_proj),
        spec=AttentionSpec(scale=attention.scaling), rope="", plain_size=attention.qk_nope_head_dim, rotary_size=attention.qk_rope_head_dim,
        value_size=attention.v_head_dim, pairs=bool(getattr(attention.config, "rope_interleave", True)),
    )  # fmt: skip


@record
class Dense:
    """down(act(gate(x)) * up(x)) with gate and up merged."""

    gate_up: Product
    down: Product
    kind: str


@record
class Attention:
    qkv: Product
    out: Product
    head_norm: HeadNorm | None
    spec: AttentionSpec
    rope: str | None  # key into Decoder.ropes; None: no rotary embedding in this layer
    gated: bool  # in q, a gate of the output follows each head
    wide_norm: HeadNorm | None  # over all heads of queries (and of keys) together (OLMo-3)


@record
class Layer:
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    mixer: Attention | LatentAttention | GatedDelta
    mlp: Dense | Callable[[Tensor], Any]  # [1,T,K] -> [1,T,K], perhaps the first of a tuple


@record
class Decoder:
    """Of a pipeline's stages only the last has a final norm and a head."""

    embed: Callable[[Tensor], Tensor]
    layers: tuple[Layer, ...]
    ropes: dict[str, tuple[Tensor, Tensor]]  # cos, sin [positions, D]
    norm: Norm | None
    head: Product | None
    dtype: torch.dtype
    device: torch.device
    width: int  # hidden size
    logit_softcap: float | None
    logit_divisor: float | None  # Granite
    residual_scale: float | None  # factor of what a mixer or MLP adds (Granite)
    heads: tuple[int, int, int]  # H, J, D
    vocabulary: int
    max_positions: int
    linears: dict[tuple[int, str], nn.Linear]  # (layer, projection): those that an adapter may change
    tower: Any = None  # the model's vision tower
    axes: Tensor | None = None  # int64 [D], with a tower: time, height or width turns each value of a head

    def weights(self) -> Iterator[Tensor]:
        """Of every product that the paged forward computes."""
        for part in (part for layer in self.layers for part in (layer.mixer, layer.mlp)):
            if isinstance(part, Attention | LatentAttention | Dense):
                values = (getattr(part, field.name) for field in fields(part))
                yield from (value.weight for value in values if isinstance(value, Product))
            elif isinstance(part, GatedDelta) and part.merged is not None:
                yield part.merged[0]
        if self.head is not None:
            yield self.head.weight


TARGETS: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
LATENT_PARTS = {
    "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
}  # fmt: skip
MIXERS = {"self_attn", "linear_attn"}
ROLES = ("before_attention", "after_attention", "before_mlp", "after_mlp")
# Which norms a layer has -> the norm of each role.
INPUT, AFTER, BEFORE_MLP, AFTER_MLP = (
    f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
)
LAYOUTS: dict[frozenset[str], tuple[str | None, ...]] = {
    frozenset(filter(None, layout)): layout
    for layout in ((INPUT, None, AFTER, None), (INPUT, AFTER, BEFORE_MLP, AFTER_MLP), (None, AFTER, None, AFTER_MLP))
}


def read_decoder(model: Any, ops: Ops, *, max_positions: int) -> Decoder:
    """Merges the layers' weights in place; raises ExactnessError naming what has no exact form."""
    check_shape(model, (nn.Linear, nn.Identity))
    config, body, head = model.config.get_text_config(), body_of(model), model.get_output_embeddings()
    tower = None if body is model.model else model.model.visual
    if tower is not None and len(body.layers) <= len(tower.deepstack_visual_indexes):
        raise ExactnessError(f"{type(model).__name__} adds image features after its last layer: no exact form")
    size = next((head_size(layer.self_attn) for layer in body.layers if hasattr(layer, "self_attn")), None)
    if size is None:
        raise ExactnessError(
            f"{type(model).__name__} has no attention with a head_dim: the engine has no exact form of it"
        )
    heads = (config.num_attention_heads, config.num_key_value_heads, size)
    layers = tuple(read_layer(f"layers.{i}", layer, heads, ops) for i, layer in enumerate(body.layers))
    kinds = {layer.mixer.rope for layer in layers if not isinstance(layer.mixer, GatedDelta)}
    weight = next(parameter for parameter in body.layers.parameters() if parameter.dim() > 1)
    ropes = {key: rope_table(body, key, max_positions, heads[2], weight) for key in kinds if key is not None}
    is_last = isinstance(head, nn.Linear)
    return Decoder(
        embed=read_embedding(body.embed_tokens, getattr(config, "embedding_multiplier", None)), layers=layers, ropes=ropes,
        norm=read_norm("norm", body.norm) if is_last else None, head=read_product(head) if is_last else None, dtype=weight.dtype, device=weight.device, width=config.hidden_size,
        logit_softcap=getattr(config, "final_logit_softcapping", None), logit_divisor=getattr(config, "logits_scaling", None),
        residual_scale=getattr(config, "residual_multiplier", None),
        heads=heads, vocabulary=head.weight.shape[0] if is_last else config.vocab_size, max_positions=max_positions,
        linears={at: module for at, module in linear_modules(model).items() if is_adaptable(layers[at[0]], at[1])},
        tower=tower, axes=None if tower is None else rope_axes(body.rotary_emb, weight.device),
    )  # fmt: skip


def linear_modules(model: Any) -> dict[tuple[int, str], nn.Linear]:
    found: dict[tuple[int, str], nn.Linear] = {}
    for index, layer in enumerate(body_of(model).layers):
        for projection, parent in TARGETS.items():
            module = getattr(getattr(layer, parent, None), projection, None)
            if isinstance(module, nn.Linear):
                found[index, projection] = module
    return found


def is_adaptable(layer: Layer, projection: str) -> bool:
    return isinstance(layer.mlp if TARGETS[projection] == "mlp" else layer.mixer, Dense | Attention)


def body_of(model: Any) -> Any:
    """The decoder: a model that sees has it beside its tower."""
    return getattr(getattr(model, "model", None), "language_model", None) or getattr(model, "model", None)


def check_shape(model: Any, heads: tuple[type, ...] = (nn.Linear,)) -> None:
    body, head = body_of(model), model.get_output_embeddings()
    if not hasattr(body, "layers") or not hasattr(body, "norm") or not isinstance(head, heads):
        raise ExactnessError(
            f"{type(model).__name__} is not a decoder of the known shape (embed_tokens, layers, norm, lm_head)"
        )


def read_embedding(module: nn.Module, scale: float | None) -> Callable[[Tensor], Tensor]:
    return module if scale is None else lambda ids: module(ids) * scale


def read_layer(name: str, layer: nn.Module, heads: tuple[int, int, int], ops: Ops) -> Layer:
    children = dict(layer.named_children())
    mixer = MIXERS & children.keys()
    norms = frozenset(children) - MIXERS - {"mlp"}
    if norms not in LAYOUTS or len(mixer) != 1 or "mlp" not in children:
        raise ExactnessError(
            f"{name} ({type(layer).__name__}) has the parts {sorted(children)}: a layout without an exact form"
        )
    pairs = zip(ROLES, LAYOUTS[norms], strict=True)
    roles = {role: None if child is None else read_norm(f"{name}.{child}", children[child]) for role, child in pairs}
    if "linear_attn" in mixer:
        read: Attention | LatentAttention | GatedDelta = GatedDelta(f"{name}.linear_attn", children["linear_attn"], ops)
        read.merged = merge(*read.projections)
    elif hasattr(children["self_attn"], "kv_a_proj_with_mqa"):
        read = read_latent(f"{name}.self_attn", children["self_attn"])
    else:
        read = read_attention(name, children["self_attn"], heads)
    return Layer(**roles, mixer=read, mlp=read_mlp(f"{name}.mlp", children["mlp"]))


def read_attention(name: str, attention: Any, heads: tuple[int, int, int]) -> Attention:
    strange = {child for child, _ in attention.named_children()} - ATTENTION_PARTS
    if strange or not hasattr(attention, "q_proj"):
        raise ExactnessError(
            f"{name}.self_attn ({type(attention).__name__}) has parts without an exact form: {sorted(strange)}"
        )
    kind = getattr(attention, "layer_type", None) or getattr(attention, "attention_type", None) or ""
    norm = read_head_norm(name, attention)
    wide = norm is not None and norm.q_weight.shape[0] != heads[2]
    if norm is not None and wide and norm.q_weight.shape[0] != heads[0] * heads[2]:
        raise ExactnessError(
            f"{name}.self_attn.q_norm spans {norm.q_weight.shape[0]} values: neither a head of {heads[2]} nor all heads"
        )
    return Attention(
        qkv=merge(attention.q_proj, attention.k_proj, attention.v_proj), out=read_product(attention.o_proj),
        head_norm=None if wide else norm, wide_norm=norm if wide else None, spec=read_spec(attention, heads[2]),
        rope=kind if getattr(attention, "use_rope", True) else None, gated=attention.q_proj.out_features == 2 * heads[0] * heads[2],
    )  # fmt: skip


def read_head_norm(name: str, attention: Any) -> HeadNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    q, k = read_norm(f"{name}.q_norm", attention.q_norm), read_norm(f"{name}.k_norm", attention.k_norm)
    return HeadNorm(q_weight=q.weight, k_weight=k.weight, eps=q.eps, form=q.form)


def read_spec(attention: Any, head_dim: int) -> AttentionSpec:
    window, sinks = getattr(attention, "sliding_window", None), getattr(attention, "sinks", None)
    if window is None and type(attention).__name__.startswith(("Mistral", "Mixtral")):
        window = getattr(attention.config, "sliding_window", None)
    return AttentionSpec(
        scale=getattr(attention, "scaling", head_dim**-0.5), window=window, softcap=getattr(attention, "attn_logit_softcapping", None),
        sinks=None if sinks is None else sinks.data,
    )  # fmt: skip


def read_mlp(name: str, mlp: Any) -> Dense | Callable[[Tensor], Tensor]:
    if {child for child, _ in mlp.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        kind = activation_kind(mlp.act_fn)
        if kind is None:
            raise ExactnessError(f"{name}.act_fn ({type(mlp.act_fn).__name__}) has no exact form")
        return Dense(gate_up=merge(mlp.gate_proj, mlp.up_proj), down=read_product(mlp.down_proj), kind=kind)
    experts: Any = getattr(mlp, "experts", None)
    if getattr(experts, "is_transposed", False):
        for weight in (experts.gate_up_proj, experts.down_proj):
            # Keeps the shape [E,K,N], with the inputs of one output side by side: products read whole lines.
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    return mlp


def merge(*linears: nn.Linear) -> Product:
    weight = merge_parameters([m.weight for m in linears])
    return Product(weight, None if linears[0].bias is None else merge_parameters([m.bias for m in linears]))


def merge_parameters(parts: Sequence[Tensor]) -> Tensor:
    """Merges all into one tensor; they become views of it, so loading into them loads here."""
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole


def rope_axes(rotary: Any, device: torch.device) -> Tensor:
    """Which of three positions changes each value, found by the model's module. The proof at load checks it."""
    like = torch.zeros(1, device=device)
    with torch.no_grad():
        sines = [rotary(like, torch.eye(3, dtype=torch.int64, device=device)[i].view(3, 1, 1))[1] for i in range(3)]
    return torch.stack(sines).abs().argmax(0).flatten()


def rope_table(body: Any, key: str, positions: int, head_dim: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, computed by the model's module under `exact`: the trainer's bits."""
    rotary = body.rotary_emb
    by_kind = isinstance(rotary.rope_type, dict)
    kinds = rotary.rope_type if by_kind else {"": rotary.rope_type}
    kind = kinds.get(key, kinds.get(""))
    if kind in {"dynamic", "longrope"}:
        raise ExactnessError(f"rotary embedding {kind!r} depends on the length of the sequence: no exact form")
    like = torch.zeros(1, 1, 1, dtype=weight.dtype, device=weight.device)
    at = torch.arange(positions, device=weight.device)[None]
    if hasattr(rotary, "mrope_section"):  # text has the same position on all three axes
        at = at.expand(3, 1, -1)
    with torch.no_grad():
        cos, sin = rotary(like, at, key) if by_kind else rotary(like, at)
    frequencies = getattr(rotary, f"{key}_inv_freq" if by_kind else "inv_freq")
    if cos.shape[-1] == frequencies.numel():  # one number a pair (gpt-oss), not one for each of its values
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    if cos.shape[-1] > head_dim:
        raise ExactnessError(f"rotary embedding of {cos.shape[-1]} values for heads of {head_dim} has no exact form")
    return cos[0].contiguous(), sin[0].contiguous()
