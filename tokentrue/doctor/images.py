"""Probes of images: their tokens, pixels, caches and the positions after them. The reference sees the same pictures
through transformers' processor; each cause is a change of what it is given.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from tokentrue.doctor.exam import Examination, probe
from tokentrue.doctor.findings import Finding, Verdict, cannot_tell, fault, ok
from tokentrue.doctor.reference import Observation, load_model, read_entries
from tokentrue.errors import EngineContractError, TokenContractError
from tokentrue.images import ImageFile, ImageSettings, check_image, import_pillow
from tokentrue.pixels import PixelReader, plain_inputs
from tokentrue.protocols import Seeing
from tokentrue.renderers.seeing.images import PROVEN
from tokentrue.types import PromptImage, Sampling

PIXELS, CACHES, POSITIONS = "images: pixels", "images: caches", "images: positions"
ROWS = {"unknown": PIXELS, "image_pixels": PIXELS, "image_ignored": PIXELS, "image_cache": CACHES}
ROWS["image_positions"] = POSITIONS
SQUARE, TALL = (64, 64), (48, 80)
ROUNDING = 4.0  # times that of text: a tower adds its own
Given = dict[str, Any]
Change = Callable[[Given, int, Observation], Given]  # of what the model gets for a request, by its number


async def probe_images(exam: Examination, findings: Sequence[Finding]) -> list[Finding]:
    """No row for a model that takes no images."""
    if exam.renderer.proof.images.get("user") != PROVEN or isinstance(exam.renderer.vision, str):
        return []
    seen: list[tuple[list[PromptImage], Observation]] = []
    rows = [await probe("images: count")(_count)(exam, seen)]
    if not seen:
        return rows
    if any(one.verdict is Verdict.FAULT for one in findings):
        return [*rows, *(cannot_tell("text alone has a fault", probe=row) for row in (PIXELS, CACHES, POSITIONS))]
    found = _judge(exam, seen)
    left = ok(found.figure) if not found.fault else cannot_tell(f"the difference is that of {found.fault}")
    named = ROWS.get(found.fault)
    return [*rows, *(replace(found if row == named else left, probe=row) for row in (PIXELS, CACHES, POSITIONS))]


async def _count(exam: Examination, seen: list[tuple[list[PromptImage], Observation]]) -> Finding:
    """Adapters refuse an engine that makes another number of tokens of a prompt. One request after the other: the
    second and the last have the ids of the first."""
    if not isinstance(exam.provider, Seeing):
        return cannot_tell("the engine takes no images")
    await exam.provider.check_images()
    sampling = Sampling(temperature=1.0, max_tokens=exam.max_tokens // 2, seed=exam.seed, top_logprobs=4)
    try:
        for pictures in ((1, SQUARE),), ((2, SQUARE),), ((2, SQUARE), (3, TALL)), ((1, SQUARE),):
            files = [_draw(size, exam.seed * 10 + number) for number, size in pictures]
            content = [*(file.part for file in files), {"type": "text", "text": "Describe it."}]
            prompt = exam.renderer.render([{"role": "user", "content": content}])
            images = [
                PromptImage(run=run, data=file.data, media_type=file.media_type)
                for run, file in zip(prompt.images, files, strict=True)
            ]
            answer = await exam.provider.generate(prompt.token_ids, sampling, images=images)
            seen.append((images, Observation.from_completion(prompt.token_ids, answer)))
    except (EngineContractError, TokenContractError) as error:
        seen.clear()
        return fault("image_count", "refused", detail=str(error))
    return ok(f"{len(seen)} prompts counted as they were sent")


def _draw(size: tuple[int, int], seed: int) -> ImageFile:
    file = BytesIO()
    noise = random.Random(seed).randbytes(3 * size[0] * size[1])
    import_pillow().frombytes("RGB", size, noise).save(file, "PNG")
    return check_image(file.getvalue(), None, ImageSettings())


def _judge(exam: Examination, seen: Sequence[tuple[list[PromptImage], Observation]]) -> Finding:
    model, reader = exam.reference.model, PixelReader(exam.reference.source or "")

    @torch.no_grad()
    def measure(change: Change = lambda given, number, one: given) -> Tensor:
        gaps: list[Tensor] = []
        for number, (images, one) in enumerate(seen):
            ids, at = torch.tensor([one.token_ids]), torch.tensor(one.positions)
            given = change(plain_inputs(model, ids, [images], reader), number, one)
            logits = model(input_ids=ids, use_cache=False, **given).logits[0, at - 1].float()
            gaps.append((read_entries(one, logits) - one.targets[2]).abs())
        return torch.cat(gaps)

    gaps, limit = measure(), ROUNDING * exam.mean_limit
    figure = f"mean |δ| {float(gaps.mean()):.2g}, max {float(gaps.max()):.2g} over {gaps.numel()} values"
    if float(gaps.mean()) <= limit and float(gaps.max()) <= ROUNDING * exam.largest_limit:
        return ok(figure)
    pixels = [reader.pixels(images)["pixel_values"] for images, _ in seen]
    causes = _list_causes(reader.processor()[0], pixels)
    left = [(float(measure(change).mean()), name, what) for name, what, change in causes]
    tower = next((name for name, _ in model.model.named_children() if "vis" in name), None)
    if exam.previous is not None and tower is not None:
        own = getattr(model.model, tower)
        setattr(model.model, tower, getattr(load_model(exam.previous).model, tower))
        left.append((float(measure().mean()), "image_cache", "features of the previous weights"))
        setattr(model.model, tower, own)
    size, name, what = min(left)
    rival = min(each for each, other, _ in left if other != name)
    is_named = size <= limit and rival > 2 * size
    detail = f"{what} leaves {size:.2g}, the next cause {rival:.2g}"
    return fault(name if is_named else "unknown", figure, detail=detail)


def _list_causes(processor: Any, pixels: Sequence[Tensor]) -> list[tuple[str, str, Change]]:
    mean, std = (torch.tensor(list(each)).view(1, 3, 1) for each in (processor.image_mean, processor.image_std))
    clip = torch.tensor([[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]]).view(2, 1, 3, 1)

    def recolour(change: Callable[[Tensor], Tensor]) -> Change:
        def apply(given: Given, number: int, one: Observation) -> Given:
            values = given["pixel_values"]
            return {**given, "pixel_values": change(values.view(len(values), 3, -1)).view_as(values)}

        return apply

    def place_as_text(first: int | None) -> Change:
        """From token `first` on; from the first sampled one."""

        def apply(given: Given, number: int, one: Observation) -> Given:
            if (places := given.get("position_ids")) is None:
                return given
            start = one.prompt_tokens if first is None else first
            later = torch.arange(start, len(one.token_ids)).expand(3, 1, -1)
            return {**given, "position_ids": torch.cat((places[..., :start], later), -1)}

        return apply

    def hide(given: Given, number: int, one: Observation) -> Given:
        return {name: value for name, value in given.items() if name == "position_ids"}

    def show(numbers: Sequence[int]) -> Change:
        return lambda given, number, one: {**given, "pixel_values": pixels[numbers[number]]}

    return [
        ("image_ignored", "no pixels", hide),
        ("image_ignored", "no pixels, positions of text", lambda *each: hide(place_as_text(0)(*each), *each[1:])),
        ("image_pixels", "blue, green, red", recolour(lambda x: x.flip(1))),
        ("image_pixels", "no normalisation", recolour(lambda x: x * std + mean)),
        ("image_pixels", "CLIP's normalisation", recolour(lambda x: (x * std + mean - clip[0]) / clip[1])),
        ("image_pixels", "mean and deviation 0.5", recolour(lambda x: (x * std + mean) * 2 - 1)),
        ("image_cache", "the first picture that had the same ids", show((0, 0, 2, 0))),
        ("image_cache", "the last picture that had the same ids", show((0, 0, 2, 1))),
        ("image_positions", "positions of text", place_as_text(0)),
        ("image_positions", "sampled tokens at positions of text", place_as_text(None)),
    ]
