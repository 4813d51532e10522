"""Training against real vLLM on CPU: `make test-vllm`. Two replicas, one of them killed in mid-run; stale weights stop
a run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.providers.test_vllm_real import serve
from tokentrue.cli.main import run as command
from tokentrue.environments import SMALL_MODEL
from tokentrue.providers.remote import WrittenWeights
from tokentrue.providers.vllm import VLLMProvider

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
# One forward pass holds whole prompts: vLLM 0.32 on CPU dies of a seeded request that it splits ("CPU Generator does
# not use offset").
OPTIONS = (
    "--enable-scale-out",
    "--logprobs-mode",
    "processed_logprobs",
    "--max-num-seqs",
    "64",
    "--no-enable-chunked-prefill",
)


def start(folder: Path, name: str, *options: str) -> tuple[Any, str]:
    python = os.environ.get("TOKENTRUE_VLLM_PYTHON")
    if not python:
        pytest.fail("TOKENTRUE_VLLM_PYTHON names no Python with vllm; see docs/engines.md")
    return serve(python, SMALL_MODEL, folder / f"{name}.log", *OPTIONS, *options, context=1024)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    folder = tmp_path_factory.mktemp("vllm")
    started: list[Any] = []
    try:
        for number in range(2):
            started.append(start(folder, str(number)))
        yield started
    finally:
        for process, _ in started:
            process.kill()
            process.wait()


def settings(out: Path, urls: list[str], steps: int, **more: object) -> list[str]:
    sets = {
        "engine.name": "vllm", "engine.urls": json.dumps(urls), "rollout.tasks": 4, "rollout.group_size": 6, "rollout.timeout_s": 600,
        "train.steps": steps, "train.exact": "false", "optim.lr": 4e-4, "log": "[]", "threads": 1, **more,
    }  # fmt: skip
    return ["--out", str(out), "--json", *(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))]


def rows_on_file(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_server_that_stops_loading_weights_stops_the_run(
    servers: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path was proven at the start; from version 2 on a server only says that it has the weights."""
    load = VLLMProvider.load_from_disk

    async def load_some(self: VLLMProvider, written: WrittenWeights) -> None:
        if written.version < 2:
            await load(self, written)
            return
        await self._post("/update_weight_version", {"new_version": str(written.version)})
        self._loaded = written.version

    monkeypatch.setattr(VLLMProvider, "load_from_disk", load_some)
    assert command("train", settings(tmp_path, [servers[0][1]], 4)) == 2
    said = capsys.readouterr()
    assert "policy version 2: an engine's log-probabilities are" in said.err and "other weights" in said.err
    assert [row["step"] for row in rows_on_file(tmp_path)] == [0], (
        "the step after which the engine kept its weights is not reported as done"
    )


def test_a_server_that_never_loads_weights_stops_the_run_at_its_start(
    servers: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def only_the_version(self: VLLMProvider, written: WrittenWeights) -> None:
        await self._post("/update_weight_version", {"new_version": str(written.version)})
        self._loaded = written.version

    monkeypatch.setattr(VLLMProvider, "load_from_disk", only_the_version)
    assert command("train", settings(tmp_path, [servers[0][1]], 3)) == 2
    assert "does not take published weights" in capsys.readouterr().err


# ---- an engine that came back with the weights of its start ------------------------------------------------------------------------------
class Router:
    """A reverse proxy in front of two real servers. It forwards to the first one, and to the second, which has the
    weights of its start, from the moment that `moment` names: as seen from here, the server was restarted.

    `hides` answers /weight_info from the first server all the same. Without `tokens` the servers seem to have no token
    route.
    """

    def __init__(self, urls: list[str], *, moment: str, hides: bool, tokens: bool) -> None:
        self.urls, self.moment, self.hides, self.tokens = urls, moment, hides, tokens
        self.version, self.sampled, self.is_back = -1, 0, False
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def note(self, path: str, body: Any) -> None:
        """Version 2 is published; one generation is its probe; the round's come after it, or the scores before them."""
        if path == "/update_weight_version":
            self.version, self.sampled = int(body["new_version"]), 0
            return
        is_score = path == "/v1/completions" and "prompt_logprobs" in body
        is_sample = not is_score and path in ("/v1/completions", "/inference/v1/generate") and bool(body)
        if self.version == 2 and self.sampled >= {"round": 1, "mid-round": 12}[self.moment]:
            self.is_back = True
        self.sampled += is_sample

    async def forward(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        self.note(request.path, json.loads(data or b"{}"))
        if not self.tokens and request.path.startswith("/inference/"):
            return web.json_response({"detail": "not found"}, status=404)
        old = self.is_back and not (self.hides and request.path == "/weight_info")
        target = self.urls[int(old)] + request.path_qs
        headers = {"content-type": "application/json"}
        async with self._client.request(request.method, target, data=data, headers=headers) as answer:
            reply = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await reply.prepare(request)
            async for piece in answer.content.iter_any():
                await reply.write(piece)
            await reply.write_eof()
            return reply

    def _serve(self) -> None:
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._stop())
        self._loop.close()

    async def _start(self) -> None:
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self.forward)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._client.close()
        await self._runner.cleanup()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)


RESTARTS = [
    ("round", False, True, "weight version 0 after round 2, and version 2 was published"),
    ("round", True, True, "round 2: sample .* has tokens of policy version 0, and version 2 was published"),
    ("round", False, False, "weight version 0 after round 2, and version 2 was published"),
    ("round", True, False, r"an engine sampled it as version 2, and its log-probabilities are .* away"),
    ("mid-round", False, True, "weight version 0 after round 2, and version 2 was published"),
    ("mid-round", False, False, "weight version 0 after round 2, and version 2 was published"),
    ("mid-round", True, False, r"an engine sampled it as version 2, and its log-probabilities are .* away"),
]


@pytest.mark.parametrize("moment, hides, tokens, error", RESTARTS)
def test_nothing_is_trained_on_an_engine_that_came_back_with_old_weights(
    servers: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    moment: str,
    hides: bool,
    tokens: bool,
    error: str,
) -> None:
    """Before a round and during one; told by the version, or by δ behind a router."""
    router = Router([url for _, url in servers], moment=moment, hides=hides, tokens=tokens)
    try:
        assert command("train", settings(tmp_path, [router.url], 4)) == 2
    finally:
        router.close()
    said = capsys.readouterr().err
    assert router.is_back and re.search(error, said), said
    assert [row["step"] for row in rows_on_file(tmp_path)] == [0, 1]
    assert all(row["mismatch/delta_abs_mean"] < 1e-4 for row in rows_on_file(tmp_path))
    with capsys.disabled():
        print("\n", moment, hides, tokens, said.strip().splitlines()[-1])
    if "sampled it" not in error and "has tokens" not in error:
        assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-000002", "finished steps are kept"


def test_grpo_goes_on_when_a_replica_is_killed_in_mid_run(
    servers: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights go through shared memory: a directory of /dev/shm, which the engine's own loader maps."""
    urls = [url for _, url in servers]
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 900
        while len(rows_on_file(tmp_path)) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.5)  # the third round is being sampled
        servers[1][0].kill()
        servers[1][0].wait()
        killed.append(len(rows_on_file(tmp_path)))

    killer = threading.Thread(target=kill)
    killer.start()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as weights:
        more = {"engine.options.weights_dir": weights}
        assert command("train", settings(tmp_path, urls, 5, **more)) == 0
    killer.join()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    print_figures(capsys, rows)
    assert killed == [2], "it was killed in the third round"
    assert [row["probe/engines"] for row in rows] == [2, 2, 1, 1, 1]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["staleness_max"] == 0 and row["rollouts/failed"] == 0 for row in rows), (
        "a rollout was lost with the replica"
    )
    assert all(row["mismatch/delta_abs_mean"] < 1e-4 and row["probe/delta"] < 1e-3 for row in rows), (
        "float32 on both sides"
    )
    assert sum(row["reward"] for row in rows[3:]) / 2 > sum(row["reward"] for row in rows[:2]) / 2


def test_bfloat16_on_both_sides_has_the_mismatch_of_bfloat16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process, url = start(tmp_path, "bf16", "--dtype", "bfloat16")
    try:
        assert command("train", settings(tmp_path / "run", [url], 2, dtype="bfloat16")) == 0
    finally:
        process.kill()
        process.wait()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    print_figures(capsys, rows)
    assert [row["policy_version"] for row in rows] == [1, 2]
    assert all(1e-4 < row["mismatch/delta_abs_mean"] < 0.1 for row in rows), "neither float32 nor other weights"


def print_figures(capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]]) -> None:
    with capsys.disabled():
        for row in rows:
            keys = (
                "step",
                "reward",
                "mismatch/delta_abs_mean",
                "mismatch/delta_max",
                "probe/delta",
                "probe/engines",
            )
            print(
                {key: row[key] for key in keys if key in row},
                {key: round(value, 2) for key, value in row["seconds"].items()},
            )
