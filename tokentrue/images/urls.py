"""Reads data URLs, and fetches remote ones from hosts that the operator allows: no redirect, no private address."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
import time
from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import unquote_to_bytes, urlsplit

from tokentrue.errors import InputError
from tokentrue.images.files import EXTENSIONS, ImageSettings, check_limit

# Addresses that lead into another network, or to an IPv4 address that would have to be checked in its place.
_TUNNELS = tuple(
    map(ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96", "fec0::/10", "192.88.99.0/24"))
)
_CHUNK = 1 << 16


def read_url(url: str, settings: ImageSettings) -> tuple[bytes, str | None]:
    """The bytes of a data URL, or of a remote one if its host is allowed, and the declared media type."""
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
    """Blocks. Connects to the address that was checked, so a second answer of the name server changes nothing."""
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
    for *_, address in found:
        if not is_public(str(address[0])):
            raise InputError(f"cannot be fetched: {host} has an address that is not public")
    plain = socket.create_connection(found[0][4][:2], timeout=max(0.1, end - time.monotonic()))
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
    """False for loopback, private, link-local, shared, multicast and tunnelled addresses."""
    ip = ip_address(address.partition("%")[0])
    if ip.version == 6:
        if ip.sixtofour or ip.teredo:
            return False
        ip = ip.ipv4_mapped or ip
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _TUNNELS)
