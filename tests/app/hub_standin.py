"""A hub stand-in: what `snapshot_download` asks of the Hugging Face hub for one public model, as its HTTP API documents
it.

GET /api/models/ID/revision/main names the commit and lists the files, as GET /api/models/ID/tree/COMMIT does, which
later versions ask. HEAD and GET /ID/resolve/COMMIT/FILE give one, with its commit, size and ETag.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "1" * 40


@contextmanager
def serve_model(directory: Path, model: str) -> Iterator[tuple[str, list[str]]]:
    """The hub's address, and the names of the files that were downloaded."""
    downloaded: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            file = directory / path.removeprefix(f"/{model}/resolve/{COMMIT}/")
            if path.startswith(f"/api/models/{model}/revision/"):
                files = [{"rfilename": each.name} for each in sorted(directory.iterdir())]
                self._send(200, json.dumps({"id": model, "sha": COMMIT, "siblings": files}).encode(), with_body=True)
            elif path.startswith(f"/api/models/{model}/tree/"):
                tree = [
                    {"type": "file", "path": each.name, "size": each.stat().st_size, "oid": "0" * 40}
                    for each in directory.iterdir()
                ]
                self._send(200, json.dumps(tree).encode(), with_body=True)
            elif path.startswith(f"/{model}/resolve/{COMMIT}/") and file.is_file():
                if with_body:
                    downloaded.append(file.name)
                self._send(200, file.read_bytes(), with_body=with_body)
            else:
                self._send(404 if path != "/" else 200, b"{}", with_body=with_body)

        def _send(self, status: int, body: bytes, *, with_body: bool) -> None:
            self.send_response(status)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", downloaded
        finally:
            server.shutdown()
