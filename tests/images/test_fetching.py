"""Remote URLs, against a server of this test on loopback. Only `is_public` is replaced where it must let that pass."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.images.double import picture
from tokentrue import images as urls
from tokentrue.errors import InputError, LimitExceeded
from tokentrue.images import ImageSettings

DATA = picture(40, 20)
ASKED: list[str] = []


class Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ASKED.append(self.path)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/cat.png")
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(60):
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b"x" * 4096)
        else:
            kind = "image/gif" if self.path == "/wrong" else "image/png"
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", "999999999" if self.path == "/large" else str(len(DATA)))
            self.end_headers()
            self.wfile.write(DATA)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            return  # the client left

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "is_public", lambda address: address == "127.0.0.1")


ALLOWED = ImageSettings(fetch=("127.0.0.1", "Pictures.Example."), fetch_s=5.0, max_bytes=100_000)


def test_an_allowed_host(port: int, loopback_is_public: None) -> None:
    assert urls.read_url(f"http://127.0.0.1:{port}/cat.png?a=b", ALLOWED) == (DATA, "image/png")
    assert ASKED[-1] == "/cat.png?a=b"


def test_no_private_address(port: int) -> None:
    ASKED.clear()
    with pytest.raises(InputError, match="not public"):
        urls.read_url(f"http://127.0.0.1:{port}/cat.png", ALLOWED)
    assert not ASKED


def test_the_checked_address_is_the_one_connected_to(
    port: int, loopback_is_public: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that answers otherwise the second time (DNS rebinding) is asked once."""
    answers = iter([("127.0.0.1", port), ("10.0.0.1", port)])

    def resolve(host: str, *_: Any, **__: Any) -> Any:
        real = host.replace("pictures.example", "")
        address = (real, port) if real else next(answers)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert urls.read_url(f"http://pictures.example:{port}/cat.png", ALLOWED)[0] == DATA
    with pytest.raises(InputError, match="not public"):
        urls.read_url(f"http://pictures.example:{port}/cat.png", ALLOWED)


@pytest.mark.parametrize(
    ("path", "said"), [("/moved", "302; redirects are not followed"), ("/slow", "images.fetch_s=0.5")]
)
def test_what_is_not_followed(port: int, loopback_is_public: None, path: str, said: str) -> None:
    settings = ImageSettings(fetch=("127.0.0.1",), fetch_s=0.5)
    with pytest.raises(InputError, match=said):
        urls.read_url(f"http://127.0.0.1:{port}{path}", settings)


@pytest.mark.parametrize("path", ["/large", "/endless"])
def test_size_limits(port: int, loopback_is_public: None, path: str) -> None:
    with pytest.raises(LimitExceeded, match="max_bytes=100000"):
        urls.read_url(f"http://127.0.0.1:{port}{path}", ALLOWED)


@pytest.mark.parametrize("path", ["/cat.png", "/slow"])
def test_https_checks_the_name_and_keeps_the_time(
    path: str, loopback_is_public: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=x -addext subjectAltName=DNS:pictures.example"
    )
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(certificate, key)
    server.socket = inside.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    )
    settings = ImageSettings(fetch=("pictures.example", "other.example"), fetch_s=1.0)
    with pytest.raises(InputError, match="certificate verify failed"):
        urls.read_url(f"https://pictures.example:{port}{path}", settings)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with pytest.raises(InputError, match="certificate verify failed"):
        urls.read_url(f"https://other.example:{port}{path}", settings)
    if path == "/slow":
        with pytest.raises(InputError, match=r"images\.fetch_s=1"):
            urls.read_url(f"https://pictures.example:{port}{path}", settings)
    else:
        assert urls.read_url(f"https://pictures.example:{port}{path}", settings) == (DATA, "image/png")
    server.shutdown()
    server.server_close()


def test_hosts_are_compared_whole(loopback_is_public: None) -> None:
    for url in ("http://127.0.0.1.evil.example/x", "http://evil.example/127.0.0.1", "http://127.0.0.1@evil.example/"):
        with pytest.raises(InputError, match="does not fetch from"):
            urls.read_url(url, ALLOWED)
    with pytest.raises(InputError, match="user name or password"):
        urls.read_url("http://a:b@127.0.0.1/x", ALLOWED)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "ff02::1",
     "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "fec0::1", "::127.0.0.1", "::ffff:0:127.0.0.1",
     "64:ff9b:1::7f00:1", "192.88.99.1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not urls.is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"])
def test_public_addresses(address: str) -> None:
    assert urls.is_public(address)
