"""OpenTelemetry: one span per stage of a turn under the span of its request, sent to a collector; nothing where it is
off.

The collector is a stand-in that takes OTLP/HTTP as a real one does; the exporter, its batches and its protobuf are
OpenTelemetry's own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.gateway.world import scripted_server, wait_until
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.tracing import is_traced, start_tracing, stop_tracing

pytest.importorskip("opentelemetry.sdk")
STAGES = ["resolve", "prompt", "generate", "parse", "commit"]
SECRET = "the-secret-word"


class Collector(ThreadingHTTPServer):
    """Keeps every request body of POST /v1/traces."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        scopes = [
            scope for request in requests for resource in request.resource_spans for scope in resource.scope_spans
        ]
        return sorted((span for scope in scopes for span in scope.spans), key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.shutdown()
    collector.server_close()


async def test_the_stages_of_a_turn_are_spans_and_off_is_off() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    session = tt.Session(renderer=Letters(), provider=Engine([sampled("r1", "c1"), sampled("r2", "c2")]))
    start_tracing("", exporter=exporter)
    try:
        reply = await session.chat([{"role": "user", "content": "u1"}])
    finally:
        stop_tracing()
    assert [span.name for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)] == STAGES
    assert not is_traced()
    await session.chat([{"role": "user", "content": "u1"}, reply.message, {"role": "user", "content": "u2"}])
    assert len(exporter.get_finished_spans()) == len(STAGES)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_gateway_sends_its_spans_to_the_collector(tmp_path: Path, collector: Collector, stream: bool) -> None:
    server = scripted_server(tmp_path, ["It is 4."] * 2, "--set", f"server.trace_url={collector.url}")
    session = server.session(session_id="s1")
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    import json
    import urllib.error
    import urllib.request

    def ask(body: Any, **headers: str) -> None:
        headers = {"authorization": f"Bearer {session.api_key}", "content-type": "application/json", **headers}
        request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()

    asked = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": SECRET}]}
    ask(asked, traceparent=f"00-{trace}-{caller}-01")
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask({"model": "m", "messages": [{"role": "user", "content": SECRET}], "top_k": SECRET})
    refused.value.close()
    assert server.ask("GET", "/health")[0] == 200
    wait_until(lambda: len(collector.spans()) >= 6)
    assert server.stop() == 0
    request, *stages, failed = collector.spans()
    assert request.name == "POST openai_chat"
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (trace, caller)
    assert [span.name for span in stages] == STAGES
    assert {span.parent_span_id for span in stages} == {request.span_id} and {span.trace_id for span in stages} == {
        request.trace_id
    }
    assert all(request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano for span in stages)
    told = {pair.key: pair.value for pair in request.attributes}
    assert told["tokentrue.session"].string_value == "s1" and told["tokentrue.status"].int_value == 200
    assert {pair.key: pair.value.int_value for pair in failed.attributes} == {"tokentrue.status": 400}
    sent = b"".join(collector.bodies)
    assert SECRET.encode() not in sent and session.api_key.encode() not in sent
