"""What images add to a row of ids: their bytes, and the inputs of the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokentrue.errors import TokenContractError
from tokentrue.hub import one_line
from tokentrue.pixels.reader import PixelReader
from tokentrue.types import ImageRun, PromptImage

ReadImage = Callable[[str], bytes]  # SHA-256 (hex) of a file -> its bytes


def find_images(runs: Sequence[ImageRun], read: ReadImage | None, where: str) -> tuple[PromptImage, ...]:
    """The images of a record with their bytes; raises if one has none."""
    if runs and read is None:
        raise TokenContractError(f"{where} has {len(runs)} images and no bytes for them; say where they are (images=)")
    found: list[PromptImage] = []
    for run in runs:
        try:
            data = read(run.sha256) if read is not None else b""
        except (LookupError, OSError) as error:
            raise TokenContractError(f"{where}: image {run.sha256} is missing: {one_line(error)}") from error
        found.append(PromptImage(run=run, data=data, media_type=""))
    return tuple(found)


def check_runs(ids: Any, images: Sequence[PromptImage], config: Any, where: str = "the prompt") -> None:
    """Raises unless the placeholder ids are those of the images, each at its place."""
    import numpy as np

    token = getattr(config, "image_token_id", None) if hasattr(config, "vision_config") else None
    if token is None:
        if images:
            raise TokenContractError(f"{where} has images, and {type(config).__name__} has no vision tower to see them")
        return
    found = np.flatnonzero(np.asarray(ids) == token)
    wanted = [np.arange(image.run.start, image.run.start + image.run.count) for image in images]
    if not np.array_equal(found, np.concatenate([*wanted, np.arange(0)])):
        raise TokenContractError(
            f"{where} has {len(found)} placeholder ids ({token}) and {len(images)} images of {sum(map(len, wanted))} tokens, "
            "not at the same places: every placeholder needs its pixels, and a sampled one has none"
        )


def plain_inputs(
    model: Any, ids_BT: Any, rows: Sequence[Sequence[PromptImage]], reader: PixelReader | None
) -> dict[str, Any]:
    """What the model's own forward takes besides `ids_BT`, rows padded on the right: pixels, the kinds of its
    tokens, and positions."""
    import torch

    images = [image for row in rows for image in row]
    if not hasattr(model.config, "vision_config"):
        return {}
    kinds = torch.zeros_like(ids_BT)
    for row, own in enumerate(rows):
        for run in (image.run for image in own):
            kinds[row, run.start : run.start + run.count] = 1
    made: dict[str, Any] = {}
    if images:
        if reader is None:
            raise TokenContractError(f"{len(images)} images, and no reader of pixels")
        made = {name: value.to(ids_BT.device) for name, value in reader.pixels(images).items()}
        made["pixel_values"] = made["pixel_values"].to(model.dtype)
        made["mm_token_type_ids" if hasattr(model.model, "get_rope_index") else "token_type_ids"] = kinds
    if hasattr(model.model, "get_rope_index"):
        # Explicit: the model otherwise remembers the offset of another request.
        grids = made.get("image_grid_thw")
        made["position_ids"] = model.model.get_rope_index(ids_BT, mm_token_type_ids=kinds, image_grid_thw=grids)[0]
    return made
