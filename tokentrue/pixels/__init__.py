"""The pixels of images, and what a model's forward takes for them. Equal ids do not mean equal pixels: another backend,
library version or setting changes most values. So only the recorded processor computes pixels.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokentrue.errors import ConfigError, InputError, TokenContractError
from tokentrue.hub import locate_small_files, one_line
from tokentrue.images import hash_image, open_image
from tokentrue.types import ImageRun, PromptImage
from tokentrue.vision.families import identify_processor

ReadImage = Callable[[str], bytes]  # SHA-256 (hex) of a file -> its bytes
KEPT_BYTES = 512 << 20


def load_processor(model: str | Path, backend: str = "pil") -> Any:
    try:
        from transformers import AutoImageProcessor

        found: Any = AutoImageProcessor.from_pretrained(locate_small_files(model), backend=backend)
    except (ImportError, OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"model: {str(model)!r} has no image processor that loads here: {one_line(error)}") from error
    if found.backend != backend:
        raise ConfigError(f"images: the backend {backend!r} of {type(found).__name__} is not installed")
    return found


def processor_identity(processor: Any) -> str:
    return identify_processor(processor.to_dict(), processor.backend)


class PixelReader:
    """Keeps the newest results; thread-safe. Tensors are shared: they must not be changed."""

    def __init__(self, model: str | Path) -> None:
        self.model = model
        self._processors: dict[str, tuple[Any, str]] = {}
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._lock = threading.Lock()

    def processor(self, backend: str = "pil") -> tuple[Any, str]:
        with self._lock:
            if backend not in self._processors:
                if not str(self.model):
                    raise ConfigError("images: the model has no directory with an image processor; load it from one")
                found = load_processor(self.model, backend)
                self._processors[backend] = found, processor_identity(found)
            return self._processors[backend]

    def read(self, image: PromptImage) -> Any:
        """float32 [patches, values] (or [1, channels, height, width]) of one image."""
        run = image.run
        key = run.sha256, run.processor, run.grid, run.count
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        processor, identity = self.processor("torchvision" if " torchvision " in run.processor else "pil")
        if identity != run.processor:
            raise TokenContractError(
                f"image {run.sha256[:12]} was recorded with the processor {run.processor!r}, here is {identity!r}: install "
                "the recorded libraries and use the recorded settings, or record again"
            )
        if hash_image(image.data) != run.sha256:
            raise TokenContractError(f"image {run.sha256[:12]}: its bytes have another SHA-256; it was replaced")
        found = compute_pixels(processor, image)
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return found

    def pixels(self, images: Sequence[PromptImage]) -> dict[str, Any]:
        import torch

        made = {"pixel_values": torch.cat([self.read(image) for image in images])}
        if made["pixel_values"].dim() == 2:
            made["image_grid_thw"] = torch.tensor([image.run.grid for image in images])
        return made


def compute_pixels(processor: Any, image: PromptImage) -> Any:
    run = image.run
    try:
        made = processor(images=[open_image(image.data)], return_tensors="pt")
    except (OSError, ValueError, SyntaxError, InputError) as error:
        raise TokenContractError(f"image {run.sha256[:12]} cannot be read: {one_line(error)}") from error
    if "image_grid_thw" in made:
        grid = tuple(made["image_grid_thw"][0].tolist())
        count = math.prod(grid) // processor.merge_size**2
        if (grid, count) != (run.grid, run.count):
            raise TokenContractError(
                f"image {run.sha256[:12]}: the record has the grid {run.grid} and {run.count} tokens, the processor "
                f"here gives {grid} and {count}"
            )
    return made["pixel_values"]


def find_images(runs: Sequence[ImageRun], read: ReadImage | None, where: str) -> tuple[PromptImage, ...]:
    if not runs:
        return ()
    if read is None:
        raise TokenContractError(f"{where} has {len(runs)} images and no bytes for them; say where they are (images=)")
    found: list[PromptImage] = []
    for run in runs:
        try:
            data = read(run.sha256)
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
    """What the model's own forward takes besides `ids_BT`, rows padded on the right."""
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
