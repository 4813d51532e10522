from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

from tests.providers.conformance import Truth
from tests.providers.standin import SGLangStandIn
from tests.providers.tiny import tiny_qwen3


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    return tiny_qwen3(vocab_size=97, positions=512, spread=0.5)


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
