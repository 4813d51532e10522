"""Engines with one fault in how they see: the doctor names it. A healthy one is not accused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2VLImageProcessorPil

import tokentrue as tt
from tests.marks import slow_except
from tests.train.pictures import make_model
from tokentrue.doctor import EngineRoutes, Finding, Reference, Verdict
from tokentrue.doctor.exam import Examination
from tokentrue.doctor.images import probe_images
from tokentrue.doctor.reference import load_model
from tokentrue.providers.hf import HFProvider

Inputs = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_model(tmp_path_factory.mktemp("seeing") / "model"))


class Faulty(HFProvider):
    """`change` edits what the model gets of a prompt."""

    change: Callable[[Inputs], Inputs] = staticmethod(lambda inputs: inputs)
    late = 0  # of the position of every sampled token

    def _inputs(self, ids: list[int], images: Any) -> Inputs:
        return self.change(super()._inputs(ids, images))

    def _next(self, token: int, before: Mapping[str, torch.Tensor]) -> Inputs:
        inputs = super()._next(token, before)
        if self.late and before["input_ids"].shape[1] > 1:  # as if each placeholder took a position
            inputs["position_ids"] = inputs["position_ids"] * 0 + before["input_ids"].shape[1]
        return inputs


class Remembering:
    """A prefix cache that knows ids and no pictures."""

    def __init__(self) -> None:
        self._kept: dict[bytes, torch.Tensor] = {}

    def __call__(self, inputs: Inputs) -> Inputs:
        name = inputs["input_ids"].numpy().tobytes()
        return inputs | {"pixel_values": self._kept.setdefault(name, inputs["pixel_values"])}


def text_positions(inputs: Inputs) -> Inputs:
    return inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1]).expand(3, 1, -1)}


def without_pixels(inputs: Inputs) -> Inputs:
    return {name: inputs[name] for name in ("input_ids", "position_ids")}


def blue_first(inputs: Inputs) -> Inputs:
    values = inputs["pixel_values"]
    return inputs | {"pixel_values": values.view(len(values), 3, -1).flip(1).reshape(values.shape)}


def not_normalised(inputs: Inputs) -> Inputs:
    processor = Qwen2VLImageProcessorPil()
    mean, std = (torch.tensor(list(each)).view(1, 3, 1) for each in (processor.image_mean, processor.image_std))
    values = inputs["pixel_values"]
    return inputs | {"pixel_values": (values.view(len(values), 3, -1) * std + mean).reshape(values.shape)}


FAULTS: Mapping[str, tuple[str, str, Callable[[], Callable[[Inputs], Inputs]]]] = {
    "blind": ("image_ignored", "pixels", lambda: without_pixels),
    "blue, green, red": ("image_pixels", "pixels", lambda: blue_first),
    "pixels from 0 to 1": ("image_pixels", "pixels", lambda: not_normalised),
    "a prefix cache by ids": ("image_cache", "caches", Remembering),
    "positions of text": ("image_positions", "positions", lambda: text_positions),
    "noise, which no cause explains": (
        "unknown", "pixels", lambda: lambda inputs: inputs | {"pixel_values": inputs["pixel_values"] * 0.9},
    ),
}  # fmt: skip


async def probed(model: Path, provider: Any, findings: Any = (), **more: Any) -> dict[str, Finding]:
    exam = Examination(
        provider=provider, routes=EngineRoutes(), renderer=tt.load_renderer(model), reference=Reference.load(model),
        dtype="float32", **more,
    )  # fmt: skip
    return {one.probe.removeprefix("images: "): one for one in await probe_images(exam, findings)}


@pytest.mark.parametrize("name", slow_except({"blind", "a prefix cache by ids"}, list(FAULTS)))
async def test_the_fault_is_named(name: str, model: Path) -> None:
    fault, row, change = FAULTS[name]
    provider = Faulty(load_model(model))
    provider.change = change()
    found = await probed(model, provider)
    assert {each.fault for each in found.values()} == {"", fault}, found
    assert found[row].fault == fault and found[row].cure, found


async def test_sampled_tokens_at_positions_of_text_are_named(model: Path) -> None:
    provider = Faulty(load_model(model))
    provider.late = 1
    found = await probed(model, provider)
    assert found["positions"].fault == "image_positions", found


@pytest.mark.slow
async def test_features_of_old_weights_are_named(model: Path, tmp_path: Path) -> None:
    """An encoder cache that outlives a publication."""
    old = shutil.copytree(model, tmp_path / "old")
    older: Any = load_model(old)
    with torch.no_grad():
        for parameter in older.model.visual.parameters():
            parameter.mul_(1.1)
    older.save_pretrained(old)
    served: Any = load_model(model)
    served.model.visual = older.model.visual
    assert (await probed(model, HFProvider(served), previous=old))["caches"].fault == "image_cache"
    assert (await probed(model, HFProvider(served)))["pixels"].fault == "unknown"


@pytest.mark.slow
async def test_an_engine_that_counts_otherwise_is_named(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 4096, "longest_edge": 4096}
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    found = await probed(model, HFProvider(load_model(other)))
    assert list(found) == ["count"] and found["count"].fault == "image_count", found


async def test_a_healthy_engine_is_not_accused(model: Path) -> None:
    provider = HFProvider(load_model(model))
    found = await probed(model, provider)
    assert {name: each.verdict for name, each in found.items()} == dict.fromkeys(
        ("count", "pixels", "caches", "positions"), Verdict.OK
    ), found
    ill = [Finding(probe="weights", verdict=Verdict.FAULT, figure="", fault="rope")]
    assert {each.verdict for each in (await probed(model, provider, ill)).values()} == {Verdict.OK, Verdict.CANNOT_TELL}
