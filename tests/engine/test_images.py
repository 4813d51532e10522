"""Exactness with images: log-probabilities sampled under random schedules equal the trainer's in bits, whatever images
requests share, however steps cut them, and after every change of the weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLForConditionalGeneration,
)

from tests import vision
from tests.processor import MARKS
from tokentrue.engine import ExactEngine, ScheduleLimits, decoder
from tokentrue.engine.images import Features, RequestImages
from tokentrue.engine.schedule import Request
from tokentrue.errors import EngineRejected, ExactnessError, TokenContractError
from tokentrue.numerics import exact, same_bits, score, see_rows
from tokentrue.numerics.vision import rope_positions
from tokentrue.pixels import PixelReader
from tokentrue.protocols import Seeing
from tokentrue.providers.exact import ExactProvider
from tokentrue.types import PromptImage, Sampling

SIZES = ((96, 64), (64, 64), (160, 40), (32, 32), (96, 128))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return vision.save_model(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def reader(folder: str) -> PixelReader:
    return PixelReader(folder)


def nudged(model: Any, seed: int, only: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = model.state_dict()
    return {
        k: v + torch.randn_like(v) * v.std() / 4 if only in k and v.dim() > 1 else v.clone() for k, v in state.items()
    }


def trainer_bits(
    model: Any, reader: PixelReader, prompt: tuple[list[int], list[PromptImage]], tokens: Any
) -> torch.Tensor:
    ids = torch.tensor([*prompt[0], *tokens])
    with torch.no_grad():
        return score(model, ids, images=see_rows(model, [(ids, prompt[1])], reader))[len(prompt[0]) - 1 :]


def picture(random_: random.Random) -> bytes:
    """One of few files in few sizes: requests share some."""
    return vision.picture(random_.randrange(3), *SIZES[random_.randrange(len(SIZES))])


def make_prompts(reader: PixelReader, random_: random.Random, count: int) -> list[tuple[list[int], list[PromptImage]]]:
    """Some go on from another one: equal ids and images at first, then other text or another picture of the same size."""
    parts: list[list[Any]] = []
    for _ in range(count):
        before = list(random_.choice(parts)) if parts and random_.random() < 0.6 else []
        at = [i for i, part in enumerate(before) if isinstance(part, bytes)]
        if at and random_.random() < 0.4:  # equal placeholders, other pixels
            before[random_.choice(at)] = vision.picture(random_.randrange(3, 6), *SIZES[0])
        for _ in range(random_.randint(1, 3)):
            before += [random_.randrange(280) for _ in range(random_.randint(0, 20))]
            before += [picture(random_)] if random_.random() < 0.6 else [random_.randrange(280)]
        parts.append(before)
    return [vision.prompt(reader, each) for each in parts]


def run_schedule(folder: str, reader: PixelReader, dtype: torch.dtype, seed: int, updates: int = 2) -> tuple[int, int]:
    """(tokens whose bits differ, tokens), with tight memory, small chunks and new weights on the way."""
    random_ = random.Random(seed)
    limits = ScheduleLimits(
        max_requests=random_.randint(2, 6), step_tokens=random_.randint(9, 60), chunk_tokens=random_.randint(2, 40)
    )
    name = str(dtype).removeprefix("torch.")
    with ExactEngine(folder, dtype=name, limits=limits, kv_tokens=random_.choice([300, 600, 2000])) as engine:
        trainer = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        waiting = make_prompts(reader, random_, 7)
        waiting = [each for each in waiting if len(each[0]) < engine.core.capacity - 20]
        running: list[tuple[Request, Any]] = []
        loads = sorted(random_.sample(range(3, 16), updates))
        states = {engine.version: {name: value.clone() for name, value in trainer.state_dict().items()}}
        steps = 0

        def ask(prompt: tuple[list[int], list[PromptImage]]) -> None:
            sampling = Sampling(max_tokens=random_.randint(1, 9), seed=random_.randrange(99))
            request = engine.request(prompt[0], sampling, images=prompt[1])
            engine.core.add(request)
            running.append((request, prompt))

        while waiting or engine.core.busy:
            while waiting and random_.random() < 0.5:
                ask(waiting.pop())
            if loads and steps >= loads[0]:
                states[loads[0]] = nudged(trainer, loads[0], "visual" if len(loads) % 2 else "language_model")
                engine.core.load(states[loads[0]], loads.pop(0))
            engine.core.step()
            steps += 1
        # Chance decides what the requests above share. A prompt asked again at once shares its two whole blocks.
        prompt = vision.prompt(reader, [*range(5, 15), picture(random_), *range(40, 60)])
        for shared in (0, 32):
            before = engine.core.scheduler.prefix_hits
            ask(prompt)
            while engine.core.busy:
                engine.core.step()
            assert engine.core.scheduler.prefix_hits == before + shared
        wrong = total = 0
        for version, state in states.items():
            trainer.load_state_dict(state)
            with exact(trainer):
                for request, prompt in running:
                    if vision.PAD in request.sampled_ids:  # no image belongs to it: refused by the trainer
                        continue
                    at = torch.tensor([own == version for own in request.versions])
                    if bool(at.any()):
                        wanted = trainer_bits(trainer, reader, prompt, request.sampled_ids)[at]
                        found = torch.tensor(request.logprobs)[at]
                        wrong += int((wanted.view(torch.int32) != found.view(torch.int32)).sum())
                        total += int(at.sum())
        assert all(request.error is None for request, _ in running)
        return wrong, total


@pytest.mark.parametrize(
    ("dtype", "seed"),
    [(torch.float32, 0), pytest.param(torch.bfloat16, 1, marks=MARKS)]
    + [
        pytest.param(dtype, n, marks=pytest.mark.slow)
        for n in range(2, 14)
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_random_schedules(folder: str, reader: PixelReader, dtype: torch.dtype, seed: int) -> None:
    wrong, total = run_schedule(folder, reader, dtype, seed)
    assert wrong == 0 and total > 20


def failures(folder: str, reader: PixelReader) -> int:
    return next((n for seed in range(6) if (n := run_schedule(folder, reader, torch.float32, seed)[0])), 0)


def test_control_features_that_survive_new_weights(
    folder: str, reader: PixelReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder cache keyed by the image alone, as engines have it."""
    monkeypatch.setattr(Features, "forget", lambda self: None)
    assert failures(folder, reader) > 0


def test_control_prefixes_shared_by_ids_alone(
    folder: str, reader: PixelReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestImages, "names_in", lambda *_: b"")
    assert failures(folder, reader) > 0


def test_control_one_axis_for_all_positions(folder: str, reader: PixelReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "rope_axes", lambda rotary, device: torch.zeros(16, dtype=torch.int64))
    with pytest.raises(ExactnessError, match="operator"):  # the proof at load notices
        ExactEngine(folder)


@pytest.fixture
def engine(folder: str) -> Iterator[ExactEngine]:
    with ExactEngine(folder) as made:
        yield made


async def test_an_image_is_encoded_once_for_each_version(engine: ExactEngine, reader: PixelReader) -> None:
    one, two = ([*range(5, 30), vision.picture(1), n] for n in (3, 4))
    features, before = engine.core.local.forward.features, engine.core.local.forward.features.encoded
    for parts in (one, two):
        ids, images = vision.prompt(reader, parts)
        await engine.generate(ids, Sampling(max_tokens=2), images=images)
    assert features.encoded == before + 1
    engine.load_weights(nudged(engine.model, 3, "visual"), version=1)
    await engine.generate(ids, Sampling(max_tokens=2), images=images)
    assert features.encoded == before + 2


async def test_two_pictures_with_equal_placeholders_share_no_block_after_the_first_of_their_tokens(
    engine: ExactEngine, reader: PixelReader
) -> None:
    first = vision.prompt(reader, [*range(5, 30), vision.picture(1), *range(40, 60)])
    second = vision.prompt(reader, [*range(5, 30), vision.picture(2), *range(40, 60)])
    assert first[0] == second[0]
    found = [
        await engine.generate(ids, Sampling(max_tokens=4, seed=1), images=images) for ids, images in (first, second)
    ]
    assert engine.metrics()["prefix_hit_tokens_total"] == 16  # the text before the picture
    assert found[0].logprobs != found[1].logprobs
    again = await engine.generate(first[0], Sampling(max_tokens=4, seed=1), images=first[1])
    assert again.logprobs == found[0].logprobs
    assert engine.metrics()["prefix_hit_tokens_total"] == 16 + 48


async def test_provider_and_prompt_logprobs(folder: str, reader: PixelReader) -> None:
    provider = ExactProvider(folder)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
    assert isinstance(provider, Seeing)
    await provider.check_images()
    prompt = vision.prompt(reader, [1, vision.picture(1), 2, vision.picture(2, 64, 64), 3])
    found = await provider.generate(
        prompt[0], Sampling(max_tokens=5, seed=1, extra={"prompt_logprobs": True}), images=prompt[1]
    )
    assert same_bits(torch.tensor(found.logprobs), trainer_bits(model, reader, prompt, found.token_ids))
    whole = trainer_bits(model, reader, (prompt[0][:1], prompt[1]), prompt[0][1:])
    assert same_bits(torch.tensor(found.prompt_logprobs), whole)
    with pytest.raises(TokenContractError, match="placeholder"):
        await provider.generate(prompt[0], Sampling(max_tokens=1))
    await provider.close()


def test_positions_are_those_of_transformers(folder: str, reader: PixelReader) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    for seed in range(10):
        for ids, images in make_prompts(reader, random.Random(seed), 2):
            kinds = torch.tensor([[int(token == vision.PAD) for token in ids]])
            grids = torch.tensor([image.run.grid for image in images]) if images else None
            wanted, delta = model.model.get_rope_index(
                torch.tensor([ids]), mm_token_type_ids=kinds, image_grid_thw=grids
            )
            assert torch.equal(rope_positions([image.run for image in images], len(ids), 2), wanted[:, 0])
            if images:
                own = RequestImages.read(images, reader, 2)
                assert torch.equal(own.positions_of(0, len(ids)), wanted[:, 0]) and own.shift == int(delta)
                assert own.positions_of(len(ids), len(ids) + 3)[1].tolist() == [
                    len(ids) + int(delta) + i for i in range(3)
                ]


async def test_text_models_and_other_towers_are_refused_by_name(
    engine: ExactEngine, folder: str, tmp_path: Path
) -> None:
    from tests.engine.world import build

    provider = ExactProvider(build("qwen3"))
    with pytest.raises(EngineRejected, match="Qwen3ForCausalLM takes no images"):
        await provider.check_images()
    await provider.close()
    with pytest.raises(
        ExactnessError, match="Qwen3VLForConditionalGeneration has a vision tower, which runs in one process"
    ):
        ExactEngine(folder, pipeline=2)
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    small = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    siglip = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    for config, tower in (
        (Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=small), "Qwen2_5_Vision"),
        (
            Qwen3_5Config(text_config={**text, "layer_types": ["full_attention"] * 2}, vision_config=small),
            "Qwen3_5Vision",
        ),
        (Gemma3Config(text_config=text, vision_config=siglip), "SiglipVision"),
    ):
        with pytest.raises(ExactnessError, match=f"{tower}.* has no exact form, Qwen3-VL's alone has one"):
            ExactEngine(AutoModelForImageTextToText.from_config(config))


def test_an_image_that_is_not_the_recorded_one_is_refused(engine: ExactEngine, reader: PixelReader) -> None:
    ids, images = vision.prompt(reader, [1, vision.picture(1), 2])
    with pytest.raises(TokenContractError, match="recorded with the processor"):
        engine.request(ids, Sampling(), images=[replace(images[0], run=replace(images[0].run, processor="another"))])
