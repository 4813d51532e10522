"""exact(model) and score: rows independent of the batch, gradients, restoration, refusals, correctness against
float64."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.world import VOCABULARY, build
from tokentrue.errors import ExactnessError, InputError
from tokentrue.numerics import exact, logits_of, same_bits, score
from tokentrue.numerics.exact import PREPARED

KINDS = ["qwen3", "llama", "qwen2", "qwen3_moe", "mistral", "gemma3", "mixtral"]


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_rows_do_not_depend_on_the_batch(kind: str, dtype: torch.dtype) -> None:
    model, ids = build(kind).to(dtype), ids_of(3, 170)
    with torch.no_grad(), exact(model):
        whole = score(model, ids)
        assert whole.dtype == torch.float32 and whole.shape == (3, 169)
        assert all(same_bits(score(model, ids[i : i + 1]), whole[i : i + 1]) for i in range(3))
        assert all(same_bits(score(model, ids[:1, :n]), whole[:1, : n - 1]) for n in (2, 3, 16, 17, 127, 128, 129))
        lengths = (100, 57, 170)
        packed = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])
        found = score(model, packed[None], cu_seqlens=torch.tensor([0, 100, 157, 327]))[0]
        assert found[99] == 0.0 and found[156] == 0.0
        for start, row, n in ((0, 0, 100), (100, 1, 57), (157, 2, 170)):
            assert same_bits(found[start : start + n - 1], whole[row, : n - 1])
        flat = score(model, packed, cu_seqlens=torch.tensor([0, 100, 157, 327]))
        assert same_bits(flat, found)


def test_padded_masks_on_either_side_and_positions_give_the_same_bits() -> None:
    model, ids = build("qwen3"), ids_of(2, 40)
    with torch.no_grad(), exact(model):
        plain = logits_of(model, ids[:1, :30])[0]
        right = model(input_ids=ids, attention_mask=mask_of(40, range(30), range(40))).logits[0, :30]
        left_ids = torch.cat((ids[:1, :10], ids[:1, :30]), 1)
        positions = torch.cat((torch.zeros(10, dtype=torch.long), torch.arange(30)))[None]
        left = model(input_ids=left_ids, attention_mask=mask_of(40, range(10, 40)), position_ids=positions).logits[
            0, 10:
        ]
        restarting = torch.tensor([[*range(30), *range(10)]])
        by_position = model(input_ids=torch.cat((ids[:1, :30], ids[1:, :10]), 1), position_ids=restarting).logits
    assert same_bits(right, plain) and same_bits(left, plain) and same_bits(by_position[0, :30], plain)


def mask_of(length: int, *seen: range) -> Tensor:
    mask = torch.zeros(len(seen), length, dtype=torch.long)
    for row, kept in zip(mask, seen, strict=True):
        row[list(kept)] = 1
    return mask


def test_a_model_cast_to_bfloat16_has_the_bits_of_one_loaded_in_it(tmp_path: Path) -> None:
    """Casting rounds the rotary frequencies too; under exact they are float32 either way."""
    from transformers import AutoModelForCausalLM

    model, ids = build("llama"), ids_of(1, 90)
    model.save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        assert same_bits(score(model.bfloat16(), ids), score(loaded, ids))


def test_frequencies_with_other_last_bits_are_those_of_the_host() -> None:
    """A model that was built on a GPU has them; an engine that loads it does not. Frequencies of the user's own
    stay."""
    model, ids = build("llama"), ids_of(1, 90)
    frequencies = model.model.rotary_emb.inv_freq
    with torch.no_grad():
        expected = score(model, ids)
        frequencies[3:6] = torch.nextafter(frequencies[3:6], torch.ones(3))
        assert same_bits(score(model, ids), expected)
        frequencies[3:6] *= 1.01
        assert not same_bits(score(model, ids), expected)


def test_thread_count_does_not_change_float32_bits() -> None:
    model, ids, threads = build("qwen3"), ids_of(2, 150), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with torch.no_grad(), exact(model):
                found.append(score(model, ids))
    finally:
        torch.set_num_threads(threads)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


@pytest.mark.parametrize("kind", KINDS)
def test_against_a_float64_reference(kind: str) -> None:
    """The plain forward of the same weights in float64; float32 must be close, bfloat16 within its own precision."""
    model, ids = build(kind, initializer_range=0.05), ids_of(1, 140)
    reference = copy.deepcopy(model).double()
    if kind in {"qwen3_moe", "mixtral"}:
        reference.set_experts_implementation("eager")
    with torch.no_grad():
        logits = reference(input_ids=ids, use_cache=False).logits
        wanted = torch.log_softmax(logits[0, :-1], -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        found = score(model, ids)[0]
        assert (found.double() - wanted).abs().max() < 2e-5
        if kind not in {"qwen3_moe", "mixtral"}:  # a rounded router may choose another expert
            assert (score(model.bfloat16(), ids)[0].double() - wanted).abs().max() < 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_model_and_repeat(kind: str) -> None:
    model, ids = build(kind), ids_of(2, 140)
    if kind in {"qwen3_moe", "mixtral"}:
        model.set_experts_implementation("eager")
    exact_grads = [gradients(model, lambda: score(model, ids, 0.8).sum(), exact_on=True) for _ in range(2)]
    assert all(same_bits(a, b) for a, b in zip(*exact_grads, strict=True))

    def plain() -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float() / 0.8
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).sum()

    for mine, theirs in zip(exact_grads[0], gradients(model, plain, exact_on=False), strict=True):
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm() + 1e-7


def gradients(model: nn.Module, loss: Any, *, exact_on: bool) -> list[Tensor]:
    model.zero_grad()
    if exact_on:
        with exact(model):
            loss().backward()
    else:
        loss().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_gradient_checkpointing_gives_the_same_bits() -> None:
    model, ids = build("qwen3").train(), ids_of(2, 60)
    plain = gradients(model, lambda: score(model, ids).sum(), exact_on=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert all(
        same_bits(a, b)
        for a, b in zip(gradients(model, lambda: score(model, ids).sum(), exact_on=True), plain, strict=True)
    )


def test_everything_is_restored_also_after_an_error() -> None:
    model, ids = build("qwen3_moe"), ids_of(1, 20)
    model.set_experts_implementation("eager")
    before = snapshot(model)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        with pytest.raises(RuntimeError, match="boom"), exact(model):
            assert snapshot(model) != before
            raise RuntimeError("boom")
        assert snapshot(model) == before
        assert same_bits(model(input_ids=ids).logits, logits)


def snapshot(model: nn.Module) -> list[Any]:
    """Attributes of every module; the remembered plan may stay."""
    return [model.config._attn_implementation, *(sorted(m.__dict__.keys() - {PREPARED}) for m in model.modules())]


def test_nested_blocks_share_one_contract_and_temperature_must_be_positive() -> None:
    model = build("qwen3")
    with exact(model) as outer, exact(model) as inner:
        assert inner is outer
        assert outer.fingerprint.startswith("exact:") and "attention" in outer.operators
        with pytest.raises(InputError, match="temperature"):
            score(model, ids_of(1, 5), 0.0)
        with pytest.raises(InputError, match="cu_seqlens"):
            score(model, ids_of(1, 5), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ExactnessError, match="fingerprints differ"):
        outer.require("exact:0000000000000000")
    outer.require(outer.fingerprint)


def test_unknown_parts_are_refused_by_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    strange = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2)).eval()
    with (
        pytest.raises(ExactnessError, match=r"transformer\.h\.0\.ln_1 \(LayerNorm\) has no exact form"),
        exact(strange),
    ):
        pass
    for part, module in (("act_fn", nn.Softplus()), ("gate_proj", nn.Conv1d(4, 4, 1))):
        model = build("llama")
        setattr(model.model.layers[1].mlp, part, module)
        with pytest.raises(ExactnessError, match=rf"layers\.1\.mlp\.{part} \({type(module).__name__}\)"), exact(model):
            pass


def test_dropout_and_a_cache_are_refused_with_the_cure() -> None:
    model = build("llama", attention_dropout=0.1).train()
    with exact(model), pytest.raises(ExactnessError, match="dropout"):
        score(model, ids_of(1, 8))
    model.eval()
    with exact(model), torch.no_grad():
        cache = model(input_ids=ids_of(1, 8), use_cache=True).past_key_values
        with pytest.raises(ExactnessError, match="ExactEngine"):
            model(input_ids=ids_of(1, 1), past_key_values=cache)


def change_of_config(model: Any) -> None:
    model.config.num_key_value_heads = 1


def change_of_eps(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e-2


def change_of_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.5)


def change_of_parameter(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.ones(model.config.intermediate_size))


def change_of_module(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.Tanh()


def change_of_class(model: Any) -> None:
    norm = model.model.norm
    norm.__class__ = type("OneOffsetRMSNorm", (type(norm),), {"forward": lambda self, x: x * (1 + self.weight)})


CHANGES = [
    change_of_config, change_of_eps, change_of_frequencies, change_of_parameter, change_of_module, change_of_class,
]  # fmt: skip


def outcome(model: Any, ids: Tensor) -> Tensor | str:
    """Log-probabilities, or why there are none."""
    try:
        with torch.no_grad():
            return score(model, ids)
    except (ExactnessError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_prepared_again(change: Any) -> None:
    """Entering again has the outcome of a model that was never entered before, whatever changed in between."""
    model, fresh, ids = build("qwen3"), build("qwen3"), ids_of(1, 40)
    before = outcome(model, ids)
    for one in (model, fresh):
        change(one)
    again, wanted = outcome(model, ids), outcome(fresh, ids)
    assert type(again) is type(wanted)
    assert again == wanted if isinstance(wanted, str) or isinstance(again, str) else same_bits(again, wanted)
    assert isinstance(again, str) or change is change_of_config or not same_bits(again, before)


def test_entering_again_reads_the_model_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made once; weights, dtype, adapters, threads and copies are those of the moment."""
    from peft import LoraConfig, get_peft_model

    module = importlib.import_module("tokentrue.numerics.exact")
    plans = list[nn.Module]()
    plan_of = module.plan_of
    monkeypatch.setattr(module, "plan_of", lambda model, ops: plans.append(model) or plan_of(model, ops))
    model, ids = build("qwen3"), ids_of(1, 40)
    first = outcome(model, ids)
    for state in (True, False):
        assert same_bits(outcome(model.train(state), ids), first)
    assert len(plans) == 1
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)  # another parameter of the same form
    assert not same_bits(outcome(model, ids), first) and len(plans) == 1
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert not same_bits(outcome(twin, ids), outcome(model, ids)) and plans[1:] == [twin]
    with exact(model) as narrow:
        assert narrow.dtype == "float32"
    with exact(model.bfloat16()) as wide:
        assert wide.dtype == "bfloat16" and wide.fingerprint != narrow.fingerprint
    count, threads = len(plans), torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    with exact(model) as other:
        assert other.machine["threads"] == str(threads + 1) and len(plans) == count + 1
    monkeypatch.undo()
    base = build("qwen3")
    plain = outcome(base, ids)
    tuned = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    with torch.no_grad(), exact(tuned.eval()):
        assert not same_bits(score(tuned.get_base_model(), ids), plain)


def test_a_prepared_model_is_pickled_without_its_plan(tmp_path: Path) -> None:
    model, ids = build("qwen3"), ids_of(1, 20)
    wanted = outcome(model, ids)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert same_bits(outcome(loaded, ids), wanted)


def test_an_engine_leaves_no_packed_weights_to_the_trainer() -> None:
    """The engine's operators keep another form of the weights; a trainer of the same model changes these."""
    from tokentrue.engine import ExactEngine

    model, ids = build("qwen3"), ids_of(1, 40)
    first = outcome(model, ids)
    with ExactEngine(model, device="cpu", dtype="float32") as engine:
        assert engine.core.local.forward.ops is not model.__dict__[PREPARED].ops
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    fresh = build("qwen3")
    fresh.load_state_dict(model.state_dict())
    assert same_bits(outcome(model, ids), outcome(fresh, ids)) and not same_bits(outcome(model, ids), first)
