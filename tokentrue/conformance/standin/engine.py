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
from dataclasses import dataclass, field
from struct import pack, unpack
from typing import Any, ClassVar

from aiohttp import web

from tokentrue.conformance.standin.generation import Finished, Generation, Plan
from tokentrue.conformance.standin.vocabulary import Vocabulary
from tokentrue.conformance.standin.wires import (
    MODEL,
    EngineRequest,
    EngineWire,
    SGLang,
    VLLMChat,
    VLLMCompletions,
    VLLMGenerate,
)
from tokentrue.conformance.standin.writer import Output


def new_stream() -> web.StreamResponse:
    return web.StreamResponse(headers={"content-type": "text/event-stream"})


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request that is being answered."""

    request: web.Request
    wire: EngineWire
    generation: Generation
    response: web.StreamResponse = field(default_factory=new_stream)

    def answer(self, count: int, *, new: int, ended: bool = True) -> Any:
        finish = self.generation.finish if ended else None
        return self.wire.answer(self.generation, count, finish, new=new)

    async def send(self, value: Any) -> None:
        await self.response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def hang_up(self) -> None:
        if self.request.transport is not None:
            self.request.transport.close()


class Engine:
    """`plans` are by session; a request without a plan gets `fallback`, or 400."""

    ROUTES: ClassVar[dict[str, tuple[str, type[EngineWire]]]] = {
        "sglang": ("/generate", SGLang),
        "chat": ("/v1/chat/completions", VLLMChat),
        "completions": ("/v1/completions", VLLMCompletions),
        "generate": ("/inference/v1/generate", VLLMGenerate),
    }

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(f"logprobs-{seed}")
        self._drawn: set[float] = set()
        self.plans: defaultdict[str, deque[Plan]] = defaultdict(deque)
        self.log: defaultdict[str, list[Generation]] = defaultdict(list)
        self.fallback: Output | None = None  # of requests that nobody planned, such as a gateway's probes
        self.version = "1"  # of plans that name none
        self._count = 0
        self._aborted: dict[str, asyncio.Event] = {}
        self._stopping = asyncio.Event()

    async def start(self) -> str:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post(path, self._handler(wire(self._vocabulary))) for path, wire in self.ROUTES.values()])
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
        self._aborted.setdefault((await request.json())["rid"], asyncio.Event()).set()
        return web.Response()

    def session_key(self, asked: EngineRequest) -> str:
        """The key of `plans` and `log`. A black box names no session to its engine: all have one queue."""
        return ""

    def next_plan(self, session: str) -> Plan | None:
        if self.plans[session]:
            return self.plans[session].popleft()
        return Plan(output=self.fallback) if self.fallback is not None else None

    def _handler(self, wire: EngineWire) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                body = await request.json()
                asked = wire.read(body)
                made = [self._begin(body, asked) for _ in range(asked.several)]
            except (KeyError, TypeError, ValueError) as error:  # such as a probe with an empty body
                return web.json_response({"error": {"message": f"no such request: {error!r}"}}, status=400)
            several = [Exchange(request=request, wire=wire, generation=one) for one in made]
            for generation in made:
                if generation.plan.fault.startswith("status_"):
                    generation.ended = "refused"
                    status = int(generation.plan.fault[7:])
                    return web.json_response({"error": {"message": "made to fail"}}, status=status)
            if asked.stream and len(several) == 1:
                aborted = self._aborted.setdefault(asked.rid, asyncio.Event()) if asked.rid else asyncio.Event()
                return await self._stream(several[0], aborted)
            return await self._whole(several)

        return handle

    def _begin(self, body: dict[str, Any], asked: EngineRequest) -> Generation:
        session = self.session_key(asked)
        prompt, images = self._vocabulary.expand_images(asked.prompt, asked.images)
        plan = self.next_plan(session)
        if plan is None:
            raise ValueError("nothing planned")
        self._count += 1
        plan.version = plan.version or self.version
        generation = Generation(
            number=self._count, session=session, prompt=prompt, images=images, streamed=asked.stream, plan=plan,
            body=body, temperature=asked.temperature, seed=asked.seed, stops=asked.stops,
        )  # fmt: skip
        self.log[session].append(generation)
        self._sample(generation, asked)
        return generation

    def _sample(self, generation: Generation, asked: EngineRequest) -> None:
        """Cuts the planned output where the request's own limits end it."""
        ids = list(generation.plan.output.ids)
        if ids and ids[-1] == self._vocabulary.stop:
            generation.finish = Finished(reason="stop", matched=self._vocabulary.stop)
        for stop in asked.stops:
            for count in range(1, len(ids) + 1):
                if stop in self._vocabulary.text(ids[:count]):
                    ids, generation.finish = ids[:count], Finished(reason="stop", matched=stop)
                    break
        generation.sampled = self._limit(generation, ids, asked.limit)
        generation.logprobs = [self._draw_logprob() for _ in generation.sampled]
        if asked.is_filtered:
            generation.kept = [sorted({token, (token + 7) % self._vocabulary.size}) for token in generation.sampled]
            generation.raw = [value - 1.0 for value in generation.logprobs]

    def _draw_logprob(self) -> float:
        """A float32, as engines report them, that no other token has: it identifies the token."""
        while (value := unpack("f", pack("f", -self._random.random() * 5 - 1e-9))[0]) in self._drawn:
            pass
        self._drawn.add(value)
        return value

    def _limit(self, generation: Generation, ids: list[int], limit: int | None) -> list[int]:
        if limit is None or len(ids) <= limit:
            return ids
        generation.finish = Finished(reason="length")
        return ids[:limit]

    async def _whole(self, several: list[Exchange]) -> web.StreamResponse:
        answers: list[Any] = []
        for exchange in several:
            generation, plan = exchange.generation, exchange.generation.plan
            generation.arrived.set()
            if plan.hold is not None:
                await self._held(exchange, plan.hold, self._stopping)
            if plan.fault:
                return await self._misbehave_whole(exchange)
            generation.delivered, generation.ended = len(generation.sampled), "finished"
            answers.append(exchange.answer(generation.delivered, new=generation.delivered))
        return web.json_response(several[0].wire.join(answers))

    async def _misbehave_whole(self, exchange: Exchange) -> web.StreamResponse:
        """The connection is lost."""
        exchange.generation.ended = "refused"
        exchange.hang_up()
        return web.Response()

    async def _stream(self, exchange: Exchange, aborted: asyncio.Event) -> web.StreamResponse:
        generation, plan, response = exchange.generation, exchange.generation.plan, exchange.response
        total = len(generation.sampled)
        until = min(plan.after, total - 1) if plan.fault or plan.hold else total
        try:
            await response.prepare(exchange.request)
            await self._send(exchange, 0, until)
            generation.arrived.set()
            if plan.hold is not None and not await self._held(exchange, plan.hold, aborted):
                generation.ended = "gone"
                return response
            if plan.fault:
                generation.ended = "failed"
                await self._misbehave(exchange, until)
                return response
            await self._send(exchange, until, total)
            generation.ended = "finished"
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, RuntimeError):
            generation.ended = "gone"
        return response

    async def _held(self, exchange: Exchange, hold: asyncio.Event, aborted: asyncio.Event) -> bool:
        """Waits until the driver sets `hold`; False when the gateway has aborted or hung up."""
        waits = [asyncio.ensure_future(hold.wait()), asyncio.ensure_future(aborted.wait())]
        try:
            while not any(wait.done() for wait in waits):
                await asyncio.wait(waits, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                transport = exchange.request.transport
                if self._stopping.is_set() or transport is None or transport.is_closing():
                    return False
            return not aborted.is_set()
        finally:
            for wait in waits:
                wait.cancel()

    async def _send(self, exchange: Exchange, start: int, end: int, *, ended: bool = True) -> None:
        """Events for the tokens from `start` to `end`; the last token of all carries the finish reason if `ended`."""
        generation, at = exchange.generation, start
        total = len(generation.sampled)
        if total == 0 and end == 0:
            await exchange.send(exchange.answer(0, new=0))
        while at < end:
            new = min(generation.plan.per_event, end - at)
            at += new
            await exchange.send(exchange.answer(at, new=new, ended=ended and at == total))
            generation.delivered = at
            if at % 4 == 0:
                await asyncio.sleep(0)

    async def _misbehave(self, exchange: Exchange, sent: int) -> None:
        """An error event after `sent` tokens."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            await exchange.send({"error": {"message": "the worker died", "type": "server_error", "code": 500}})
            await exchange.response.write(b"data: [DONE]\n\n")
