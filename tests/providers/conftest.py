from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from aiohttp.test_utils import TestServer

from tests.providers.conformance import Truth
from tests.providers.standin import SGLangStandIn


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def truth(tiny_model: Any) -> Truth:
    return Truth(tiny_model)


@pytest.fixture
def prompt() -> list[int]:
    return [5, 17, 80, 3, 44, 9, 61, 12]


@pytest_asyncio.fixture(params=["cumulative", "incremental"])
async def standin(tiny_model: Any, request: pytest.FixtureRequest) -> AsyncIterator[tuple[SGLangStandIn, str]]:
    engine = SGLangStandIn(tiny_model, incremental=request.param == "incremental")
    server = TestServer(engine.app())
    await server.start_server()
    yield engine, str(server.make_url("/"))
    await server.close()
