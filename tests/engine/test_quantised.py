"""Quantised checkpoints: MXFP4 experts (gpt-oss) are dequantised on loading, value by value; other methods are refused
by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.world import build
from tokentrue.engine import ExactEngine
from tokentrue.errors import ExactnessError
from tokentrue.numerics import same_bits, score
from tokentrue.types import Sampling

E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=torch.float64
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}


def quantise(folder: Path, seed: int) -> dict[str, Tensor]:
    """Replace the experts' weights in a saved gpt-oss by random MXFP4 blocks; returns the values that they stand for,
    in float64."""
    generator = torch.Generator().manual_seed(seed)
    state, wanted = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name in [n for n in state if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(115, 124, (experts, outputs, inputs // 32), generator=generator).to(torch.uint8)
        values = torch.stack((E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]), -1).flatten(-2)
        wanted[name] = (values * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2).transpose(1, 2)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return wanted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("gpt_oss", **SIZES).save_pretrained(tmp_path)
    return tmp_path


def values_of(model: Any, name: str) -> Tensor:
    return dict(model.named_parameters())[name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_mxfp4_weights_are_loaded_and_published_exactly(folder: Path, dtype: str) -> None:
    wanted = quantise(folder, seed=1)
    with ExactEngine(folder, dtype=dtype, version=1) as engine:
        for name, values in wanted.items():
            assert torch.equal(values_of(engine.model, name).double(), values), name
        found = await engine.generate([1, 2, 3], Sampling(max_tokens=20, seed=5))
        with torch.no_grad():
            trainer = score(engine.model, torch.tensor([[1, 2, 3, *found.token_ids]]))[0, 2:]
        assert same_bits(torch.tensor(found.logprobs), trainer)
        build("gpt_oss", seed=2, **SIZES).save_pretrained(folder)
        again = quantise(folder, seed=3)
        engine.load_weights(folder, version=2)
        for name, values in again.items():
            assert torch.equal(values_of(engine.model, name).double(), values), name


def test_other_quantisations_are_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ExactnessError, match=r"quantised \(fp8\)"):
        ExactEngine(folder)
