"""bfloat16 and float16 learn as float32 does: master weights, and published copies that are what the engine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.processor import BFLOAT16
from tests.train.rows import groups_for
from tokentrue.environments import SMALL_MODEL
from tokentrue.mismatch import loss_named
from tokentrue.train import OptimConfig, TrainConfig, Trainer
from tokentrue.train.checkpoint import Progress, Store, load, save

LR = 1e-6


def load_model(dtype: torch.dtype) -> torch.nn.Module:
    """In every dtype the same numbers: those that bfloat16 can hold."""
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.to(dtype)


def trainer_in(dtype: torch.dtype, lr: float = LR, **config: object) -> Trainer:
    torch.set_num_threads(1)
    settings = TrainConfig(exact=False, micro_tokens=256, **config)  # type: ignore[arg-type]
    return Trainer(load_model(dtype), config=settings, optim=OptimConfig(lr=lr), loss=loss_named("dapo"))


def changed_share(before: torch.nn.Module, after: Trainer) -> float:
    """Share of the weights that training has moved, as the optimiser holds them."""
    old = dict(before.named_parameters())
    pairs = [(old[name].float(), value.float()) for name, value in after.masters.named.items()]
    moved = sum(int((a != b).sum()) for a, b in pairs)
    return moved / sum(a.numel() for a, _ in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_small_updates_are_not_lost(dtype: torch.dtype) -> None:
    """Ten steps at lr 1e-6 move as many weights, in nearly the same direction, as in float32."""
    low, full = trainer_in(dtype), trainer_in(torch.float32)
    scored = load_model(torch.float32)
    for step in range(10):
        groups = groups_for(scored, groups=1, size=3, seed=step)
        low.step(groups)
        full.step(groups)
    assert changed_share(load_model(torch.float32), full) > 0.9
    assert changed_share(load_model(dtype), low) > 0.9
    start = dict(scored.named_parameters())
    a = torch.cat([(value.detach() - start[name].detach()).flatten() for name, value in low.masters.named.items()])
    b = torch.cat([(value.detach() - start[name].detach()).flatten() for name, value in full.masters.named.items()])
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.8
    assert float(a.norm() / b.norm()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_what_is_published_is_what_is_scored_with() -> None:
    """bfloat16 parameters: the rounded master, bit for bit."""
    trainer = trainer_in(torch.bfloat16, lr=1e-3)
    trainer.step(groups_for(load_model(torch.float32), groups=2, size=3))
    masters = trainer.masters.named
    published = dict(trainer.weights())
    assert {value.dtype for value in published.values()} == {torch.bfloat16}
    for name, value in published.items():
        assert torch.equal(value.view(torch.int16), masters[name].detach().bfloat16().view(torch.int16))


@pytest.mark.parametrize("dtype", [BFLOAT16])
def test_masters_survive_a_checkpoint_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    groups = groups_for(load_model(torch.float32), groups=2, size=3)
    whole, resumed = trainer_in(dtype), trainer_in(dtype)
    whole.step(groups)
    store = Store(directory=tmp_path, run_hash="h", model=None)
    save(whole, store, Progress())
    load(resumed, tmp_path / "step-000001", store)
    for each in (whole, resumed):
        each.step(groups)
    pairs = zip(whole.masters.named.items(), resumed.masters.named.items(), strict=True)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for (_, a), (_, b) in pairs)


def test_the_exact_engine_in_bfloat16_agrees_in_every_bit_over_updates() -> None:
    trainer = Trainer(
        load_model(torch.bfloat16),
        config=TrainConfig(micro_tokens=256),
        optim=OptimConfig(lr=1e-3),
        loss=loss_named("dapo"),
    )
    engine = load_model(torch.bfloat16)
    for version in range(2):
        report = trainer.step(groups_for(engine, groups=2, size=3, seed=version, version=version))
        assert report.agreement.compared > 50 and report.agreement.differing == 0
        engine.load_state_dict(dict(trainer.weights()), strict=False)
