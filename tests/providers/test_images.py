"""Images on the wires of vLLM and SGLang, through the pool, and tokens that only an image's place may have.

`Eye` is a stand-in that speaks vLLM's /inference/v1/generate with `content_parts` and SGLang's /generate with
`image_data`: like the real ones it finds placeholders in the ids that it is sent, and expands each by its own image
processor, transformers' class. tests/providers/test_images_vllm.py talks to a real vLLM.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

import tokentrue as tt
from tests.vision_families import BY_NAME, picture, picture_bytes
from tokentrue.errors import EngineContractError, EngineRejected, TokenTrueError
from tokentrue.ids import TokenIds
from tokentrue.protocols import Seeing
from tokentrue.providers import remote
from tokentrue.providers.building import collapse_images
from tokentrue.providers.pool import Pool
from tokentrue.providers.scripted import ScriptedProvider
from tokentrue.providers.sglang import SGLangProvider
from tokentrue.providers.vllm import VLLMProvider
from tokentrue.types import ImageRun, PromptImage, Sampling, TurnRequest

SETTINGS = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}


class Eye:
    """`faults`: what the stand-in does wrong; `has_parts` and `has_route`: what it can do."""

    def __init__(self, pad: int) -> None:
        self.pad, self.requests, self.calls = pad, list[dict[str, Any]](), list[str]()
        self.settings: Mapping[str, Any] = SETTINGS
        self.has_parts = self.has_route = self.tells = True
        self.broken = 0
        self.has_cache_route, self.version = True, "0"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, body = "/" + request.match_info["path"], await request.read()
        given: dict[str, Any] = json.loads(body) if body else {}
        self.calls.append(path)
        if path == "/v1/models":
            return web.json_response({"data": [{"id": "model", "root": "model"}]})
        if path == "/openapi.json":
            fields = {"token_ids": {}, **({"content_parts": {}} if self.has_parts else {})}
            return web.json_response({"components": {"schemas": {"GenerateRequest": {"properties": fields}}}})
        if path == "/model_info":
            return web.json_response({"model_path": "model", "weight_version": "1"})
        if path == "/inference/v1/generate":
            if not self.has_route:
                return web.json_response({"error": "scale-out is off"}, status=403)
            if "token_ids" not in given:
                return web.json_response({"error": "empty"}, status=400)
        if path == "/reset_encoder_cache" and not self.has_cache_route:
            return web.json_response({"detail": "Not Found"}, status=404)
        if path == "/update_weight_version":
            self.version = given["new_version"]
        if not given.keys() & {"token_ids", "prompt", "input_ids"}:
            return web.json_response({"success": True, "weight_version": self.version})
        self.requests.append(given)
        if path == "/generate":
            return self._sglang(given)
        return await self._vllm(request, given)

    def expand(self, ids: Sequence[int], urls: Sequence[str]) -> list[int]:
        from PIL import Image
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor, waiting, out = Qwen2VLImageProcessorPil(**self.settings), list(urls), list[int]()
        for id_ in ids:
            if id_ == self.pad and waiting:
                file = io.BytesIO(base64.b64decode(waiting.pop(0).partition(",")[2]))
                width, height = Image.open(file).size
                out += [self.pad] * (processor.get_number_of_image_patches(height, width) // 4)
            else:
                out.append(id_)
        return out

    async def _vllm(self, request: web.Request, given: dict[str, Any]) -> web.StreamResponse:
        ids = given.get("token_ids", given.get("prompt"))
        ids = self.expand(ids, [part["url"] for part in given.get("content_parts", ())])
        temperature = given.get("sampling_params", given).get("temperature", 1.0)
        token = {
            "token_id": 7,
            "logprob": -0.5 * temperature,
            "top_logprobs": [{"token_id": 7, "logprob": -0.5 * temperature}],
        }
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": [7],
            "logprobs": {"content": [token]},
            "finish_reason": "length",
        }
        if "prompt" in given:
            choice["logprobs"] = {
                "tokens": ["token_id:7"],
                "token_logprobs": [-0.5 * temperature],
                "top_logprobs": [{"token_id:7": -0.5 * temperature}],
            }
        event: dict[str, Any] = {"choices": [choice]}
        if self.tells:
            event["usage"] = {"prompt_tokens": len(ids)}
            event |= {"prompt_token_ids": ids} if given.get("return_token_ids") and "token_ids" in given else {}
        if self.broken and given.get("content_parts"):
            self.broken -= 1
            assert request.transport is not None
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            part = {"choices": [{**choice, "finish_reason": None}]}
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
            request.transport.close()
            return response
        if not given.get("stream"):
            return web.json_response(event)
        return web.Response(text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    def _sglang(self, given: dict[str, Any]) -> web.Response:
        ids = self.expand(given["input_ids"], given.get("image_data", ()))
        meta: dict[str, Any] = {
            "completion_tokens": 1,
            "output_token_logprobs": [[-0.5, 7, None]],
            "weight_version": "1",
        }
        meta |= {"finish_reason": {"type": "length"}} | ({"prompt_tokens": len(ids)} if self.tells else {})
        event = {"output_ids": [7], "meta_info": meta}
        if not given["stream"]:
            return web.json_response(event)
        return web.Response(text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


@pytest.fixture(scope="module")
def renderer() -> Any:
    return tt.load_renderer(BY_NAME["own-qwen3-vl"].folder())


@pytest_asyncio.fixture
async def eye(renderer: Any) -> AsyncIterator[tuple[Eye, str]]:
    made = Eye(renderer.codec.literals["<|image_pad|>"])
    server = TestServer(made.app())
    await server.start_server()
    yield made, str(server.make_url("")).rstrip("/")
    await server.close()


def seen(renderer: Any, *sizes: tuple[int, int]) -> tuple[TokenIds, list[PromptImage]]:
    content = [each for size in sizes for each in (picture(*size), {"type": "text", "text": "and"})]
    rendered = renderer.render([{"role": "user", "content": content}])
    files = [picture_bytes(*size) for size in sizes]
    images = [
        PromptImage(run=run, data=file, media_type="image/png")
        for run, file in zip(rendered.images, files, strict=True)
    ]
    return rendered.token_ids, images


ENGINES = {"vllm": VLLMProvider, "sglang": SGLangProvider}
ONE = Sampling(max_tokens=1)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("whole", [True, False])
async def test_an_engine_gets_one_placeholder_for_each_image(
    name: str, whole: bool, eye: tuple[Eye, str], renderer: Any
) -> None:
    engine, url = eye
    provider = Pool([ENGINES[name](url)])
    assert isinstance(provider, Seeing)
    await provider.check_images()
    ids, images = seen(renderer, (300, 200), (64, 640))
    found = [chunk async for chunk in provider.stream(ids, ONE, whole=whole, images=images)]
    assert found[-1].final is not None and found[-1].final.prompt_tokens == len(ids)
    sent = engine.requests[-1]
    bare = sent["token_ids" if name == "vllm" else "input_ids"]
    assert bare.count(engine.pad) == 2 and engine.expand(bare, sent_urls(sent)) == ids
    assert [base64.b64decode(url.partition(",")[2]) for url in sent_urls(sent)] == [image.data for image in images]
    assert "features" not in sent
    await provider.close()


def sent_urls(sent: Mapping[str, Any]) -> list[str]:
    return sent.get("image_data") or [part["url"] for part in sent["content_parts"]]


@pytest.mark.parametrize("name", ENGINES)
async def test_an_image_is_encoded_once_for_all_turns_and_the_server_is_asked_once(
    name: str, eye: tuple[Eye, str], renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, url = eye
    encoded: list[bytes] = []

    def encode(data: bytes) -> bytes:
        encoded.append(data)
        return base64.b64encode(data)

    monkeypatch.setattr(remote, "b64encode", encode)
    provider = Pool([ENGINES[name](url)])
    ids, images = seen(renderer, (64, 64), (96, 64))
    for _ in range(3):
        await provider.check_images()
        await provider.generate(ids, ONE, images=images)
    assert encoded == [image.data for image in images]
    asked = [call for call in engine.calls if call in ("/model_info", "/openapi.json")]
    assert len(asked) == 1, "check_images of the gateway and of the request"
    monkeypatch.setattr(remote, "IMAGE_BYTES", 1)  # room for the last one alone
    for _ in range(2):
        await provider.generate(ids, ONE, images=images)
    assert len(encoded) == 2 + 1 + 2, "the first image was pushed out, then each by the other"
    sent = [request for request in engine.requests if request.get("image_data") or request.get("content_parts")]
    assert len(sent) == 5
    for request in sent:
        assert [base64.b64decode(url.partition(",")[2]) for url in sent_urls(request)] == [each.data for each in images]
    await provider.close()


@pytest.mark.parametrize("orientation", range(2, 9))
async def test_a_picture_that_exif_turns_never_reaches_sglang(
    orientation: int, eye: tuple[Eye, str], renderer: Any
) -> None:
    """It would be shown as it lies, with the same number of tokens."""
    from PIL import Image

    engine, url = eye
    ids, (image,) = seen(renderer, (64, 64))
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.new("RGB", (64, 64)).save(file, "JPEG", exif=exif)
    turned = PromptImage(run=image.run, data=file.getvalue(), media_type="image/jpeg")
    provider = SGLangProvider(url)
    with pytest.raises(EngineRejected, match="save the image upright"):
        await provider.generate(ids, ONE, images=[turned])
    assert not engine.requests
    await provider.close()


@pytest.mark.parametrize("name", ENGINES)
async def test_an_engine_that_counts_otherwise_is_refused(name: str, eye: tuple[Eye, str], renderer: Any) -> None:
    """It resizes by other settings: the ids that it computes with are not the recorded ones."""
    engine, url = eye
    engine.settings = {**SETTINGS, "size": {"shortest_edge": 1024, "longest_edge": 16384}}
    provider = ENGINES[name](url)
    ids, images = seen(renderer, (300, 200))
    with pytest.raises(EngineContractError, match="tokens"):
        await provider.generate(ids, ONE, images=images)
    engine.settings, engine.tells = SETTINGS, False
    with pytest.raises(EngineContractError, match="did not count the tokens of a prompt with images"):
        await provider.generate(ids, ONE, images=images)
    await provider.close()


async def test_vllm_without_content_parts_or_the_token_route_refuses_images(
    eye: tuple[Eye, str], renderer: Any
) -> None:
    engine, url = eye
    ids, images = seen(renderer, (300, 200))
    for has_parts, has_route in ((False, True), (True, False)):
        engine.has_parts, engine.has_route = has_parts, has_route
        provider = VLLMProvider(url)
        with pytest.raises(EngineRejected, match="takes images only as content_parts"):
            await provider.generate(ids, ONE, images=images)
        with pytest.raises(EngineRejected, match="takes images only as content_parts"):
            await provider.check_images()
        assert not any("content_parts" in request for request in engine.requests)
        await provider.close()


async def test_the_pool_sends_images_again_when_it_resumes(eye: tuple[Eye, str], renderer: Any) -> None:
    engine, url = eye
    engine.broken = 1
    provider = Pool([VLLMProvider(url, retries=0)])
    ids, images = seen(renderer, (300, 200))
    *_, last = [chunk async for chunk in provider.stream(ids, Sampling(max_tokens=2), images=images)]
    first, second = (sent for sent in engine.requests if "content_parts" in sent)
    assert second["content_parts"] == first["content_parts"]
    assert second["token_ids"] == [*first["token_ids"], 7]
    assert last.final is not None and last.final.token_ids == [7, 7]
    await provider.close()


async def test_a_pool_with_an_engine_that_takes_none_refuses(eye: tuple[Eye, str]) -> None:
    class Blind:
        name, truthful_filters = "blind", frozenset[str]()

    engine, blind = VLLMProvider(eye[1]), Blind()
    with pytest.raises(EngineRejected, match="'blind' takes no images"):
        await Pool([engine, blind]).check_images()  # type: ignore[list-item]
    await engine.close()


def test_runs_are_collapsed_by_place_and_never_by_search(renderer: Any) -> None:
    ids, images = seen(renderer, (64, 64), (64, 64))
    pad = ids[images[0].run.start]
    assert collapse_images("x", ids, images).count(pad) == 2
    with pytest.raises(EngineContractError, match="without an image"):
        collapse_images("x", TokenIds([*ids, pad]), images)
    with pytest.raises(EngineContractError, match="no image at token"):
        collapse_images("x", ids[1:], images)
    run: ImageRun = images[0].run
    foreign = PromptImage(
        run=ImageRun(
            sha256=run.sha256, start=run.start, count=run.count, grid=(1, 1, 1), processor="Gemma3ImageProcessor pil"
        ),
        data=b"",
        media_type="image/png",
    )
    with pytest.raises(EngineRejected, match="Gemma3ImageProcessor is not proven"):
        collapse_images("x", ids, [foreign])


async def test_publishing_clears_the_cache_of_encoded_images(
    eye: tuple[Eye, str], renderer: Any, tmp_path: Path
) -> None:
    """vLLM keys it by the image's hash alone. A server without the route is refused once it has seen an image."""
    engine, url = eye
    provider = VLLMProvider(url, weights_dir=tmp_path, retries=0)
    weights = {"w": torch.zeros(2)}
    await provider.publish(weights.items(), version=1)
    steps = [call for call in engine.calls if call != "/weight_info"]
    assert steps.index("/collective_rpc") < steps.index("/reset_encoder_cache") < steps.index("/resume")
    engine.has_cache_route = False
    await provider.publish(weights.items(), version=2)
    ids, images = seen(renderer, (300, 200))
    await provider.generate(ids, ONE, images=images)
    with pytest.raises(EngineRejected, match="cannot clear its cache of images"):
        await provider.publish(weights.items(), version=3)
    await provider.close()


# ---- tokens that only an image's place may have


async def test_engines_that_take_a_logit_bias_cannot_sample_a_placeholder(eye: tuple[Eye, str], renderer: Any) -> None:
    """On a text-only conversation, too."""
    engine, url = eye
    for provider, where in ((VLLMProvider(url), "sampling_params"), (SGLangProvider(url), "sampling_params")):
        session = tt.Session(provider=Pool([provider]), renderer=renderer)
        await session.chat(
            [{"role": "user", "content": "x"}], sampling=Sampling(max_tokens=1, extra={"logit_bias": {"5": 1.0}})
        )
        bias = engine.requests[-1][where]["logit_bias"]
        assert bias == {"5": 1.0, **{str(each): -100.0 for each in renderer.placeholder_ids}}
        assert len(bias) == 3
        await provider.close()


@pytest.mark.parametrize("name", ["hf", "exact"])
async def test_local_engines_leave_out_what_sampled_a_placeholder(name: str, tmp_path: Path) -> None:
    """They take no bias, because the trainer scores without it: the turn is refused and marked."""
    from tests.integrations.seeing import make_model

    make_model(tmp_path)
    renderer = tt.load_renderer(tmp_path)
    provider = tt.providers.load(name, model=str(tmp_path))
    session = tt.Session(provider=provider, renderer=renderer)
    for seed in range(40):
        with suppress(TokenTrueError):
            talk = [{"role": "user", "content": f"Colour? {seed}"}]
            await session.chat(talk, sampling=Sampling(temperature=50.0, max_tokens=200, seed=seed))
        if left_out := session.coverage().untrained:
            break
    assert {each.why for each in left_out} == {"placeholder"}
    sampled = [
        sample.token_ids[place] for sample in session.samples() for place, bit in enumerate(sample.loss_mask) if bit
    ]
    assert not set(renderer.placeholder_ids) & set(sampled)
    await provider.close()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_sampled_placeholder_is_kept_and_never_trained(renderer: Any, streamed: bool) -> None:
    pad = renderer.placeholder_ids[0]
    stop = renderer.stop_token_ids[0]
    provider = ScriptedProvider([{"token_ids": [9, pad, 11, stop]}, {"token_ids": [9, 11, stop]}])
    session = tt.Session(provider=provider, renderer=renderer)
    talk = [{"role": "user", "content": "x"}]
    if streamed:
        with pytest.raises(TokenTrueError, match=f"sampled the placeholder {pad}"):
            async for _ in session.stream(TurnRequest(messages=talk)):
                pass
    else:
        with pytest.raises(TokenTrueError, match=f"sampled the placeholder {pad}"):
            await session.chat(talk)
    (only,) = session.coverage().untrained
    assert only.why == "placeholder"
    assert not session.samples(include_abandoned=True)
    await session.reward(1.0, leaf=only.node)
    assert session.coverage().trained == 0
    await session.chat(talk)  # asked again
    assert (session.coverage().trained, session.coverage().untrained[0].why) == (3, "placeholder")
