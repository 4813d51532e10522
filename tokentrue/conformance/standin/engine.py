"""An engine stand-in that logs what it was given and what it answered.

Every log-probability is a different number, so that a sampled token can be told from all others.
"""

import asyncio
import contextlib
import json
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from struct import pack, unpack
from typing import Any

from aiohttp import web

from tokentrue.conformance.standin.generation import EngineRequest, Finished, Generation, Output, Plan
from tokentrue.conformance.standin.vocabulary import Vocabulary
from tokentrue.conformance.standin.wires import MODEL, ROUTES, EngineWire


@dataclass(slots=True, kw_only=True)
class Exchange:
    request: web.Request
    wire: EngineWire
    generation: Generation
    response: web.StreamResponse = field(
        default_factory=lambda: web.StreamResponse(headers={"content-type": "text/event-stream"})
    )

    def answer(self, count: int, *, new: int, ended: bool = True) -> Any:
        finish = self.generation.finish if ended else None
        return self.wire.answer(self.generation, count, finish, new=new)

    async def send(self, value: Any) -> None:
        await self.response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def is_open(self) -> bool:
        return self.request.transport is not None and not self.request.transport.is_closing()

    def hang_up(self) -> None:
        if self.request.transport is not None:
            self.request.transport.close()


class Engine:
    """`plans` are by session; a request without a plan gets `fallback`, or 400."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(f"logprobs-{seed}")
        self._drawn: set[float] = set()
        self.plans: defaultdict[str, deque[Plan]] = defaultdict(deque)
        self.log: defaultdict[str, list[Generation]] = defaultdict(list)
        self.fallback: Output | None = None  # of requests that nobody planned, such as a gateway's probes
        self.version = "1"  # of plans that name none
        self._count = 0
        self._aborted: set[str] = set()
        self._is_stopping = False

    async def start(self) -> str:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post(path, self._handler(wire(self._vocabulary))) for path, wire in ROUTES.items()])
        app.add_routes([web.post("/abort_request", self._abort), web.get("/v1/models", self._models)])
        app.add_routes([web.get(path, self._info) for path in ("/model_info", "/get_model_info", "/health")])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Also ends what it holds back."""
        self._is_stopping = True
        await self._runner.cleanup()

    async def _info(self, request: web.Request) -> web.Response:
        facts = {"model_path": MODEL, "is_generation": True, "weight_version": "1", "vocab_size": self._vocabulary.size}
        return web.json_response(facts)

    async def _models(self, request: web.Request) -> web.Response:
        served = {"id": MODEL, "object": "model", "root": MODEL, "max_model_len": 1 << 20}
        return web.json_response({"object": "list", "data": [served]})

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborted.add((await request.json())["rid"])
        return web.Response()

    def session_key(self, asked: EngineRequest) -> str:
        """Of `plans` and `log`. A black box names no session to its engine: all have one queue."""
        return ""

    def _handler(self, wire: EngineWire) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                asked = wire.read(await request.json())
                made = [self._begin(asked) for _ in range(asked.several)]
            except (KeyError, TypeError, ValueError) as error:  # such as a probe with an empty body
                return web.json_response({"error": {"message": f"no such request: {error!r}"}}, status=400)
            several = [Exchange(request=request, wire=wire, generation=one) for one in made]
            for generation in made:
                if generation.plan.fault.startswith("status_"):
                    generation.ended = "refused"
                    status = int(generation.plan.fault[7:])
                    return web.json_response({"error": {"message": "made to fail"}}, status=status)
            return await (self._stream(several[0]) if asked.stream and len(several) == 1 else self._whole(several))

        return handle

    def _begin(self, asked: EngineRequest) -> Generation:
        session = self.session_key(asked)
        prompt, images = self._vocabulary.expand_images(asked.prompt, asked.images)
        if self.plans[session]:
            plan = self.plans[session].popleft()
        elif self.fallback is not None:
            plan = Plan(output=self.fallback)
        else:
            raise ValueError("nothing planned")
        self._count += 1
        plan.version = plan.version or self.version
        made = Generation(number=self._count, session=session, asked=asked, plan=plan, prompt=prompt, images=images)
        self.log[session].append(made)
        self._sample(made)
        return made

    def _sample(self, generation: Generation) -> None:
        """Cuts the planned output where the request's own limits end it."""
        ids = list(generation.plan.output.ids)
        if ids and ids[-1] == self._vocabulary.stop:
            generation.finish = Finished(reason="stop", matched=self._vocabulary.stop)
        for stop in generation.asked.stops:
            for count in range(1, len(ids) + 1):
                if stop in self._vocabulary.text(ids[:count]):
                    ids, generation.finish = ids[:count], Finished(reason="stop", matched=stop)
                    break
        generation.sampled = self._limit(generation, ids, generation.asked.limit)
        generation.logprobs = [self._draw_logprob() for _ in generation.sampled]
        if generation.asked.is_filtered:
            generation.kept = [sorted({token, (token + 7) % self._vocabulary.size}) for token in generation.sampled]

    def _draw_logprob(self) -> float:
        """A float32 that no other token has: it identifies the token."""
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
            generation = exchange.generation
            generation.arrived.set()
            await self._hold(exchange)
            if generation.plan.fault:
                return await self._misbehave_whole(exchange)
            generation.delivered, generation.ended = len(generation.sampled), "finished"
            answers.append(exchange.answer(generation.delivered, new=generation.delivered))
        return web.json_response(several[0].wire.join(answers))

    async def _misbehave_whole(self, exchange: Exchange) -> web.StreamResponse:
        """The connection is lost."""
        exchange.generation.ended = "refused"
        exchange.hang_up()
        return web.Response()

    async def _stream(self, exchange: Exchange) -> web.StreamResponse:
        generation, plan, response = exchange.generation, exchange.generation.plan, exchange.response
        total = len(generation.sampled)
        until = min(plan.after, total - 1) if plan.fault or plan.hold else total
        try:
            await response.prepare(exchange.request)
            await self._send(exchange, 0, until)
            generation.arrived.set()
            if not await self._hold(exchange):
                generation.ended = "gone"
            elif plan.fault:
                generation.ended = "failed"
                await self._misbehave(exchange, until)
            else:
                await self._send(exchange, until, total)
                generation.ended = "finished"
                await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, RuntimeError):
            generation.ended = "gone"
        return response

    async def _hold(self, exchange: Exchange) -> bool:
        """Waits for the plan's `hold`; False when the gateway has aborted or hung up."""
        hold = exchange.generation.plan.hold
        request_id = exchange.generation.asked.body.get("rid")
        while hold is not None and not hold.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hold.wait(), 0.02)
            if request_id in self._aborted or self._is_stopping or not exchange.is_open():
                return False
        return True

    async def _send(self, exchange: Exchange, start: int, end: int, *, ended: bool = True) -> None:
        """Tokens from `start` to `end`; the last one of all carries the finish reason if `ended`."""
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
