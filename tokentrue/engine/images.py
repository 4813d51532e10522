"""The images of requests, and their features, computed once for each image and version of the weights."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tokentrue.numerics.vision import Grid, SeenImages, encode_image, rope_positions
from tokentrue.pixels import PixelReader
from tokentrue.records import record
from tokentrue.types import ImageRun, PromptImage

KEPT_BYTES = 1 << 30


@record(eq=False)
class RequestImage:
    """`name`: of its file and processor, in the names of cache blocks and features."""

    name: bytes
    start: int
    end: int
    grid: Grid
    pixels: Tensor


@record(eq=False)
class RequestImages:
    """`positions` int64 [3,E]: those of the rotary embedding up to the token after the last image."""

    images: tuple[RequestImage, ...]
    positions: Tensor

    @classmethod
    def read(cls, images: Sequence[PromptImage], reader: PixelReader, merge: int) -> Self:
        runs = [image.run for image in images]
        own = tuple(
            RequestImage(
                name=hashlib.sha256(f"{run.sha256} {run.processor}".encode()).digest(), start=run.start, end=run.start + run.count,
                grid=run.grid, pixels=reader.read(image),
            )
            for run, image in zip(runs, images, strict=True)
        )  # fmt: skip
        return cls(images=own, positions=rope_positions(runs, own[-1].end + 1, merge))

    @property
    def shift(self) -> int:
        """Of every position after the last image."""
        return int(self.positions[0, -1]) - self.positions.shape[1] + 1

    def positions_of(self, start: int, end: int) -> Tensor:
        known = self.positions[:, start:end]
        later = torch.arange(start + known.shape[1], end) + self.shift
        return torch.cat((known, later.expand(3, -1)), 1)

    def names_in(self, start: int, end: int) -> bytes:
        return b"".join(image.name for image in self.images if image.start < end and image.end > start)

    def seen(self, length: int) -> SeenImages:
        return SeenImages(
            pixels=tuple(image.pixels for image in self.images), grids=tuple(image.grid for image in self.images),
            order=tuple(range(len(self.images))), positions=self.positions_of(0, length),
        )  # fmt: skip


def proof_images(tower: Any) -> RequestImages:
    """Two of random pixels, for the proof at load; a piece of the proof ends within the second."""
    config, runs = tower.config, list[ImageRun]()
    merge, size = config.spatial_merge_size, tower.patch_embed.proj.weight[0].numel()
    for start, height, width in ((10, 2, 3), (73, 4, 2)):
        grid = (1, height * merge, width * merge)
        runs.append(ImageRun(sha256="", start=start, count=height * width, grid=grid, processor=""))
    images = tuple(
        RequestImage(
            name=bytes([run.start]), start=run.start, end=run.start + run.count, grid=run.grid,
            pixels=torch.randn(run.count * merge**2, size, generator=torch.Generator().manual_seed(run.start)),
        )
        for run in runs
    )  # fmt: skip
    return RequestImages(images=images, positions=rope_positions(runs, images[-1].end + 1, merge))


class VisualRows(NamedTuple):
    """Token rows that show images: what replaces their embeddings, and what is added after each of the first layers."""

    rows: Tensor
    features: Tensor
    added: tuple[Tensor, ...]


class Features:
    """Keeps the newest; `forget` after a change of weights."""

    def __init__(self, tower: Any) -> None:
        self.tower = tower
        self.encoded = 0
        self._kept: OrderedDict[bytes, list[Tensor]] = OrderedDict()

    def find(self, image: RequestImage) -> list[Tensor]:
        found = self._kept.pop(image.name, None)
        if found is None:
            self.encoded += 1
            found = encode_image(self.tower, image.pixels, image.grid)
        self._kept[image.name] = found
        while len(self._kept) > 1 and sum(part.nbytes for each in self._kept.values() for part in each) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return found

    def rows_of(
        self, starts: Sequence[int], counts: Sequence[int], images: Sequence[RequestImages | None]
    ) -> VisualRows | None:
        """Of a step's sequences; None if it shows no image."""
        rows, parts, first = list[Tensor](), list[list[Tensor]](), 0
        for start, count, own in zip(starts, counts, images, strict=True):
            for image in () if own is None else own.images:
                low, high = max(start, image.start), min(start + count, image.end)
                if low < high:
                    rows.append(torch.arange(low, high) + (first - start))
                    parts.append([part[low - image.start : high - image.start] for part in self.find(image)])
            first += count
        if not rows:
            return None
        features, *added = (torch.cat(level) for level in zip(*parts, strict=True))
        return VisualRows(torch.cat(rows).to(features.device), features, tuple(added))

    def forget(self) -> None:
        self._kept.clear()
