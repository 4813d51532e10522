"""The vision tower of Qwen3-VL under `exact`, and what images add to a sequence of ids.

Each image is encoded by itself: all shapes, and so the order of every sum, depend on it alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokentrue.errors import ExactnessError, TokenContractError
from tokentrue.numerics.ops import Ops
from tokentrue.pixels import PixelReader, check_runs
from tokentrue.records import record
from tokentrue.types import ImageRun, PromptImage

KNOWN = "Qwen3VLVisionModel"
Grid = tuple[int, ...]


@record(eq=False)
class SeenImages:
    """The images in ids [1,T]. `order`: which of the distinct images each run of placeholders shows."""

    pixels: tuple[Tensor, ...]  # [patches, values] of each distinct image
    grids: tuple[Grid, ...]  # of each run
    order: tuple[int, ...]
    positions: Tensor  # int64 [3,T]: time, height and width of the rotary embedding

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {
            "pixel_values": torch.cat(self.pixels).to(device),
            "image_grid_thw": torch.tensor(self.grids, device=device),
            "order_of_images": self.order,
            "position_ids": self.positions[:, None].to(device),
        }


def merge_size(model: Any) -> int:
    return model.config.vision_config.spatial_merge_size


def tower_name(model: nn.Module) -> str | None:
    """Raises if the tower has no exact form."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "Vision" in kind and any(True for _ in module.parameters()):
            if kind != KNOWN:
                raise ExactnessError(
                    f"{type(model).__name__}: its vision tower ({kind}) has no exact form, Qwen3-VL's alone has one; serve "
                    "it with hf, vllm or sglang, and train with train.exact = false"
                )
            return name
    return None


def see_rows(
    model: Any, rows: Sequence[tuple[Tensor, Sequence[PromptImage]]], reader: PixelReader | None
) -> SeenImages | None:
    """Of rows (ids, images) that are packed back to back; None if there is no image."""
    for ids, images in rows:
        check_runs(ids, images, model.config, "a row")
    every = [image for _, images in rows for image in images]
    if not every:
        return None
    if reader is None:
        raise TokenContractError(f"{len(every)} images, and no reader of pixels")
    distinct = {(image.run.sha256, image.run.processor): image for image in every}
    place = {key: at for at, key in enumerate(distinct)}
    merge = merge_size(model)
    return SeenImages(
        pixels=tuple(reader.read(image) for image in distinct.values()),
        grids=tuple(image.run.grid for image in every),
        order=tuple(place[image.run.sha256, image.run.processor] for image in every),
        positions=torch.cat([rope_positions([i.run for i in images], len(ids), merge) for ids, images in rows], 1),
    )


def rope_positions(runs: Sequence[ImageRun], length: int, merge: int) -> Tensor:
    """int64 [3, length]: an image spans a box that starts at the next position, and text goes on after its longest
    side."""
    positions, shift = torch.arange(length).repeat(3, 1), 0
    for run in runs:
        times, height, width = run.grid[0], run.grid[1] // merge, run.grid[2] // merge
        at, end = torch.arange(times * height * width), run.start + run.count
        box = torch.stack((at // (height * width), at // width % height, at % width))
        positions[:, run.start : end] = box + (run.start + shift)
        shift += max(height, width) - run.count
        positions[:, end:] = torch.arange(end, length) + shift
    return positions


def encode_image(tower: Any, pixels: Tensor, grid: Grid) -> list[Tensor]:
    """Features [tokens, hidden] that replace the embeddings of an image's placeholders, then those added after each of
    the first decoder layers. Inside `exact`."""
    device = next(tower.parameters()).device
    found = tower(pixels.to(device, tower.dtype), grid_thw=torch.tensor([grid], device=device))
    return [found.pooler_output, *found.deepstack_features]


# ---- exact forms
def tower_forward(tower: Any) -> Callable[..., Any]:
    """The tower's own code, each distinct image once."""
    whole = tower.forward

    def forward(
        hidden_states: Tensor, grid_thw: Tensor, order_of_images: Sequence[int] | None = None, **_: object
    ) -> Any:
        order = range(len(grid_thw)) if order_of_images is None else order_of_images
        grids = {at: grid for at, grid in zip(order, grid_thw, strict=True)}
        parts = hidden_states.split([math.prod(grids[at].tolist()) for at in range(len(grids))])
        found = [whole(part, grid_thw=grids[at][None]) for at, part in enumerate(parts)]
        layers = range(len(found[0].deepstack_features))
        return type(found[0])(
            pooler_output=torch.cat([found[at].pooler_output for at in order]),
            deepstack_features=[torch.cat([found[at].deepstack_features[i] for at in order]) for i in layers],
        )

    return forward


def tower_form(module: Any, ops: Ops) -> Callable[..., Any] | None:
    if isinstance(module, nn.LayerNorm):
        return lambda x: layer_norm(x, module)
    if isinstance(module, nn.GELU) and module.approximate == "none":
        return lambda x: ops.activation(x, "gelu")
    if isinstance(module, nn.Conv3d) and is_patch_product(module):

        def patches(x: Tensor) -> Tensor:
            flat = ops.linear(x.flatten(1), module.weight.flatten(1), module.bias)
            return flat[:, :, None, None, None]

        return patches
    return None


def is_patch_product(module: nn.Conv3d) -> bool:
    """Each patch gives one output."""
    return module.stride == module.kernel_size and module.groups == 1 and not any(module.padding)  # type: ignore[arg-type]


def layer_norm(x: Tensor, module: nn.LayerNorm) -> Tensor:
    """In float32, one rounding."""
    weight, bias = module.weight.float(), module.bias.float()
    return F.layer_norm(x.float(), module.normalized_shape, weight, bias, module.eps).to(x.dtype)
