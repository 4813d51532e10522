"""A gateway process, as a user starts it, and HTTP to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tokentrue.conformance.agents.streams import Heard, decoded, read_events

ROOT = Path(__file__).resolve().parents[2]
ADMIN = "fuzz-admin-key"
STOPPING_S = 20.0


class Gateway:
    """`tree` is the source tree that is served."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        engine_url: str,
        *,
        tree: Path = ROOT,
        workers: int = 1,
        live: int | None = None,
    ) -> None:
        self.store = folder / "journal.sqlite"
        self.log = folder / "serve.log"
        self.tree = tree
        self._env = {**os.environ, "PYTHONPATH": str(tree), "TOKENTRUE_ADMIN_KEY": ADMIN}
        self._arguments = [
            "--model",
            str(model),
            "--engine",
            "sglang",
            "--url",
            engine_url,
            "--store",
            f"sqlite:{self.store}",
        ]
        self._arguments += ["--workers", str(workers)] if workers > 1 else []
        self._arguments += ["--set", f"limits.live_sessions={live}"] if live is not None else []
        self.url = ""

    async def start(self) -> None:
        command = [sys.executable, "-m", "tokentrue", "serve", "--port", "0", *self._arguments]
        with self.log.open("ab") as err:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self.tree,
                env=self._env,
                stdout=asyncio.subprocess.PIPE,
                stderr=err,
                stdin=asyncio.subprocess.DEVNULL,
            )
        assert self._process.stdout is not None
        first = (await self._process.stdout.readline()).decode()
        if not first.startswith("tokentrue gateway on "):
            raise RuntimeError(f"the gateway did not start: {first!r}\n{self.log.read_text()[-3000:]}")
        self.url = first.split()[3]
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0)
        )

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self._process.returncode is None:
            self._process.send_signal(how)
        if how is not signal.SIGKILL:
            await self._http.close()
        try:
            await asyncio.wait_for(self._process.communicate(), STOPPING_S)
        except TimeoutError:
            self._process.kill()
            await self._process.communicate()
        await (
            self._http.close()
        )  # of a killed process only now: its clients see the connection break, not the other way round
        return self._process.returncode or 0

    async def admin(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._http.request(
            method, self.url + path, json=body, headers={"authorization": f"Bearer {ADMIN}"}
        ) as answer:
            raw = await answer.read()
        return answer.status, decoded(raw)

    async def post(
        self, path: str, body: Any, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Heard:
        """To the end of the answer."""
        async with self.open(path, body, key=key, headers=headers) as heard:
            async for _ in self.read(heard):
                pass
            return heard.heard

    @asynccontextmanager
    async def open(
        self, path: str, body: Any, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Reading]:
        headers = {"authorization": f"Bearer {ADMIN}", "content-type": "application/json", **(headers or {})}
        if key is not None:
            headers["idempotency-key"] = key
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        async with self._http.post(self.url + path, data=data, headers=headers) as answer:
            yield Reading(answer, Heard(status=answer.status, kind=answer.content_type))

    def read(self, reading: Reading) -> AsyncIterator[Any]:
        return read_events(reading.answer, reading.heard)

    def last_error(self) -> str:
        """The last traceback of the gateway's log."""
        found = self.log.read_text(errors="replace").rpartition("Traceback")
        return f"\n  the gateway's log: {found[2][-900:]}" if found[1] else ""

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tokentrue", *arguments]
        return subprocess.run(
            command, cwd=self.tree, env=self._env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )


@dataclass(slots=True)
class Reading:
    answer: aiohttp.ClientResponse
    heard: Heard
