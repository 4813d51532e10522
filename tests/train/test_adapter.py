"""A LoRA adapter trained by `tokentrue train` with the exact engine: equal bits on both sides, checkpoints, and merged
weights for an engine without adapters."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.engine.test_adapters import adapted
from tests.providers.tiny import tiny_qwen3
from tokentrue.app.training import TrainRun, add_adapter
from tokentrue.cli.main import run as command
from tokentrue.environments import SMALL_MODEL
from tokentrue.hub import load_causal_model
from tokentrue.train import Publisher, Ranks, Trainer
from tokentrue.train.config import OptimConfig, TrainConfig
from tokentrue.train.publishing import Probe


@pytest.mark.slow
def test_a_run_with_an_adapter_is_exact_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = {
        "rollout.tasks": 4,
        "rollout.group_size": 6,
        "train.lora_rank": 4,
        "optim.lr": 4e-3,
        "log": "[]",
        "threads": 1,
    }
    arguments = [
        "--out",
        str(tmp_path),
        "--json",
        *(part for key, value in sets.items() for part in ("--set", f"{key}={value}")),
    ]
    assert command("train", [*arguments, "--set", "train.steps=2"]) == 0
    assert command("train", [*arguments, "--set", "train.steps=3"]) == 0, "resumes"
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["exact_compared"] and not row["exact_differing"] for row in rows)
    assert all(row["publish/adapter"] == 1 and row["staleness_max"] == 0 for row in rows)
    assert any(row["update/grad_norm"] > 0 for row in rows), "nothing was learnt"
    latest = tmp_path / "checkpoints" / "latest"
    base = load_causal_model(str(SMALL_MODEL), dtype="float32")
    whole: Any = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(latest / "adapter")).merge_and_unload()
    merged, same = load_causal_model(str(latest), dtype="float32").state_dict(), base.state_dict()
    expected = whole.state_dict()
    assert merged.keys() == expected.keys() and all(torch.equal(merged[name], expected[name]) for name in merged)
    moved = {name for name in merged if not torch.equal(merged[name], same[name])}
    assert moved and all(name.split(".")[-2].endswith("_proj") for name in moved), "nothing but linear layers moved"


class PlainSink:
    """An engine without adapters."""

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        self.state = {name: weight.detach().clone() for name, weight in weights}


def trainer_for(model: Any) -> Trainer:
    from tokentrue.mismatch import loss_named

    return Trainer(model, config=TrainConfig(exact=False), optim=OptimConfig(), loss=loss_named("dapo"), ranks=Ranks())


async def test_an_engine_without_adapters_gets_merged_weights() -> None:
    wrapped = adapted(tiny_qwen3(vocab_size=97, positions=64, spread=0.5), 3)
    sink = PlainSink()
    publisher = Publisher(sink)
    await publisher(trainer_for(wrapped))
    expected = copy.deepcopy(wrapped).merge_and_unload().state_dict()
    assert publisher.metrics["publish/adapter"] == 0
    assert {name for name in expected if name not in sink.state} <= {"lm_head.weight"}, "tied"
    assert all(torch.allclose(sink.state[name], expected[name], atol=1e-6) for name in sink.state)


async def test_a_new_adapter_is_changed_on_purpose_to_prove_the_path() -> None:
    """Its B is 0: times anything it stays what it is."""
    plain = tiny_qwen3(vocab_size=97, positions=512, spread=0.5)
    model = add_adapter(copy.deepcopy(plain), 4)
    trainer, seen = trainer_for(model), list[float]()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    async def publish(each: Trainer) -> None:
        seen.extend(
            float(value.detach().abs().max()) for name, value in each.model.named_parameters() if "lora_B" in name
        )

    class Deaf:
        name = "deaf"

        async def generate(self, prompt: Any, sampling: Any) -> Any:
            scores = trainer_for(copy.deepcopy(plain)).score([*prompt, 1, 2, 3])[len(prompt) :]
            return type("Found", (), {"token_ids": [1, 2, 3], "logprobs": scores.tolist()})

    with pytest.raises(Exception, match="does not take published weights"):
        await Probe(lambda: [Deaf()], vocabulary=97).prove(trainer, publish)  # type: ignore[list-item]
    assert seen and min(seen) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "and is put back"


def test_several_ranks_are_refused() -> None:
    from tokentrue.app.configuration import read
    from tokentrue.app.training import trainer_for as build_trainer
    from tokentrue.errors import ConfigError

    run = read(TrainRun, sets=["train.lora_rank=4"])
    with pytest.raises(ConfigError, match="one rank"):
        build_trainer(run, Ranks(rank=0, world=2))
