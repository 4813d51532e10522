"""What `exact` lets through: elementwise operators whose bits depend on their place are replaced, everything unknown is
refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.world import SIZES, VOCABULARY, build, leaving_out
from tokentrue.errors import ExactnessError
from tokentrue.numerics import exact, logits_of, ops_for, same_bits, score
from tokentrue.numerics.modules import ExactFunctions

GLM = {
    **SIZES, "head_dim": 24, "partial_rotary_factor": 0.5, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 40, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": True,
}  # fmt: skip
DEEPSEEK = {
    **SIZES, "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24,
    "v_head_dim": 18, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 40,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def model_of(kind: str, **changes: Any) -> Any:
    import transformers as t

    torch.manual_seed(1)
    if kind == "glm4_moe":
        model: Any = t.Glm4MoeForCausalLM(t.Glm4MoeConfig(**{**GLM, **changes}))
    elif kind == "olmo3":
        model = t.Olmo3ForCausalLM(t.Olmo3Config(**{**SIZES, "hidden_size": 96, "sliding_window": 40, **changes}))
    else:
        model = t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**{**DEEPSEEK, **changes}))
    for buffer_name, buffer in model.named_buffers():
        if "correction" in buffer_name:
            buffer.add_(torch.randn_like(buffer) * 0.1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "olmo3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigmoid_routers_and_latent_attention_do_not_depend_on_the_batch(kind: str, dtype: torch.dtype) -> None:
    model, ids = model_of(kind).to(dtype), ids_of(3, 64)
    with torch.no_grad(), exact(model):
        whole = logits_of(model, ids)
        assert all(same_bits(logits_of(model, ids[i : i + 1]), whole[i : i + 1]) for i in range(3))
        assert all(same_bits(logits_of(model, ids[:1, :n]), whole[:1, :n]) for n in range(1, 64, 3))


def test_without_the_list_a_sigmoid_router_depends_on_the_batch() -> None:
    """The negative control: torch's own sigmoid in the router of GLM-4.5, float32."""
    model, ids = model_of("glm4_moe"), ids_of(1, 100)
    with torch.no_grad(), leaving_out("functions"), exact(model):
        whole = logits_of(model, ids)
        differing = sum(not same_bits(logits_of(model, ids[:, :n]), whole[:, :n]) for n in range(1, 100))
    if torch.backends.cpu.get_cpu_capability() in {"AVX512", "AVX2"}:
        assert differing > 0


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_close_to_transformers_own_forward(kind: str) -> None:
    model, ids = model_of(kind), ids_of(2, 50)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        with exact(model):
            found = logits_of(model, ids)
    assert (plain - found).abs().max() < 2e-4


@pytest.mark.parametrize("k", [64, 90, 256, 2048])
def test_float32_linears_with_one_output_do_not_depend_on_the_batch(k: int) -> None:
    ops, generator = ops_for("cpu"), torch.Generator().manual_seed(k)
    x, w = torch.randn(70, k, generator=generator), torch.randn(1, k, generator=generator)
    ops.self_test(linears={(k, 1, False), (k, 1, True)}, heads=set(), dtype=torch.float32)
    bias = torch.randn(1, generator=generator)
    for b in (None, bias):
        whole = ops.linear(x, w, b)
        assert whole.shape == (70, 1)
        assert all(same_bits(ops.linear(x[i : i + 1], w, b), whole[i : i + 1]) for i in range(70))
        assert all(same_bits(ops.linear(x[:n], w, b), whole[:n]) for n in (2, 3, 17, 33, 64))
        assert torch.allclose(whole, F.linear(x, w, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["sigmoid", "softplus", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elementwise_replacements_do_not_depend_on_the_place(kind: str, dtype: torch.dtype) -> None:
    ops = ops_for("cpu")
    x = (torch.randn(4099, generator=torch.Generator().manual_seed(1)) * 6).to(dtype)
    whole = ops.activation(x, kind)
    assert all(
        same_bits(ops.activation(x[i : i + n], kind), whole[i : i + n]) for i in range(0, 200, 7) for n in (1, 3, 8, 17)
    )
    wanted = getattr(F, kind)(x.double())
    assert (whole.double() - wanted).abs().max() < {torch.float32: 1e-5, torch.bfloat16: 0.08, torch.float16: 0.01}[
        dtype
    ]
    y = torch.tensor([-200.0, -3.0, 0.0, 5.0, 200.0], requires_grad=True)
    z = y.detach().clone().requires_grad_()
    ops.activation(y, kind).sum().backward()
    getattr(F, kind)(z).sum().backward()
    assert y.grad is not None and z.grad is not None and torch.allclose(y.grad, z.grad, atol=1e-6)


def test_torchs_own_sigmoid_depends_on_the_place() -> None:
    """The negative control: why it is replaced. True of vectorised CPUs; elsewhere the replacement costs nothing."""
    x = torch.randn(4099, generator=torch.Generator().manual_seed(1)) * 6
    whole = torch.sigmoid(x)
    differing = sum(not same_bits(torch.sigmoid(x[i : i + 3].clone()), whole[i : i + 3]) for i in range(4000))
    if torch.backends.cpu.get_cpu_capability() in {"AVX512", "AVX2"}:
        assert differing > 0


class Strange(nn.Module):
    """A part without parameters that computes with an operator nobody proved."""

    def __init__(self, inner: nn.Module, function: Any) -> None:
        super().__init__()
        self.inner = inner
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


@pytest.mark.parametrize("name", ["erfinv", "rsqrt", "cumsum", "matmul", "einsum"])
def test_functions_outside_the_list_are_refused_by_name(name: str) -> None:
    call = {
        "erfinv": torch.erfinv, "rsqrt": torch.rsqrt, "cumsum": lambda x: torch.cumsum(x, -1),
        "matmul": lambda x: torch.matmul(x, torch.eye(x.shape[-1])), "einsum": lambda x: torch.einsum("btk->btk", x),
    }[name]  # fmt: skip
    model = build("llama")
    model.model.layers[1].mlp = Strange(model.model.layers[1].mlp, call)
    with torch.no_grad(), exact(model), pytest.raises(ExactnessError, match=rf"{name}.*layers\.1"):
        score(model, ids_of(1, 8))


def test_the_list_of_functions_is_left_with_the_block() -> None:
    model = build("llama")
    with exact(model), torch.no_grad():
        score(model, ids_of(1, 8))
        torch.erfinv(torch.tensor(0.5))  # outside the model everything is allowed
    assert not ExactFunctions.active()


@pytest.mark.parametrize("kind", ["olmo3", "llama"])
def test_norms_round_where_transformers_rounds(kind: str) -> None:
    """In bfloat16 a norm that rounds once differs from one that rounds twice in a quarter of its values."""
    model = (build("llama") if kind == "llama" else model_of("olmo3")).bfloat16()
    norm = model.model.norm
    x = torch.randn(50, norm.weight.shape[0], generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        plain = norm(x)
        with exact(model):
            found = norm(x)
    assert (plain != found).float().mean() < 0.01


def test_convolutions_are_not_taken_for_experts() -> None:
    model = build("llama")
    model.model.layers[1].mlp.gate_proj = nn.Conv1d(4, 4, 4, groups=4)
    with pytest.raises(ExactnessError, match=r"layers\.1\.mlp\.gate_proj \(Conv1d\)"), exact(model):
        pass
