"""The pixels of a prompt's images, from transformers' own image processor. Equal ids do not mean equal pixels:
another backend, library version or setting changes most values at equal grids. So a record names its processor, and
no other one computes pixels for it."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokentrue.errors import ConfigError, InputError, TokenContractError
from tokentrue.hub import locate_small_files, one_line
from tokentrue.images import hash_image, open_image
from tokentrue.types import PromptImage
from tokentrue.vision.families import identify_processor

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
    """As a record names it, see `identify_processor`."""
    return identify_processor(processor.to_dict(), processor.backend)


class PixelReader:
    """Reads images by the processor that their record names. Keeps the newest results; thread-safe. Tensors are
    shared: they must not be changed."""

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
        """What the model's own forward takes for `images`."""
        import torch

        made = {"pixel_values": torch.cat([self.read(image) for image in images])}
        if made["pixel_values"].dim() == 2:
            made["image_grid_thw"] = torch.tensor([image.run.grid for image in images])
        return made


def compute_pixels(processor: Any, image: PromptImage) -> Any:
    """Raises unless the processor's grid and count are the record's."""
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
