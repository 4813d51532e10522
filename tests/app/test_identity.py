"""A gateway refuses to put one model's tokenizer before an engine that serves another."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tokentrue.app.wiring import PROBE, EngineConfig, ModelConfig, ServeConfig, identify_model
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError
from tokentrue.renderers import load_renderer


class SGLang(BaseHTTPRequestHandler):
    """/model_info and /tokenize of a stand-in for an SGLang server."""

    model = "elsewhere/other-model"
    tokens: list[int] | None = None
    asked: str | None = None
    key: str | None = None
    refusal = 404

    def do_GET(self) -> None:
        type(self).key = self.headers["authorization"]
        self.answer({"model_path": self.model, "weight_version": "default"} if self.path == "/model_info" else None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).asked = body["prompt"]
        self.answer(None if self.tokens is None else {"tokens": self.tokens, "count": len(self.tokens)})

    def answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(self.refusal if value is None else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[tuple[type[SGLang], str]]:
    handler = type("Handler", (SGLang,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def config(url: str, model: str | None) -> ServeConfig:
    return ServeConfig(
        model=ModelConfig(path=model), engine=EngineConfig(name="sglang", urls=(url,), options={"retries": 0})
    )


def test_without_a_model_the_engines_own_must_be_here(engine: tuple[type[SGLang], str]) -> None:
    handler, url = engine
    with pytest.raises(ConfigError, match=r"serves 'elsewhere/other-model'.*give --model"):
        asyncio.run(identify_model(config(url, None)))
    handler.model = str(SMALL_MODEL)
    assert asyncio.run(identify_model(config(url, None))).model.path == str(SMALL_MODEL)


def test_another_tokenizer_is_refused(engine: tuple[type[SGLang], str]) -> None:
    handler, url = engine
    handler.tokens = [1, 2, 3]
    with pytest.raises(ConfigError, match="another tokenizer than --model"):
        asyncio.run(identify_model(config(url, str(SMALL_MODEL))))
    assert handler.asked == PROBE
    handler.tokens = list(load_renderer(str(SMALL_MODEL)).encode_sampled(PROBE))
    assert asyncio.run(identify_model(config(url, str(SMALL_MODEL)))).model.path == str(SMALL_MODEL)


def test_an_engine_that_cannot_tokenise_is_believed(engine: tuple[type[SGLang], str]) -> None:
    handler, url = engine
    for handler.refusal in (404, 422):  # no such route, or one that takes another request
        assert asyncio.run(identify_model(config(url, str(SMALL_MODEL)))).model.path == str(SMALL_MODEL)


def test_the_key_is_the_environments_unless_the_options_have_one(
    engine: tuple[type[SGLang], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, url = engine
    asked = config(url, str(SMALL_MODEL))
    monkeypatch.setenv("TOKENTRUE_ENGINE_KEY", "from-environment")
    asyncio.run(identify_model(asked))
    assert handler.key == "Bearer from-environment"
    asyncio.run(identify_model(replace(asked, engine=replace(asked.engine, options={"retries": 0, "api_key": "own"}))))
    assert handler.key == "Bearer own"


def test_no_engine_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"no engine is reachable at http://127.0.0.1:9"):
        asyncio.run(identify_model(config("http://127.0.0.1:9", str(SMALL_MODEL))))
