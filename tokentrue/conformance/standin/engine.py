"""An engine stand-in that logs what it was given and what it answered, whole and streamed.

Every log-probability is a different number, so that one sampled token can be told from all others wherever it turns up
later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import defaultdict, deque
from struct import pack, unpack
from typing import Any, ClassVar

from aiohttp import web

from tokentrue.conformance.standin.generation import Generation, Plan
from tokentrue.conformance.standin.vocabulary import Vocabulary
from tokentrue.conformance.standin.wires import (
    MODEL,
    EngineRequest,
    EngineWire,
    Finished,
    SGLang,
    VLLMChat,
    VLLMCompletions,
    VLLMGenerate,
)
from tokentrue.conformance.standin.writer import Output


class Engine:
    """`plans` are by session; a request without a plan is answered 400 and counted in `unplanned`."""

    ROUTES: ClassVar[dict[str, str]] = {
        "sglang": "/generate",
        "chat": "/v1/chat/completions",
        "completions": "/v1/completions",
        "generate": "/inference/v1/generate",
    }

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(f"logprobs-{seed}")
        self._drawn: set[float] = set()
        self.plans: defaultdict[str, deque[Plan]] = defaultdict(deque)
        self.log: defaultdict[str, list[Generation]] = defaultdict(list)
        self.unplanned: list[str] = []
        self.fallback: Output | None = None  # of requests that nobody planned, such as a gateway's probes
        self.abort_delay_s = 0.0
        self.version = "1"  # of plans that name none
        self._count = 0
        self._aborted: dict[str, asyncio.Event] = {}
        self._stopping = asyncio.Event()
        self._wires: dict[str, EngineWire] = {
            "sglang": SGLang(vocabulary),
            "chat": VLLMChat(vocabulary),
            "completions": VLLMCompletions(vocabulary),
            "generate": VLLMGenerate(vocabulary),
        }

    async def start(self) -> str:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post(path, self._handler(name)) for name, path in self.ROUTES.items()])
        app.add_routes([web.post("/abort_request", self._abort), web.get("/v1/models", self._models)])
        app.add_routes([web.get(path, self._info) for path in ("/model_info", "/get_model_info", "/health")])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        """Also what it holds back is ended."""
        self._stopping.set()
        await self._runner.cleanup()

    async def _info(self, request: web.Request) -> web.Response:
        facts = {"model_path": MODEL, "is_generation": True, "weight_version": "1", "vocab_size": self._vocabulary.size}
        return web.json_response(facts)

    async def _models(self, request: web.Request) -> web.Response:
        served = {"id": MODEL, "object": "model", "root": MODEL, "max_model_len": 1 << 20}
        return web.json_response({"object": "list", "data": [served]})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if self.abort_delay_s:
            await asyncio.sleep(self.abort_delay_s)
        self._aborted.setdefault(rid, asyncio.Event()).set()
        return web.Response()

    def session_key(self, asked: EngineRequest) -> str:
        """The key of `plans` and `log`. A black box names no session to its engine: all have one queue."""
        return ""

    def next_plan(self, session: str) -> Plan | None:
        if self.plans[session]:
            return self.plans[session].popleft()
        return Plan(output=self.fallback) if self.fallback is not None else None

    def _handler(self, name: str) -> Any:
        wire = self._wires[name]

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                body = await request.json()
                asked = wire.read(body)
            except (KeyError, TypeError, ValueError) as error:  # such as a probe with an empty body
                return web.json_response({"error": {"message": f"no such request: {error!r}"}}, status=400)
            return await self._generate(request, wire, body, asked)

        return handle

    async def _generate(
        self, request: web.Request, wire: EngineWire, body: dict[str, Any], asked: EngineRequest
    ) -> web.StreamResponse:
        session = self.session_key(asked)
        plan = self.next_plan(session)
        if plan is None:
            self.unplanned.append(session)
            return web.json_response({"error": {"message": "nothing planned"}}, status=400)
        self._count += 1
        plan.version = plan.version or self.version
        generation = Generation(
            number=self._count, session=session, prompt=asked.prompt, streamed=asked.stream, plan=plan, body=body,
            temperature=asked.temperature, seed=asked.seed, stops=asked.stops,
        )  # fmt: skip
        self.log[session].append(generation)
        finish = self._sample(generation, asked)
        if plan.fault.startswith("status_"):
            generation.ended = "refused"
            return web.json_response({"error": {"message": "made to fail"}}, status=int(plan.fault[7:]))
        if generation.streamed:
            aborted = self._aborted.setdefault(asked.rid, asyncio.Event()) if asked.rid else asyncio.Event()
            return await self._stream(request, wire, generation, finish, aborted)
        return await self._whole(request, wire, generation, finish)

    def _sample(self, generation: Generation, asked: EngineRequest) -> Finished:
        """Cuts the planned output where the request's own limits end it."""
        ids = list(generation.plan.output.ids)
        finish = Finished(reason="stop", matched=self._vocabulary.stop)
        if not ids or ids[-1] != self._vocabulary.stop:
            finish = Finished(reason="length")
        for stop in asked.stops:
            for count in range(1, len(ids) + 1):
                if stop in self._vocabulary.text(ids[:count]):
                    ids, finish = ids[:count], Finished(reason="stop", matched=stop)
                    break
        ids, finish = self._limit(generation, ids, asked.limit, finish)
        generation.sampled = ids
        generation.logprobs = [self._draw_logprob() for _ in ids]
        if asked.is_filtered:
            generation.kept = [sorted({token, (token + 7) % self._vocabulary.size}) for token in ids]
            generation.raw = [value - 1.0 for value in generation.logprobs]
        return finish

    def _draw_logprob(self) -> float:
        """A float32, as engines report them, that no other token has: it identifies the token."""
        while (value := unpack("f", pack("f", -self._random.random() * 5 - 1e-9))[0]) in self._drawn:
            pass
        self._drawn.add(value)
        return value

    def _limit(
        self, generation: Generation, ids: list[int], limit: int | None, finish: Finished
    ) -> tuple[list[int], Finished]:
        if limit is not None and len(ids) > limit:
            return ids[:limit], Finished(reason="length")
        return ids, finish

    async def _whole(
        self, request: web.Request, wire: EngineWire, generation: Generation, finish: Finished
    ) -> web.StreamResponse:
        plan, count = generation.plan, len(generation.sampled)
        generation.arrived.set()
        if plan.hold is not None:
            await self._held(request, plan.hold, self._stopping)
        if plan.fault:
            return await self._misbehave_whole(request, wire, generation, finish)
        generation.delivered, generation.ended = count, "finished"
        return web.json_response(wire.answer(generation, count, finish, new=count))

    async def _misbehave_whole(
        self, request: web.Request, wire: EngineWire, generation: Generation, finish: Finished
    ) -> web.StreamResponse:
        """The connection is lost."""
        generation.ended = "refused"
        if request.transport is not None:
            request.transport.close()
        return web.Response()

    async def _stream(
        self,
        request: web.Request,
        wire: EngineWire,
        generation: Generation,
        finish: Finished,
        aborted: asyncio.Event,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        plan, total = generation.plan, len(generation.sampled)
        faulty = bool(plan.fault) or plan.drops > 0
        until = min(plan.after, total - 1) if faulty or plan.hold else total
        try:
            await response.prepare(request)
            await self._send(response, wire, generation, 0, until, finish)
            generation.arrived.set()
            if plan.hold is not None and not await self._held(request, plan.hold, aborted):
                generation.ended = "gone"
                return response
            if faulty:
                await self._misbehave(request, response, wire, generation, until, finish)
                return response
            await self._send(response, wire, generation, until, total, finish)
            generation.ended = "finished"
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, RuntimeError):
            generation.ended = "gone"
        return response

    async def _held(self, request: web.Request, hold: asyncio.Event, aborted: asyncio.Event) -> bool:
        """Waits until the driver sets `hold`; False when the gateway has aborted or hung up."""
        waits = [asyncio.ensure_future(hold.wait()), asyncio.ensure_future(aborted.wait())]
        try:
            while not any(wait.done() for wait in waits):
                await asyncio.wait(waits, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                if self._stopping.is_set() or request.transport is None or request.transport.is_closing():
                    return False
            return not aborted.is_set()
        finally:
            for wait in waits:
                wait.cancel()

    async def _send(
        self,
        response: web.StreamResponse,
        wire: EngineWire,
        generation: Generation,
        start: int,
        end: int,
        finish: Finished | None,
    ) -> None:
        """Events for the tokens from `start` to `end`; the last token of all carries the finish reason."""
        total, at = len(generation.sampled), start
        if total == 0 and end == 0:
            await response.write(event(wire.answer(generation, 0, finish, new=0)))
        while at < end:
            new = min(generation.plan.per_event, end - at)
            at += new
            await response.write(event(wire.answer(generation, at, finish if at == total else None, new=new)))
            generation.delivered = at
            if at % 4 == 0:
                await asyncio.sleep(0)

    async def _misbehave(
        self,
        request: web.Request,
        response: web.StreamResponse,
        wire: EngineWire,
        generation: Generation,
        sent: int,
        finish: Finished,
    ) -> None:
        """After `sent` tokens: an error event, or a lost connection."""
        generation.ended = "failed"
        if generation.plan.drops or generation.plan.fault == "drop":
            self._continue_after_drop(generation, sent)
            await asyncio.sleep(0)
            if request.transport is not None:
                request.transport.close()
            return
        with contextlib.suppress(ConnectionError, RuntimeError):
            await response.write(event({"error": {"message": "the worker died", "type": "server_error", "code": 500}}))
            await response.write(b"data: [DONE]\n\n")

    def _continue_after_drop(self, generation: Generation, sent: int) -> None:
        """The generation that resumes from the tokens already given gets the rest of the output."""
        plan = generation.plan
        rest = Output(ids=plan.output.ids[sent:], text="")
        after = max(1, plan.after // 2)
        more = Plan(
            output=rest, drops=max(0, plan.drops - 1), after=after, version=plan.version, cumulative=plan.cumulative
        )
        self.plans[generation.session].appendleft(more)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
