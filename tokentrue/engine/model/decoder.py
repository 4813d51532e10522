"""A Hugging Face decoder read as a list of layers, for a forward pass over pages without the Python of the model
classes.

The parameters stay where the model keeps them (q, k, v and gate, up become views of one merged tensor each, so that one
product serves them), and whatever is not the plain dense form (a mixture of experts, say) is run by the model's own
module on exact operators. Reading can go wrong in silence, so the loader proves it: the first logits of this forward
must equal the model's own, bit for bit, or it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.engine.model.latent import LatentAttention, Norm, data_of, read_latent, read_norm
from tokentrue.errors import ExactnessError
from tokentrue.numerics import AttentionSpec, HeadNorm, Ops
from tokentrue.numerics.delta import GatedDelta
from tokentrue.numerics.fingerprint import head_size
from tokentrue.numerics.patching.replacements import activation_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """down(act(gate(x)) * up(x)) with gate and up merged."""

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    head_norm: HeadNorm | None
    spec: AttentionSpec
    rope: str | None  # key into Decoder.ropes; None: no rotary embedding in this layer
    gated: bool  # q holds a gate of the output behind each head
    wide_norm: HeadNorm | None  # over all heads of queries (and of keys) together (OLMo-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    mixer: Attention | LatentAttention | GatedDelta
    mlp: Dense | Callable[[Tensor], Any]  # [1,T,K] -> [1,T,K], perhaps the first of a tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Everything that a step needs, by reference. Of a pipeline's stages only the last has a final norm and a head."""

    embed: Callable[[Tensor], Tensor]
    layers: tuple[Layer, ...]
    ropes: dict[str, tuple[Tensor, Tensor]]  # cos, sin [positions, D]
    norm: Norm | None
    head: Tensor | None
    dtype: torch.dtype
    device: torch.device
    width: int  # of the hidden states
    head_bias: Tensor | None
    logit_softcap: float | None
    logit_divisor: float | None  # Granite
    residual_scale: float | None  # of what a mixer or MLP adds (Granite)
    heads: tuple[int, int, int]  # H, J, D
    vocabulary: int
    max_positions: int


MIXERS = {"self_attn", "linear_attn"}
ROLES = ("before_attention", "after_attention", "before_mlp", "after_mlp")
LAYOUTS: dict[frozenset[str], tuple[str | None, ...]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): ("input_layernorm", None, "post_attention_layernorm", None),
    frozenset({"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}): (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""Which norms a layer has -> their roles."""


def read_decoder(model: Any, ops: Ops, *, max_positions: int) -> Decoder:
    """The layers of `model`, merged in place; raises ExactnessError with the name of what has no exact form."""
    config = model.config.get_text_config()
    body, head = getattr(model, "model", None), model.get_output_embeddings()
    if (
        body is None
        or not hasattr(body, "layers")
        or not hasattr(body, "norm")
        or not isinstance(head, nn.Linear | nn.Identity)
    ):
        raise ExactnessError(
            f"{type(model).__name__} is not a decoder of the known shape (embed_tokens, layers, norm, lm_head)"
        )
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
        norm=read_norm("norm", body.norm) if is_last else None, head=head.weight.data if is_last else None,
        head_bias=data_of(head.bias) if is_last else None, dtype=weight.dtype, device=weight.device, width=config.hidden_size,
        logit_softcap=getattr(config, "final_logit_softcapping", None), logit_divisor=getattr(config, "logits_scaling", None),
        residual_scale=getattr(config, "residual_multiplier", None),
        heads=heads, vocabulary=head.weight.shape[0] if is_last else config.vocab_size, max_positions=max_positions,
    )  # fmt: skip


def read_embedding(module: nn.Module, scale: float | None) -> Callable[[Tensor], Tensor]:
    """The table's rows; a module that does more than look them up is called itself."""
    if scale is not None:
        return lambda ids: module(ids) * scale
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return module
    weight = module.weight.data
    return lambda ids: torch.embedding(weight, ids)


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
    elif hasattr(children["self_attn"], "kv_a_proj_with_mqa"):
        read = read_latent(f"{name}.self_attn", children["self_attn"])
    else:
        read = read_attention(name, children["self_attn"], heads)
    return Layer(**roles, mixer=read, mlp=read_mlp(f"{name}.mlp", children["mlp"]))


def read_attention(name: str, attention: Any, heads: tuple[int, int, int]) -> Attention:
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
    strange = {child for child, _ in attention.named_children()} - known
    if strange or not hasattr(attention, "q_proj"):
        raise ExactnessError(
            f"{name}.self_attn ({type(attention).__name__}) has parts without an exact form: {sorted(strange)}"
        )
    qkv, qkv_bias = merge(attention.q_proj, attention.k_proj, attention.v_proj)
    kind = getattr(attention, "layer_type", None) or getattr(attention, "attention_type", None) or ""
    norm = read_head_norm(name, attention)
    wide = norm is not None and norm.q_weight.shape[0] != heads[2]
    if norm is not None and wide and norm.q_weight.shape[0] != heads[0] * heads[2]:
        raise ExactnessError(
            f"{name}.self_attn.q_norm spans {norm.q_weight.shape[0]} values: neither a head of {heads[2]} nor all heads"
        )
    return Attention(
        qkv=qkv, qkv_bias=qkv_bias, out=attention.o_proj.weight.data, out_bias=data_of(attention.o_proj.bias),
        head_norm=None if wide else norm, wide_norm=norm if wide else None, spec=read_spec(attention, heads[2]),
        rope=kind if getattr(attention, "use_rope", True) else None, gated=attention.q_proj.out_features == 2 * heads[0] * heads[2],
    )  # fmt: skip


def read_head_norm(name: str, attention: Any) -> HeadNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    q, k = read_norm(f"{name}.q_norm", attention.q_norm), read_norm(f"{name}.k_norm", attention.k_norm)
    return HeadNorm(q_weight=q.weight, k_weight=k.weight, eps=q.eps, form=q.form)


def read_spec(attention: Any, head_dim: int) -> AttentionSpec:
    window = getattr(attention, "sliding_window", None)
    if window is None and type(attention).__name__.startswith(("Mistral", "Mixtral")):
        window = getattr(attention.config, "sliding_window", None)
    return AttentionSpec(
        scale=getattr(attention, "scaling", head_dim**-0.5), window=window, softcap=getattr(attention, "attn_logit_softcapping", None),
        sinks=data_of(getattr(attention, "sinks", None)),
    )  # fmt: skip


def read_mlp(name: str, mlp: Any) -> Dense | Callable[[Tensor], Tensor]:
    if {child for child, _ in mlp.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        kind = activation_kind(mlp.act_fn)
        if kind is None:
            raise ExactnessError(f"{name}.act_fn ({type(mlp.act_fn).__name__}) has no exact form")
        gate_up, bias = merge(mlp.gate_proj, mlp.up_proj)
        return Dense(
            gate_up=gate_up,
            gate_up_bias=bias,
            down=mlp.down_proj.weight.data,
            down_bias=data_of(mlp.down_proj.bias),
            kind=kind,
        )
    if getattr(experts := getattr(mlp, "experts", None), "is_transposed", False):
        for name in ("gate_up_proj", "down_proj"):
            lay_out_by_output(getattr(experts, name))
    return mlp


def lay_out_by_output(weight: nn.Parameter) -> None:
    """Keeps the shape [E,K,N], with the inputs of one output side by side in memory: products read whole lines."""
    with torch.no_grad():
        weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


def merge(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One tensor that holds all weights; the modules keep views of it, so that loading into them loads here."""
    with torch.no_grad():
        weight = torch.cat([m.weight.data for m in linears])
        bias = None if linears[0].bias is None else torch.cat([m.bias.data for m in linears])
        start = 0
        for m in linears:
            stop = start + m.weight.shape[0]
            m.weight.data = weight[start:stop]
            if bias is not None:
                m.bias.data = bias[start:stop]
            start = stop
    return weight, bias


def rope_table(body: Any, key: str, positions: int, head_dim: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, computed by the model's own module under `exact`: position by position the bits of
    the trainer."""
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
