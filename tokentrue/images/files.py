"""Image files of requests: checks and opens them. Nothing here keeps an image.

The first bytes decide the format, and Pillow is given only that one. A file ends where its picture ends: a file that is
also an archive or a script is refused. Pillow is imported with the first image.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib import import_module
from io import BytesIO
from typing import Any

from tokentrue.errors import ConfigError, InputError, LimitExceeded
from tokentrue.json_types import JsonObject
from tokentrue.records import record
from tokentrue.types import AtLeastOne, Checked, Positive

EXTENSIONS = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp", "image/gif": ".gif"}
_MODES = ("1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr")  # 16-bit gray becomes white in RGB
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF: width and height are exchanged
_MOST_PARTS = 1000  # scans of a JPEG, blocks of a GIF's extensions: each costs time, and almost no bytes
_PASSES = (  # of a PNG, and of an interlaced one: first column and row, distances
    ((0, 0, 1, 1),),
    ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # the first marker after a JPEG's entropy-coded data


@record
class ImageSettings(Checked):
    """`fetch`: hosts whose URLs the gateway fetches; empty: none. `fetch_s` is for one URL, redirects are not followed.
    The numbers per request count repeated images, those per session do not."""

    fetch: tuple[str, ...] = ()
    fetch_s: Positive = 10.0
    max_bytes: AtLeastOne = 20 << 20
    max_pixels: AtLeastOne = 50_000_000
    max_per_request: AtLeastOne = 512
    max_per_session: AtLeastOne = 4096
    max_session_bytes: AtLeastOne = 1 << 30


@record
class ImageFile:
    """A checked file. `width` and `height` are those of the upright picture."""

    sha256: str
    media_type: str
    width: int
    height: int
    data: bytes

    @property
    def part(self) -> JsonObject:
        """How messages refer to it."""
        names = ("sha256", "media_type", "width", "height")
        return {"type": "image", **{name: getattr(self, name) for name in names}}


def hash_image(data: bytes) -> str:
    return sha256(data).hexdigest()


def open_image(data: bytes) -> Any:
    """The upright first frame as an RGB `PIL.Image`. Everything that makes pixels must use this: engines and libraries
    that open files by themselves may ignore EXIF orientation."""
    image = _import_pillow().open(BytesIO(data), formats=[_FORMATS[find_media_type(data)][0]])
    return import_module("PIL.ImageOps").exif_transpose(image).convert("RGB")


def is_turned(data: bytes) -> bool:
    """True if EXIF turns or mirrors the picture."""
    image = _import_pillow().open(BytesIO(data), formats=[_FORMATS[find_media_type(data)][0]])
    return image.getexif().get(_ORIENTATION) in range(2, 9)


def check_image(data: bytes, declared: str | None, settings: ImageSettings) -> ImageFile:
    """Decodes the whole file: a truncated or oversized one must not be recorded. `declared` is a media type."""
    pillow, found = _import_pillow(), find_media_type(data)
    declared = {"image/jpg": "image/jpeg"}.get(declared or "", declared)
    if declared not in (None, found):
        raise InputError(f"is declared as {declared!r}, but its bytes are {found}; declare what it is")
    end = _find_end(data, found)
    if end < len(data):
        raise InputError(f"has {len(data) - end} bytes after the end of its picture; save it again without them")
    try:
        if found == "image/webp":  # its decoder allocates the canvas before Pillow knows the size
            check_limit("max_pixels", _count_webp_pixels(data), settings)
        image = pillow.open(BytesIO(data), formats=[_FORMATS[found][0]])
        width, height = image.size
        check_limit("max_pixels", width * height, settings)
        image.load()
        if found == "image/png":
            _check_png_rows(data)
        turned = image.getexif().get(_ORIENTATION) in _TURNED
        is_odd = image.mode not in _MODES
        is_clear = not is_odd and image.has_transparency_data
        is_clear = is_clear and image.convert("RGBA").getchannel("A").getextrema()[0] < 255
    except LimitExceeded:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise LimitExceeded(f"the image has too many pixels (images.max_pixels={settings.max_pixels})") from None
    except Exception as error:  # Pillow's parsers may raise anything for a hostile file
        raise InputError(f"cannot be read as {found}: {str(error)[:100]}") from None
    if is_odd:
        raise InputError(f"has pixels of mode {image.mode}, which RGB cannot represent; save it with 8 bits")
    if is_clear:
        raise InputError("has transparent pixels, which engines blend differently; put it on a background")
    if turned:
        width, height = height, width
    return ImageFile(sha256=hash_image(data), media_type=found, width=width, height=height, data=data)


def _import_pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise ConfigError("images need Pillow, which is not installed here: pip install 'tokentrue[images]'") from error


def check_limit(name: str, count: int, settings: ImageSettings) -> None:
    """`name` is a setting, `max_bytes` or `max_pixels`."""
    if count > (most := getattr(settings, name)):
        raise LimitExceeded(f"the image has {count} {name[4:]}, at most images.{name}={most} are taken")


# Formats: by their first bytes, and where their picture ends.
def find_media_type(data: bytes) -> str:
    for media_type, (_, start, _) in _FORMATS.items():
        if start.match(data):
            return media_type
    raise InputError(f"is none of {', '.join(EXTENSIONS)}")


def _find_end(data: bytes, media_type: str) -> int:
    try:
        end = _FORMATS[media_type][2](data)
    except IndexError:
        end = len(data) + 1
    if end > len(data):
        raise InputError(f"cannot be read as {media_type}: the file is truncated")
    return end


def _count_part(number: int, most: int) -> int:
    if number >= most:
        raise InputError(f"has more than {most} parts, which take too long to decode; save it again")
    return number + 1


def _end_of_png(data: bytes) -> int:
    at, kind = 8, b""
    while kind != b"IEND":
        kind = data[at + 4 : at + 8]
        if len(kind) < 4:
            raise IndexError
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return at


def _check_png_rows(data: bytes) -> None:
    """Raises if rows are missing, which Pillow leaves black."""
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    bits = data[24] * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[data[25]]
    sizes = [(-((left - width) // wide), -((top - height) // tall)) for left, top, wide, tall in _PASSES[data[28]]]
    missing = sum(tall * (1 + (wide * bits + 7) // 8) for wide, tall in sizes if wide > 0)
    at, inflate = 8, zlib.decompressobj()
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        packed = data[at + 8 : at + 8 + size] if data[at + 4 : at + 8] == b"IDAT" else b""
        while packed and missing > 0:
            missing -= len(inflate.decompress(packed, 1 << 20))
            packed = inflate.unconsumed_tail
        at += 12 + size
    if missing > 0 and missing > len(inflate.flush()):
        raise ValueError("the file is truncated")


def _end_of_jpeg(data: bytes) -> int:
    at, scans = 2, 0
    while True:
        while data[at] == 0xFF and data[at + 1] == 0xFF:
            at += 1  # fill bytes
        if data[at] != 0xFF:
            raise IndexError
        marker = data[at + 1]
        at += 2
        if marker == 0xD9:
            return at
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            continue
        at += data[at] << 8 | data[at + 1]
        if marker == 0xDA:
            scans = _count_part(scans, _MOST_PARTS // 10)
            if (found := _AFTER_SCAN.search(data, at)) is None:
                raise IndexError
            at = found.start()


def _end_of_gif(data: bytes) -> int:
    def skip_table(at: int, flags: int) -> int:
        return at + (3 << (flags & 7) + 1 if flags & 0x80 else 0)

    at, blocks = skip_table(13, data[10]), 0
    while (kind := data[at]) != 0x3B:
        if kind == 0x2C:
            at = skip_table(at + 10, data[at + 9]) + 1
        elif kind == 0x21:
            at += 2
        else:
            raise IndexError
        while data[at]:
            blocks = _count_part(blocks, _MOST_PARTS) if kind == 0x21 else blocks
            at += data[at] + 1
        at += 1
    return at + 1


def _end_of_webp(data: bytes) -> int:
    return 8 + (int.from_bytes(data[4:8], "little") + 1) // 2 * 2


def _count_webp_pixels(data: bytes) -> int:
    def read(start: int, size: int) -> int:
        return int.from_bytes(data[start : start + size], "little")

    if data[12:16] == b"VP8X":
        return (read(24, 3) + 1) * (read(27, 3) + 1)
    if data[12:16] == b"VP8L":
        return ((read(21, 4) & 0x3FFF) + 1) * ((read(21, 4) >> 14 & 0x3FFF) + 1)
    return (read(26, 2) & 0x3FFF) * (read(28, 2) & 0x3FFF)


# Media type -> Pillow's name, first bytes, end of the picture.
_FORMATS: Mapping[str, tuple[str, re.Pattern[bytes], Callable[[bytes], int]]] = {
    "image/png": ("PNG", re.compile(rb"\x89PNG\r\n\x1a\n"), _end_of_png),
    "image/jpeg": ("JPEG", re.compile(rb"\xff\xd8\xff"), _end_of_jpeg),
    "image/webp": ("WEBP", re.compile(rb"RIFF....WEBP", re.DOTALL), _end_of_webp),
    "image/gif": ("GIF", re.compile(rb"GIF8[79]a"), _end_of_gif),
}
