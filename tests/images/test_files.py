"""Hostile and odd files. Expected sizes come from Pillow's `exif_transpose` or from the bytes that a test wrote."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import pytest
from PIL import Image, ImageOps

from tests.images.double import data_url, picture
from tokentrue.conversation.images import ImageReader
from tokentrue.errors import InputError, LimitExceeded, MessageError
from tokentrue.images import ImageSettings, check_image, open_image, read_url

SETTINGS = ImageSettings()
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few kilobytes that is gigabytes of pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"\0" * 1_000_000)) + png_chunk(b"IEND", b"")
    )


def test_files_of_thousands_of_tiny_parts_are_not_decoded() -> None:
    """Scans of a JPEG and comments of a GIF cost time by their number, not by their size."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    scan = data[last : last + 2 + int.from_bytes(data[last + 2 : last + 4], "big")]
    with pytest.raises(InputError, match="too long to decode"):
        check_image(data[:last] + scan * 200 + data[last:], None, SETTINGS)
    file = io.BytesIO()
    Image.new("P", (16, 16)).save(file, "GIF")
    data = file.getvalue()
    comment = b"\x21\xfe" + b"\x01x" * 2000 + b"\x00"
    with pytest.raises(InputError, match="too long to decode"):
        check_image(data[:-1] + comment + data[-1:], None, SETTINGS)


@pytest.mark.parametrize("name", FORMATS)
def test_the_four_formats(name: str) -> None:
    data = picture(40, 30, name)
    file = check_image(data, FORMATS[name], SETTINGS)
    assert (file.media_type, file.width, file.height, file.data) == (FORMATS[name], 40, 30, data)
    assert check_image(data, None, SETTINGS) == file
    assert open_image(data).size == (40, 30)


def test_the_first_frame_of_a_gif() -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (20, 10), color) for color in ((255, 0, 0), (0, 255, 0))]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    check_image(file.getvalue(), None, SETTINGS)
    assert open_image(file.getvalue()).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_are_those_of_the_upright_picture(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    upper = Image.new("RGB", (40, 30), (0, 0, 0))
    upper.paste((255, 255, 255), (0, 0, 20, 15))
    file = io.BytesIO()
    upper.save(file, "PNG", exif=exif)
    data = file.getvalue()
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    found = check_image(data, None, SETTINGS)
    assert (found.width, found.height) == upright.size == open_image(data).size
    assert open_image(data).tobytes() == upright.convert("RGB").tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_every_truncation_is_refused(name: str) -> None:
    data = picture(30, 30, name, color=(1, 2, 3))
    for cut in range(12, len(data), 7):
        with pytest.raises(InputError) as refused:
            check_image(data[:cut], None, SETTINGS)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mode, kind, channels", [("RGB", 2, 3), ("L", 0, 1), ("P", 3, 1), ("1", 0, 1)])
@pytest.mark.parametrize("interlaced", [0, 1])
def test_a_png_with_too_few_rows_is_truncated(mode: str, kind: int, channels: int, interlaced: int) -> None:
    """Written here, row by row: Pillow writes no interlaced files."""

    width, height, bits = 11, 13, 1 if mode == "1" else 8
    adam7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    rows: list[bytes] = []
    for left, top, wide, tall in adam7 if interlaced else ((0, 0, 1, 1),):
        columns = len(range(left, width, wide))
        rows += [b"\0" * (1 + -(-columns * channels * bits // 8)) for _ in range(top, height, tall) if columns]

    def file(raw: bytes) -> bytes:
        header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, interlaced)
        palette = png_chunk(b"PLTE", b"abc") if mode == "P" else b""
        packed = zlib.compress(raw)
        parts = png_chunk(b"IDAT", packed[:5]) + png_chunk(b"IDAT", packed[5:])
        return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + palette + parts + png_chunk(b"IEND", b"")

    whole = b"".join(rows)
    assert check_image(file(whole), None, SETTINGS).height == height
    for raw in (whole[:-1], b"".join(rows[:-1]), b"".join(rows[: len(rows) // 2])):
        with pytest.raises(InputError, match=r"image/png: .*truncated"):
            check_image(file(raw), None, SETTINGS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tail", [b"PK\x03\x04 an archive", b"<script>alert(1)</script>", b"\0"])
def test_nothing_follows_the_picture(name: str, tail: bytes) -> None:
    with pytest.raises(InputError, match=f"has {len(tail)} bytes after the end"):
        check_image(picture(30, 30, name) + tail, None, SETTINGS)


@pytest.mark.parametrize(
    "data", [b"%PDF-1.7 " + picture(), b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"", b"BM" + b"\0" * 60]
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="is none of image/png"):
        check_image(data, "image/png", SETTINGS)


def test_the_declared_type_must_be_the_bytes() -> None:
    with pytest.raises(InputError, match="declared as 'image/png', but its bytes are image/jpeg"):
        check_image(picture(9, 9, "JPEG"), "image/png", SETTINGS)
    assert check_image(picture(9, 9, "JPEG"), "image/jpg", SETTINGS).media_type == "image/jpeg"


@pytest.mark.parametrize("size", [(8000, 8000), (20_000, 20_000), (2**30, 2**30)])
def test_a_bomb_is_not_decoded(size: tuple[int, int]) -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded, match="pixels"):
            check_image(bomb(*size), None, SETTINGS)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif"}])
def test_the_size_of_a_webp_is_read_before_it_is_decoded(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind of chunk: VP8, VP8L, VP8X."""
    from tokentrue import images as files

    data = picture(70, 31, "WEBP", **options)
    assert files._count_webp_pixels(data) == 70 * 31
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(LimitExceeded, match="2170 pixels"):
        check_image(data, None, ImageSettings(max_pixels=2169))


def test_pixels_that_sides_would_read_differently() -> None:
    with pytest.raises(InputError, match="transparent"):
        check_image(picture(9, 9, "PNG", (1, 2, 3, 254), "RGBA"), None, SETTINGS)
    check_image(picture(9, 9, "PNG", (1, 2, 3, 255), "RGBA"), None, SETTINGS)
    with pytest.raises(InputError, match="8 bits"):
        check_image(picture(9, 9, "PNG", 40_000, "I;16"), None, SETTINGS)


def test_random_damage_is_one_typed_line() -> None:
    import random

    rng = random.Random(5)
    for name in FORMATS:
        data = picture(30, 30, name)
        for _ in range(150):
            broken = bytearray(data)
            for _ in range(rng.randint(1, 6)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            try:
                check_image(bytes(broken), None, SETTINGS)
            except (InputError, LimitExceeded) as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png,abc", "with base64"),
        ("data:image/png;base64", "with base64"),
        ("data:image/png;base64,a b", "is not base64"),
        ("data:image/png;base64,é", "is not base64"),
        ("file:///etc/passwd", "must be a data URL"),
        ("/etc/passwd", "must be a data URL"),
        ("https://example.org/cat.png", "does not fetch from"),
        ("http://[::1/x", "is not a URL"),
        ("ftp://example.org/cat.png", "must be a data URL"),
    ],
)
def test_urls_that_are_refused(url: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_url(url, SETTINGS)


def test_both_alphabets_of_base64() -> None:
    data = bytes(range(248, 256)) * 3
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        assert read_url(f"data:image/png;base64,{encode(data).decode()}", SETTINGS) == (data, "image/png")


def test_limits_come_before_work() -> None:
    small = ImageSettings(max_bytes=100, max_pixels=10_000, max_per_request=3)
    with pytest.raises(LimitExceeded, match=r"images.max_bytes=100"):
        read_url(data_url(b"x" * 101), small)
    with pytest.raises(LimitExceeded, match=r"images.max_pixels=10000"):
        check_image(picture(101, 100), None, small)
    broken: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(LimitExceeded, match=r"4 images, at most images.max_per_request=3"):
        ImageReader(small).read([{"role": "user", "content": [broken] * 4}])


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_images_of_other_roles(role: str) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(picture())}}
    with pytest.raises(
        MessageError, match=r"messages\[0\].content: images are taken in user messages and tool results"
    ):
        ImageReader().read([{"role": role, "content": [part]}])


def test_unknown_fields_are_refused_by_name() -> None:
    url = data_url(picture())
    for part, field in (
        ({"type": "image_url", "image_url": {"url": url, "resize": 2}}, "image_url.resize"),
        ({"type": "image_url", "image_url": {"url": url}, "uuid": "x"}, "uuid"),
    ):
        with pytest.raises(MessageError, match=rf"content\[0\].{field}: unknown field"):
            ImageReader().read([{"role": "user", "content": [part]}])


def test_references_are_only_those_of_the_record() -> None:
    reader, file = ImageReader(), check_image(picture(), None, SETTINGS)
    with pytest.raises(MessageError, match="not in this session's record"):
        reader.read([{"role": "user", "content": [file.part]}])
    reader.recorded[file.sha256] = file.part
    reader.read([{"role": "user", "content": [file.part]}])
    with pytest.raises(MessageError, match="not in this session's record"):
        reader.read([{"role": "user", "content": [{**file.part, "width": 9}]}])
