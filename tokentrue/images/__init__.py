"""Image files of requests. The first bytes decide the format, and Pillow is given only that one. A file that is also an
archive or a script is refused. URLs are fetched from hosts that the operator allows: no redirect, no private address.
"""

import base64
import http.client
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from io import BytesIO
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

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
# They lead into another network, or to an IPv4 address that would have to be checked.
_TUNNELS = tuple(
    map(ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96", "fec0::/10", "192.88.99.0/24"))
)
_CHUNK = 1 << 16


@record
class ImageSettings(Checked):
    """`fetch`: hosts whose URLs the gateway fetches. The numbers per request count repeated images, those per
    session do not."""

    fetch: tuple[str, ...] = ()
    fetch_s: Positive = 10.0
    max_bytes: AtLeastOne = 20 << 20
    max_pixels: AtLeastOne = 50_000_000
    max_per_request: AtLeastOne = 512
    max_per_session: AtLeastOne = 4096
    max_session_bytes: AtLeastOne = 1 << 30


@record
class ImageFile:
    sha256: str
    media_type: str
    width: int
    height: int
    data: bytes

    @property
    def part(self) -> JsonObject:
        names = ("sha256", "media_type", "width", "height")
        return {"type": "image", **{name: getattr(self, name) for name in names}}


def hash_image(data: bytes) -> str:
    return sha256(data).hexdigest()


def open_image(data: bytes) -> Any:
    """The upright first frame. Everything that makes pixels must use this: others may ignore EXIF."""
    return import_module("PIL.ImageOps").exif_transpose(_open(data, find_media_type(data))).convert("RGB")


def is_turned(data: bytes) -> bool:
    return _open(data, find_media_type(data)).getexif().get(_ORIENTATION) in range(2, 9)


def check_image(data: bytes, declared: str | None, settings: ImageSettings) -> ImageFile:
    """Decodes the whole file: a truncated or oversized one must not be recorded."""
    pillow, found = import_pillow(), find_media_type(data)
    declared = {"image/jpg": "image/jpeg"}.get(declared or "", declared)
    if declared not in (None, found):
        raise InputError(f"is declared as {declared!r}, but its bytes are {found}; declare what it is")
    end = _find_end(data, found)
    if end < len(data):
        raise InputError(f"has {len(data) - end} bytes after the end of its picture; save it again without them")
    try:
        if found == "image/webp":  # its decoder allocates the canvas before Pillow knows the size
            check_limit("max_pixels", _count_webp_pixels(data), settings)
        image = _open(data, found)
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


def _open(data: bytes, media_type: str) -> Any:
    return import_pillow().open(BytesIO(data), formats=[_FORMATS[media_type][0]])


def import_pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise ConfigError("images need Pillow, which is not installed here: pip install 'tokentrue[images]'") from error


def check_limit(name: str, count: int, settings: ImageSettings) -> None:
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


# URLs.
def read_url(url: str, settings: ImageSettings) -> tuple[bytes, str | None]:
    return _decode_data_url(url, settings) if url[:5].lower() == "data:" else fetch_url(url, settings)


def _decode_data_url(url: str, settings: ImageSettings) -> tuple[bytes, str | None]:
    head, comma, text = url[5:].partition(",")
    media_type, *parameters = [word.strip().lower() for word in head.split(";")]
    if not comma or "base64" not in parameters[-1:]:
        raise InputError("must be a data URL with base64: data:image/png;base64,…")
    check_limit("max_bytes", len(text) // 4 * 3 - 2, settings)
    try:
        raw = unquote_to_bytes(text) if "%" in text else text.encode("ascii")
        # google-genai writes the URL-safe alphabet.
        data = base64.b64decode(raw.translate(bytes.maketrans(b"-_", b"+/")), validate=True)
    except ValueError:
        raise InputError("is not base64") from None
    check_limit("max_bytes", len(data), settings)
    return data, media_type or None


def fetch_url(url: str, settings: ImageSettings) -> tuple[bytes, str | None]:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        raise InputError("is not a URL") from None
    if not port or not host:
        raise InputError("must be a data URL (data:image/png;base64,…)")
    if host not in {name.lower().rstrip(".") for name in settings.fetch}:
        raise InputError(
            f"is at {host[:80]!r}, which this gateway does not fetch from; send a data URL, or let the operator add the "
            "host to images.fetch"
        )
    if parts.username is not None or parts.password is not None:
        raise InputError("must not contain a user name or password")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    end = time.monotonic() + settings.fetch_s
    try:
        return _get(host, port, path, parts.scheme == "https", end, settings)
    except (OSError, http.client.HTTPException, ValueError) as error:
        late = time.monotonic() >= end
        said = f"it took longer than images.fetch_s={settings.fetch_s:g}" if late else str(error) or repr(error)
        raise InputError(f"cannot be fetched from {host}: {said[:100]}") from None


def _get(
    host: str, port: int, path: str, secure: bool, end: float, settings: ImageSettings
) -> tuple[bytes, str | None]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [(str(address[0]), address[1]) for *_, address in found]
    if not all(is_public(name) for name, _ in addresses):
        raise InputError(f"cannot be fetched: {host} has an address that is not public")
    plain = socket.create_connection(addresses[0], timeout=max(0.1, end - time.monotonic()))
    connection = http.client.HTTPConnection(host, port)
    connection.sock = opened = plain
    if secure:
        context = ssl.create_default_context()
        connection.sock = opened = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)

    def stop() -> None:  # the socket's timeout is one of each read: a byte at a time would never reach it
        with suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(max(0.1, end - time.monotonic()), stop)
    watch.daemon = True
    watch.start()
    try:
        if isinstance(opened, ssl.SSLSocket):
            opened.do_handshake()
        connection.request("GET", path, headers={"accept": ", ".join(EXTENSIONS), "user-agent": "tokentrue"})
        response = connection.getresponse()
        if response.status != 200:
            moved = "; redirects are not followed" if 300 <= response.status < 400 else ""
            raise InputError(f"cannot be fetched: {host} answered {response.status}{moved}")
        check_limit("max_bytes", response.length or 0, settings)
        data = bytearray()
        while chunk := response.read(_CHUNK):
            data += chunk
            check_limit("max_bytes", len(data), settings)
        if time.monotonic() >= end:
            raise TimeoutError
        media_type = (response.getheader("content-type") or "").partition(";")[0].strip().lower()
        return bytes(data), media_type if media_type.startswith("image/") else None
    finally:
        watch.cancel()
        connection.close()
        opened.close()


def is_public(address: str) -> bool:
    ip = ip_address(address.partition("%")[0])
    if ip.version == 6:
        if ip.sixtofour or ip.teredo:
            return False
        ip = ip.ipv4_mapped or ip
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _TUNNELS)
