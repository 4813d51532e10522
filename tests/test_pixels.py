"""Pixels of images, checked against the record, and the models that see them: transformers' own forward of the whole
conversation is the reference."""

from __future__ import annotations

import io
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from tests import vision
from tokentrue.errors import ConfigError, TokenContractError
from tokentrue.hub import load_causal_model
from tokentrue.numerics import exact, score, see_rows
from tokentrue.pixels import PixelReader, check_runs, find_images, processor_identity
from tokentrue.protocols import Seeing
from tokentrue.providers.hf import HFProvider
from tokentrue.train.rows import ScoredRow
from tokentrue.train.scoring import ExactScorer, PlainScorer
from tokentrue.types import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return vision.save_model(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def reader(folder: str) -> PixelReader:
    return PixelReader(folder)


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    return load_causal_model(folder, dtype="float32").eval()


TEXT = [5, 9, 14, 200, 33]
PARTS = [7, 8, vision.picture(1), *TEXT, vision.picture(2, 64, 64), vision.picture(3, 160, 40), 11, 12]


def direct(model: Any, folder: str, ids: list[int], parts: list[Any]) -> torch.Tensor:
    """Log-probabilities of ids[1:] by transformers alone: its processor on all pictures, its rule of positions."""
    opened = [Image.open(io.BytesIO(part)) for part in parts if isinstance(part, bytes)]
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    kinds = torch.tensor([[int(token == vision.PAD) for token in ids]])
    seen = dict(processor(images=opened, return_tensors="pt"), mm_token_type_ids=kinds) if opened else {}
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), **seen, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def row(ids: list[int], images: Any = ()) -> ScoredRow:
    return ScoredRow(ids=torch.tensor(ids), temperatures=torch.ones(len(ids)), images=tuple(images))


@pytest.mark.parametrize("scorer", [PlainScorer, ExactScorer])
def test_scores_are_those_of_transformers(model: Any, folder: str, reader: PixelReader, scorer: Any) -> None:
    """Several rows in a pass, with and without images, one image twice."""
    both = [PARTS, [3, *TEXT, vision.picture(1), 4], [6, *TEXT, 8], [vision.picture(2, 64, 64), 4, vision.picture(1)]]
    made = [vision.prompt(reader, parts) for parts in both]
    with torch.no_grad():
        found = scorer(reader)(model, [row(*each) for each in made]).logprobs
    for (ids, _), parts, values in zip(made, both, found, strict=True):
        torch.testing.assert_close(values[1:], direct(model, folder, ids, parts), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("scorer", [PlainScorer, ExactScorer])
def test_another_picture_changes_the_scores_after_it_alone(model: Any, reader: PixelReader, scorer: Any) -> None:
    ids, images = vision.prompt(reader, PARTS)
    other_ids, other = vision.prompt(reader, [7, 8, vision.picture(9), *PARTS[3:]])
    assert ids == other_ids
    with torch.no_grad():
        found, changed = (scorer(reader)(model, [row(ids, each)]).logprobs[0] for each in (images, other))
    start = images[0].run.start
    assert torch.equal(found[: start + 1], changed[: start + 1])
    assert float((found - changed)[images[0].run.start + images[0].run.count :].abs().mean()) > 1e-3


@pytest.mark.parametrize("scorer", [PlainScorer, ExactScorer])
def test_a_sample_whose_pixels_were_lost_is_refused(model: Any, reader: PixelReader, scorer: Any) -> None:
    """No model may be trained blind: neither without bytes, nor without the record of an image, nor with another one's."""
    ids, images = vision.prompt(reader, PARTS)
    for given in ((), images[:2], [*images, replace(images[0], run=replace(images[0].run, start=0))]):
        with pytest.raises(TokenContractError, match="placeholder"):
            scorer(reader)(model, [row(ids, given)])
    with pytest.raises(TokenContractError, match="no bytes"):
        find_images([image.run for image in images], None, "sample s1")
    with pytest.raises(TokenContractError, match="missing"):
        find_images([image.run for image in images], {}.__getitem__, "sample s1")
    with pytest.raises(TokenContractError, match="no reader"):
        scorer()(model, [row(ids, images)])


def test_pixels_that_are_not_the_recorded_ones_are_refused(folder: str, tmp_path: Path) -> None:
    """Other settings, another library, another grid, another file."""
    fresh = PixelReader(folder)
    (image,) = vision.prompt(fresh, [vision.picture(1)])[1]
    fresh.read(image)  # what is kept serves this record alone
    for run, message in (
        (
            replace(image.run, processor=image.run.processor.replace("pillow=", "pillow=1.")),
            "recorded with the processor",
        ),
        (replace(image.run, grid=(1, 6, 4)), "grid"),
        (replace(image.run, count=5), "5 tokens"),
    ):
        with pytest.raises(TokenContractError, match=message):
            fresh.read(replace(image, run=run))
    with pytest.raises(TokenContractError, match="another SHA-256"):
        PixelReader(folder).read(replace(image, data=vision.picture(2)))
    Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, image_mean=[0.5] * 3).save_pretrained(tmp_path)
    with pytest.raises(TokenContractError, match="settings="):
        PixelReader(tmp_path).read(image)
    with pytest.raises(ConfigError, match="torchvision"):
        fresh.read(
            replace(image, run=replace(image.run, processor=image.run.processor.replace(" pil ", " torchvision ")))
        )
    with pytest.raises(ConfigError, match="no directory"):
        PixelReader("").read(image)


def test_orientation_of_a_photo_is_honoured(reader: PixelReader) -> None:
    """A file that says `turn me` has the pixels of the turned picture."""
    upright = Image.open(io.BytesIO(vision.picture(4)))
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    processor = reader.processor()[0]
    plain = vision.record(processor, vision.picture(4), 0)
    turned = replace(plain, data=file.getvalue(), run=replace(plain.run, sha256=vision.digest(file.getvalue())))
    assert torch.equal(reader.read(turned), reader.read(plain))


def test_text_models_take_no_images(reader: PixelReader, model: Any) -> None:
    ids, images = vision.prompt(reader, PARTS)
    check_runs(ids, [], model.config.text_config)
    with pytest.raises(TokenContractError, match="no vision tower"):
        check_runs(ids, images, model.config.text_config)


async def sample(provider: HFProvider, ids: list[int], images: Any, seed: int = 1) -> Any:
    given = {"images": images} if images else {}
    return await provider.generate(ids, Sampling(max_tokens=6, seed=seed), **given)


async def test_provider_samples_what_the_whole_conversation_gives(model: Any, folder: str, reader: PixelReader) -> None:
    """Also where requests with and without images take turns: their positions must not be mixed up."""
    import asyncio

    provider = HFProvider(folder)
    assert isinstance(provider, Seeing)
    await provider.check_images()
    both = [PARTS, [*TEXT, 1, 2], [4, vision.picture(2, 64, 64)]]
    made = [vision.prompt(reader, parts) for parts in both]
    found = await asyncio.gather(*(sample(provider, *each) for each in made))
    for (ids, _), parts, completion in zip(made, both, found, strict=True):
        wanted = direct(model, folder, [*ids, *completion.token_ids], parts)[len(ids) - 1 :]
        torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, rtol=2e-5, atol=2e-5)
    with pytest.raises(TokenContractError, match="placeholder"):
        await sample(provider, made[0][0], [])


def test_identity_tells_settings_apart(folder: str) -> None:
    one = processor_identity(Qwen2VLImageProcessorPil.from_pretrained(folder))
    other = processor_identity(
        Qwen2VLImageProcessorPil.from_pretrained(folder, size={"shortest_edge": 1024, "longest_edge": 4096})
    )
    assert one == PixelReader(folder).processor()[1] and one != other
    assert one.startswith("Qwen2VLImageProcessor pil transformers=") and " pillow=" in one


@pytest.mark.vllm
def test_two_backends_are_told_apart(folder: str) -> None:
    """In vLLM's environment, which has torchvision: one class, one directory, equal grids, other pixels."""
    script = """if True:
        import sys, tests.vision as vision
        from dataclasses import replace
        from tokentrue.pixels import PixelReader, load_processor, processor_identity
        reader = PixelReader(sys.argv[1])
        (image,) = vision.prompt(reader, [vision.picture(1, 100, 70)])[1]
        other = load_processor(sys.argv[1], "torchvision")
        named = replace(image, run=replace(image.run, processor=processor_identity(other)))
        one, two = reader.read(image), reader.read(named)
        assert image.run.processor.split()[-1] == named.run.processor.split()[-1] and named.run.processor != image.run.processor
        assert " torchvision=" in named.run.processor and one.shape == two.shape
        print("RESULT", float((one != two).float().mean()), float((one - two).abs().max()))
    """
    python = os.environ.get("TOKENTRUE_VLLM_PYTHON") or pytest.fail("set TOKENTRUE_VLLM_PYTHON; see docs/engines.md")
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [python, "-c", script, folder], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    found = next((line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    assert found is not None, done.stderr[-2000:]
    assert float(found[0]) > 0.2 and 0 < float(found[1]) < 0.1, found


def test_gradients_are_those_of_transformers(model: Any, folder: str, reader: PixelReader) -> None:
    """Of the whole model, tower included, though one image of two rows is encoded once."""
    made = [vision.prompt(reader, parts) for parts in (PARTS, [3, vision.picture(1), 4, 5])]
    plain, ours = (Qwen3VLForConditionalGeneration.from_pretrained(folder) for _ in range(2))
    for each, scorer in ((plain, PlainScorer(reader)), (ours, ExactScorer(reader))):
        with scorer.active(each):
            (-torch.cat(scorer(each, [row(*one) for one in made]).logprobs).mean()).backward()
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert any("visual" in name and float(one.grad.abs().max()) > 1e-5 for name, one in ours.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_what_is_packed_together(folder: str, reader: PixelReader, dtype: torch.dtype) -> None:
    model = load_causal_model(folder, dtype=str(dtype).removeprefix("torch.")).eval()
    both = [PARTS, [3, *TEXT, vision.picture(1), 4], [6, *TEXT, 8], [vision.picture(2, 64, 64), 4, vision.picture(5)]]
    rows = [row(*vision.prompt(reader, parts)) for parts in both]
    scorer = ExactScorer(reader)
    with torch.no_grad(), exact(model):
        together = scorer(model, rows).logprobs
        for each, values in zip(rows, together, strict=True):
            assert torch.equal(scorer(model, [each]).logprobs[0], values)
            seen = see_rows(model, [(each.ids, each.images)], reader)
            assert torch.equal(score(model, each.ids, images=seen), values[1:])
    with exact(model):
        assert torch.equal(scorer(model, rows[:2]).logprobs[0].detach(), together[0])
