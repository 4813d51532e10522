"""Routing replay on real mixture-of-experts code of transformers, tiny and random."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tokentrue.errors import InputError
from tokentrue.numerics.routing import (
    from_routed,
    record_routing,
    replay_routing,
    routers,
    routing_of,
    routing_weights_of,
)
from tokentrue.routing_replay import FREE, RoutedExperts
from tokentrue.types import Certificate, Sample

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def build(family: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    if family == "qwen3_moe":
        model = t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, head_dim=8, norm_topk_prob=True)
        )
    elif family == "mixtral":
        model = t.MixtralForCausalLM(t.MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2, head_dim=8))
    else:
        extra = {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        }
        extra["q_lora_rank"] = 8
        shape = {
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "n_shared_experts": 1,
        }
        model = t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**SMALL | {"num_key_value_heads": 4}, **extra, **shape))
    with torch.no_grad():
        for _, router in routers(model):
            router.weight.normal_(std=0.5)
    return model.eval()


FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return build(request.param)


IDS = torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(1))


def test_replaying_its_own_choice_changes_no_bit(model: nn.Module) -> None:
    plain = model(IDS).logits
    with record_routing(model) as record:
        model(IDS)
    layers = len(routers(model))
    assert record.experts.shape == (20, layers, 2)
    with replay_routing(model, record.experts):
        assert torch.equal(model(IDS).logits, plain)
    assert torch.equal(model(IDS).logits, plain)


def test_replay_restores_the_rollout_after_the_router_moved(model: nn.Module) -> None:
    """The trainer's router differs a little and flips experts; with replay the chosen experts are the rollout's, so δ
    shrinks."""
    with record_routing(model) as record:
        rollout = model(IDS).logits.log_softmax(-1)
    with torch.no_grad():
        for _, router in routers(model):
            router.weight.add_(torch.randn_like(router.weight), alpha=0.05)
    with record_routing(model) as moved:
        drifted = model(IDS).logits.log_softmax(-1)
    assert not torch.equal(moved.experts.sort(-1)[0], record.experts.sort(-1)[0])
    with replay_routing(model, record.experts), record_routing(model) as replayed:
        held = model(IDS).logits.log_softmax(-1)
    assert torch.equal(replayed.experts.sort(-1)[0], record.experts.sort(-1)[0])
    assert (held - rollout).abs().mean() < (drifted - rollout).abs().mean()


def test_gradient_reaches_the_router_through_its_weights(model: nn.Module) -> None:
    with record_routing(model) as record:
        model(IDS)
    with replay_routing(model, record.experts):
        model(IDS).logits.logsumexp(-1).sum().backward()
    for _, router in routers(model):
        assert router.weight.grad is not None and bool(router.weight.grad.abs().sum() > 0)


def test_free_tokens_choose_for_themselves(model: nn.Module) -> None:
    with record_routing(model) as record:
        model(IDS)
    forced = torch.full_like(record.experts, FREE)
    forced[3] = torch.tensor([6, 7])
    with replay_routing(model, forced), record_routing(model) as taken:
        model(IDS)
    assert torch.equal(taken.experts[:3, 0], record.experts[:3, 0])  # the first router sees the same inputs up to there
    assert taken.experts[3].sort(-1)[0].tolist() == [[6, 7]] * len(routers(model))


def test_decoding_one_sequence_records_what_one_pass_records() -> None:
    model = build("qwen3_moe")
    with record_routing(model) as whole:
        model(IDS[:1])
    with record_routing(model) as steps:
        cache = model(IDS[:1, :4], use_cache=True).past_key_values
        for at in range(4, 10):
            cache = model(IDS[:1, at : at + 1], past_key_values=cache, use_cache=True).past_key_values
    assert torch.equal(whole.experts.sort(-1)[0], steps.experts.sort(-1)[0])


def test_what_does_not_fit_is_refused() -> None:
    model = build("qwen3_moe")
    with record_routing(model) as record:
        model(IDS)
    wrong = (
        (record.experts[:, :1], "2 routers"),
        (record.experts + 8, "8 experts"),
        (record.experts[:5], "5 tokens recorded"),
    )
    for experts, words in wrong:
        with pytest.raises(InputError, match=words), replay_routing(model, experts):
            model(IDS)
    assert "forward" not in vars(routers(model)[0][1])  # left as it was
    with pytest.raises(InputError, match="no top-k router"):
        routers(nn.Linear(2, 2))


def test_routing_of_a_sample_covers_every_input() -> None:
    experts = torch.arange(5 * 2 * 2, dtype=torch.int16).view(5, 2, 2)
    weights = torch.rand(5, 2, 2)
    routed = RoutedExperts(shape=(5, 2, 2), data=experts.numpy().tobytes(), weights=weights.numpy().tobytes())
    assert torch.equal(from_routed(routed), experts)
    sample = Sample(
        sample_id="s", session_id="s", group=None, token_ids=[5, 6, 7, 8, 9, 10], loss_mask=[0, 0, 1, 1, 0, 1],
        rollout_logprobs=[None, None, -0.1, -0.2, None, -0.3], spans=(), reward=None, finish_reason="stop", metadata={},
        certificate=Certificate(chain="", template="", tokenizer=""), routed_experts=routed,
    )  # fmt: skip
    whole, scales = routing_of(sample), routing_weights_of(sample)
    assert torch.equal(whole[:5], experts) and (whole[5] == FREE).all()
    assert scales is not None and torch.equal(scales[:5], weights)
    with pytest.raises(InputError, match="routing of positions"):
        routing_of(replace(sample, routed_experts=routed.cut(1, 5)))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_weights_and_order_of_the_slots_are_needed_too(family: str) -> None:
    """A router that drifted without flipping: experts alone leave a difference, with their weights the output has the
    same bits."""
    model = build(family)
    weights: list[torch.Tensor] = []
    handles = [
        router.register_forward_hook(lambda m, i, out: weights.append(out[1].detach())) for _, router in routers(model)
    ]
    with record_routing(model) as record, torch.no_grad():
        rollout = model(IDS).logits
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        for _, router in routers(model):
            router.weight.add_(torch.randn_like(router.weight), alpha=0.05)
    scales = torch.stack(weights, 1).float()
    with replay_routing(model, record.experts), torch.no_grad():
        by_experts = model(IDS).logits
    with replay_routing(model, record.experts, scales):
        whole = model(IDS).logits
        whole.logsumexp(-1).sum().backward()
    assert torch.equal(whole.detach(), rollout) and not torch.equal(by_experts, rollout)
    assert all(bool(router.weight.grad.abs().sum() > 0) for _, router in routers(model)), (
        "the gradient is still the router's"
    )
    with replay_routing(model, record.experts.flip(-1), scales), torch.no_grad():
        assert not torch.equal(model(IDS).logits, rollout), "weights of other slots are other weights"
