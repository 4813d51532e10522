"""Publishing through the disk: what is written is whole, what fails is repaired, and a replica that is away is not
used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file

from tests.parts import whole_chunks
from tokentrue.errors import EngineError, EngineRejected, EngineUnreachable, TrainingError
from tokentrue.providers.pool import Pool
from tokentrue.providers.remote import write_weights
from tokentrue.providers.vllm import VLLMProvider
from tokentrue.types import Completion, Finish, Sampling


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [("model.embed_tokens.weight", torch.full((4, 2), value)), ("model.norm.weight", torch.ones(2))]


def test_a_version_is_one_whole_file_without_index_and_with_its_tied_head(tmp_path: Path) -> None:
    first = write_weights(weights(), tmp_path, version=1)
    second = write_weights(weights(2.0), tmp_path, version=2, keep=[first.directory])
    third = write_weights(weights(3.0), tmp_path, version=3, keep=[second.directory])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-000002", "version-000003"]
    assert [path.name for path in third.directory.iterdir()] == ["model.safetensors"]
    found = load_file(third.directory / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"]) and len(found) == 3


def test_weights_that_are_not_finite_reach_no_engine(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"embed_tokens\.weight is not finite"):
        write_weights(weights(float("nan")), tmp_path, version=1)
    assert not list(tmp_path.glob("version-*"))


class Server:
    """vLLM's control routes: what was called in which order, with faults on demand."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuse: set[str] = set()  # directories
        self.clears = True
        self.version = "default"
        self.stamps = True  # whether it takes the version that it is told

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post(path, self.note) for path in ("/pause", "/resume", "/update_weight_version")])
        app.add_routes([web.post("/collective_rpc", self.reload), web.post("/reset_prefix_cache", self.reset)])
        app.add_routes([web.get("/weight_info", self.info)])
        return app

    async def note(self, request: web.Request) -> web.Response:
        self.calls.append(request.path.lstrip("/"))
        if request.path == "/update_weight_version" and self.stamps:
            self.version = (await request.json())["new_version"]
        return web.json_response({})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = Path(body["kwargs"]["weights_path"]).name
        self.calls.append(f"reload {name}")
        return web.json_response({"error": {"message": "shapes"}}, status=500 if name in self.refuse else 200)

    async def reset(self, request: web.Request) -> web.Response:
        assert request.query["reset_running_requests"] == "true"
        return web.json_response({"success": self.clears})


LOADED = ["pause", "reload version-000001", "update_weight_version", "resume"]


async def test_a_refused_version_is_repaired_with_the_one_before_and_the_server_goes_on(tmp_path: Path) -> None:
    server = Server()
    async with TestServer(server.app()) as http:
        provider = VLLMProvider(str(http.make_url("")), weights_dir=tmp_path, retries=0)
        await provider.publish(weights(), version=1)
        assert server.calls == LOADED and provider.version == 1
        server.calls.clear()
        server.refuse.add("version-000002")
        with pytest.raises(EngineRejected, match="keeps version 1"):
            await provider.publish(weights(2.0), version=2)
        assert server.calls == [
            "pause",
            "reload version-000002",
            "reload version-000001",
            "update_weight_version",
            "resume",
        ]
        assert provider.version == 1
        await provider.close()


async def test_a_server_without_anything_to_repair_with_stays_paused(tmp_path: Path) -> None:
    server = Server()
    server.refuse.add("version-000001")
    async with TestServer(server.app()) as http:
        provider = VLLMProvider(str(http.make_url("")), weights_dir=tmp_path, retries=0)
        with pytest.raises(EngineRejected, match="left paused"):
            await provider.publish(weights(), version=1)
        assert "resume" not in server.calls
        await provider.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [("clears", "prefix cache"), ("stamps", "reports weight version 0 after loading version 1")],
    ids=["the cache is not cleared", "the version is not named"],
)
async def test_a_publication_that_is_not_confirmed_is_a_refusal(tmp_path: Path, fault: str, message: str) -> None:
    server = Server()
    setattr(server, fault, False)
    async with TestServer(server.app()) as http:
        provider = VLLMProvider(str(http.make_url("")), weights_dir=tmp_path, retries=0)
        with pytest.raises(EngineRejected, match=message):
            await provider.publish(weights(), version=1)
        await provider.close()


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        (404, "Not Found", False),
        (500, "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to enable LoRA.", False),
        (400, "LoRA rank 64 is greater than max_lora_rank 16.", "max_lora_rank"),
    ],
)
async def test_an_engine_without_lora_says_so_and_other_refusals_are_errors(
    tmp_path: Path, status: int, said: str, outcome: bool | str
) -> None:
    class Config:
        def save_pretrained(self, directory: Path) -> None:
            (directory / "adapter_config.json").write_text("{}")

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": said}}, status=status)

    app = web.Application()
    app.add_routes([web.post("/v1/load_lora_adapter", refuse)])
    async with TestServer(app) as http:
        provider = VLLMProvider(str(http.make_url("")), weights_dir=tmp_path, retries=0)
        call = Pool([provider]).publish_adapter(weights(), Config(), version=1, name="policy")
        if outcome is False:
            assert await call is False and not list(tmp_path.glob("*/*"))
        else:
            with pytest.raises(EngineRejected, match=str(outcome)):
                await call
        assert provider.adapters == []
        await provider.close()


class Replica:
    name, truthful_filters = "replica", frozenset[str]()

    def __init__(self) -> None:
        self.away = False
        self.versions: list[int] = []
        self.rejoined = 0

    async def publish(self, weights: Any, *, version: int) -> None:
        if self.away:
            raise EngineUnreachable("gone")
        self.versions.append(version)

    async def health(self) -> dict[str, Any]:
        if self.away:
            raise EngineUnreachable("gone")
        return {}

    async def rejoin(self) -> None:
        self.rejoined += 1

    async def stream(self, prompt_ids: Any, sampling: Any, **_: Any) -> Any:
        if self.away:
            raise EngineUnreachable("gone")
        done = Completion(token_ids=(1,), logprobs=(-0.5,), finish=Finish.LENGTH, prompt_tokens=len(prompt_ids))
        for chunk in whole_chunks(done):
            yield chunk


async def test_a_replica_that_missed_a_publication_is_not_used_until_it_has_the_weights() -> None:
    a, b = Replica(), Replica()
    pool = Pool([a, b])  # type: ignore[list-item]
    b.away = True
    await pool.publish(weights(), version=3)
    assert pool.in_use == [a] and a.versions == [3]
    assert all(pool.order(f"session {i}") == [0] for i in range(8))
    await pool.health()
    assert pool.in_use == [a] and not b.rejoined, "it does not answer yet"
    b.away = False
    await pool.health()
    assert pool.in_use == [a, b] and b.rejoined == 1
    a.away = b.away = True
    with pytest.raises(EngineError, match="no engine took the weights"):
        await pool.publish(weights(), version=4)


async def test_a_replica_that_failed_gets_the_weights_again_before_it_is_used() -> None:
    """It may have been started anew between two publications, with the weights of its start."""
    a, b = Replica(), Replica()
    pool = Pool([a, b])  # type: ignore[list-item]
    await pool.publish(weights(), version=3)
    session = next(f"session {i}" for i in range(64) if pool.order(f"session {i}")[0] == 1)
    b.away = True
    await pool.generate([1, 2], Sampling(max_tokens=1), session=session)
    assert pool.order(session) == [0, 1], "the failed one comes last"
    b.away = False
    await pool.health()
    assert b.rejoined == 1 and pool.order(session)[0] == 1
    b.away = True
    await pool.generate([1, 2], Sampling(max_tokens=1), session=session)
    a.away, b.away = True, False
    await pool.generate([1, 2], Sampling(max_tokens=1), session=session)
    assert b.rejoined == 2, "used without the weights"
