"""Images against a real vLLM on CPU with a random Qwen3-VL: `make test-vllm`.

vLLM imports torchvision for this model; where its environment has none, put one that fits on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

import tokentrue as tt
from tests.providers.test_vllm_real import serve
from tests.vision_families import BY_NAME, picture, picture_bytes
from tokentrue.errors import EngineContractError
from tokentrue.ids import TokenIds
from tokentrue.providers.vllm import VLLMProvider
from tokentrue.types import PromptImage, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SIZES = ((300, 200), (64, 640), (33, 57))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    source, folder = BY_NAME["own-qwen3-vl"].folder(), tmp_path_factory.mktemp("tiny") / "vl"
    shutil.copytree(source, folder)
    renderer = tt.load_renderer(source)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = {"vocab_size": 3072, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 80, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "patch_size": 16}
    ids = {f"vision_{end}_token_id": renderer.codec.literals[f"<|vision_{end}|>"] for end in ("start", "end")}
    read = json.loads((source / "config.json").read_text())
    ids |= {name: read[name] for name in ("image_token_id", "video_token_id")}
    torch.manual_seed(0)
    shape = {"eos_token_id": None, "rope_parameters": rope, "initializer_range": 0.3}
    config = Qwen3VLConfig(text_config={**text, **shape}, vision_config=vision, **ids)
    Qwen3VLForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = os.environ.get("TOKENTRUE_VLLM_PYTHON") or pytest.fail("set TOKENTRUE_VLLM_PYTHON; see docs/engines.md")
    options = ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--skip-mm-profiling"]
    options += ["--limit-mm-per-prompt", '{"image":8,"video":0}']
    process, found = serve(python, model, tmp_path_factory.mktemp("log") / "vllm.log", *options, context=4096)
    yield found
    process.terminate()
    process.wait(30)


@pytest_asyncio.fixture
async def provider(url: str) -> AsyncIterator[VLLMProvider]:
    made = VLLMProvider(url)
    yield made
    await made.close()


def seen(renderer: Any, seed: int = 0) -> tuple[TokenIds, list[PromptImage]]:
    content = [
        each
        for place, size in enumerate(SIZES)
        for each in (picture(*size, seed=seed + place), {"type": "text", "text": "and <|image_pad|>"})
    ]
    rendered = renderer.render([{"role": "user", "content": content}])
    files = [picture_bytes(*size, seed=seed + place) for place, size in enumerate(SIZES)]
    return rendered.token_ids, [
        PromptImage(run=run, data=data, media_type="image/png")
        for run, data in zip(rendered.images, files, strict=True)
    ]


async def test_vllm_expands_images_to_the_recorded_ids(provider: VLLMProvider, model: Path) -> None:
    """Text that spells a placeholder is beside them. Pixels reach the model: others give other log-probabilities."""
    renderer = tt.load_renderer(model)
    await provider.check_images()
    sampling = Sampling(max_tokens=4, seed=3)
    ids, images = seen(renderer)
    whole = await provider.generate(ids, sampling, images=images)
    assert whole.prompt_tokens == len(ids)
    *_, last = [chunk async for chunk in provider.stream(ids, sampling, images=images)]
    assert last.final is not None and last.final.token_ids == whole.token_ids
    other = await provider.generate(ids, sampling, images=seen(renderer, 50)[1])
    assert other.logprobs != whole.logprobs


async def test_an_image_of_another_size_is_refused(provider: VLLMProvider, model: Path) -> None:
    ids, images = seen(tt.load_renderer(model))
    wrong = PromptImage(run=images[0].run, data=picture_bytes(900, 900), media_type="image/png")
    with pytest.raises(EngineContractError, match="tokens of a prompt with images"):
        await provider.generate(ids, Sampling(max_tokens=4), images=[wrong, *images[1:]])
