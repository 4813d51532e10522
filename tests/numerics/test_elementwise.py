"""Functions and products that some processors compute otherwise beside other values, or slowly: the same bits wherever
a value stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.world import build
from tokentrue.numerics import exact
from tokentrue.numerics.cpu import CpuOps, arithmetic
from tokentrue.numerics.ops import same_bits


@pytest.mark.parametrize("name", ["cos", "sin", "erf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_has_the_same_bits_beside_any_others(name: str, dtype: torch.dtype) -> None:
    x = arithmetic.make_wide_values(3000).to(dtype)
    alone = torch.cat([arithmetic.compute(name, value) for value in x.split(1)])
    assert same_bits(arithmetic.compute(name, x), alone)
    assert same_bits(arithmetic.compute(name, x.view(30, 100).t()).t().reshape(-1), alone), "any layout"


def mix(x: Tensor) -> Tensor:
    """A vector library that looks at all sixteen values of a vector before it computes any."""
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 16)).view(-1, 16)
    return (padded + padded.abs().amax(-1, keepdim=True)).reshape(-1)[: len(flat)].view(x.shape)


def test_a_library_that_mixes_neighbours_is_found_out_and_gets_each_value_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "cos", mix)
    arithmetic.mixes_neighbours.cache_clear()
    try:
        x = arithmetic.make_wide_values(2500)
        assert not same_bits(mix(x), torch.cat([mix(value) for value in x.split(1)]))
        assert same_bits(arithmetic.compute("cos", x), x + x.abs())
    finally:
        arithmetic.mixes_neighbours.cache_clear()


def test_rotary_embeddings_take_cos_and_sin_from_the_operators() -> None:
    seen: list[str] = []

    class Watched(CpuOps):
        def function(self, x: Tensor, name: str) -> Tensor:
            seen.append(name)
            return super().function(x, name)

    model = build("qwen3")
    with torch.no_grad(), exact(model, ops=Watched()):
        model(torch.arange(20)[None], use_cache=False)
    assert seen == ["cos", "sin"]


@pytest.mark.parametrize(("k", "n", "bias"), [(90, 64, True), (256, 8, False), (64, 1, True)])
def test_bfloat16_without_hardware_is_a_float32_product_rounded_once(
    monkeypatch: pytest.MonkeyPatch, k: int, n: int, bias: bool
) -> None:
    monkeypatch.setattr(arithmetic, "has_products", lambda dtype: False)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).bfloat16()

    x, w, b = draw(70, k), draw(n, k), draw(n) if bias else None
    out = arithmetic.tiled_product(x, w, b)
    wide = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
    assert out.dtype == torch.bfloat16
    assert (out.double() - wide).abs().max() <= wide.abs().max() * 2**-8, "more than one rounding"
    for rows in (1, 3, 33):
        assert same_bits(arithmetic.tiled_product(x[:rows], w, b), out[:rows])
    assert arithmetic.multiply(x, w.t()).dtype == torch.bfloat16


@pytest.mark.parametrize("n", [2, 4, 8, 15])
def test_few_columns_do_not_make_rows_depend_on_their_place(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x, w = torch.randn(65, 1024, generator=generator), torch.randn(n, 1024, generator=generator)
    whole = arithmetic.tiled_product(x, w, None)
    assert whole.shape == (65, n)
    assert all(same_bits(arithmetic.tiled_product(x[i : i + 1], w, None), whole[i : i + 1]) for i in range(65))
