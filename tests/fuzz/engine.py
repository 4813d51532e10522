"""An engine that logs what it was sent and what it sampled: SGLang's `/generate`, whole and streamed, well behaved or
not.

Every log-probability is a different number, so that one sampled token can be told from all others wherever it turns up
later.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
from array import array
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.fuzz.malformed import MALFORMED, SHAPELESS
from tests.fuzz.outputs import Output
from tests.fuzz.vocabulary import Vocabulary

STREAM_FAULTS = (
    "error_event", "garbage", "drop", "cut_event", "no_finish", "rewrite_final", "shrink_final", "disagree",
    "excess", "after_finish", *(f"malformed:{name}" for name in SHAPELESS),
)  # fmt: skip
WHOLE_FAULTS = ("status_400", "status_500", "garbage", "drop", "excess", *(f"malformed:{name}" for name in MALFORMED))
LARGEST_EXCESS = 4096  # tokens that a request may ask for where the engine sends more
VERSIONS = ("default", "1", "7", "step-8", "20261115212000123456")


@dataclass(slots=True, kw_only=True)
class Plan:
    """One generation to come. `after` tokens go out before `fault`; `drops` is how often the connection is lost before
    it goes on."""

    output: Output
    fault: str = ""
    after: int = 0
    drops: int = 0
    version: str = "1"
    per_event: int = 1
    cumulative: bool = True
    hold: asyncio.Event | None = None  # the tokens before `after` are out; the rest waits for this


@dataclass(slots=True, kw_only=True)
class Generation:
    """One request to the engine, and what it answered. `delivered` counts the tokens of whole events that were written
    to the socket."""

    session: str
    prompt: tuple[int, ...]
    streamed: bool
    plan: Plan
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    delivered: int = 0
    ended: str = "running"
    seed: int | None = None
    stops: tuple[str, ...] = ()
    doubtful: bool = False  # it is open whether what was delivered can be taken for tokens
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # the first tokens are out

    @property
    def full(self) -> tuple[int, ...]:
        return (*self.prompt, *self.sampled[: self.delivered])


class Engine:
    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(f"logprobs-{seed}")
        self.plans: defaultdict[str, deque[Plan]] = defaultdict(deque)
        self.log: defaultdict[str, list[Generation]] = defaultdict(list)
        self.unplanned: list[str] = []
        self.abort_delay_s = 0.0
        self._aborted: dict[str, asyncio.Event] = {}
        self._stopping = asyncio.Event()

    async def start(self) -> str:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/model_info", self._info),
                web.get("/get_model_info", self._info),
                web.get("/health", self._info),
            ]
        )
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
        facts = {
            "model_path": "fuzz",
            "is_generation": True,
            "weight_version": "1",
            "vocab_size": self._vocabulary.size,
        }
        return web.json_response(facts)

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if self.abort_delay_s:
            await asyncio.sleep(self.abort_delay_s)
        self._aborted.setdefault(rid, asyncio.Event()).set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        session = str(body.get("routing_key"))
        plans = self.plans[session]
        if not plans:
            self.unplanned.append(session)
            return web.json_response({"error": {"message": "nothing planned"}}, status=400)
        plan = plans.popleft()
        generation = Generation(
            session=session, prompt=tuple(body["input_ids"]), streamed=bool(body.get("stream")), plan=plan
        )
        generation.seed = body["sampling_params"].get("sampling_seed")
        generation.stops = tuple(body["sampling_params"].get("stop") or ())
        self.log[session].append(generation)
        finish = self._sample(generation, body["sampling_params"])
        if plan.fault.startswith("status_"):
            generation.ended = "refused"
            return web.json_response({"error": {"message": "made to fail"}}, status=int(plan.fault[7:]))
        if generation.streamed:
            return await self._stream(
                request, generation, finish, self._aborted.setdefault(body["rid"], asyncio.Event())
            )
        return await self._whole(request, generation, finish)

    def _sample(self, generation: Generation, params: dict[str, Any]) -> dict[str, Any]:
        """Cuts the planned output where the request's own limits end it."""
        ids = list(generation.plan.output.ids)
        finish: dict[str, Any] = {"type": "stop", "matched": self._vocabulary.stop}
        if not ids or ids[-1] != self._vocabulary.stop:
            finish = {"type": "length", "length": len(ids)}
        for stop in params.get("stop") or ():
            for count in range(1, len(ids) + 1):
                if stop in self._vocabulary.text(ids[:count]):
                    ids, finish = ids[:count], {"type": "stop", "matched": stop}
                    break
        limit = params.get("max_new_tokens")
        if generation.plan.fault == "excess":
            if limit is None or limit > LARGEST_EXCESS or not ids:
                generation.plan.fault = ""
            else:
                ids = (ids * limit)[:limit]
        elif limit is not None and len(ids) > limit:
            ids, finish = ids[:limit], {"type": "length", "length": limit}
        generation.sampled = ids
        generation.logprobs = [-self._random.random() * 5 - 1e-9 for _ in ids]
        return finish

    def _answer(self, generation: Generation, count: int, finish: dict[str, Any] | None, *, new: int) -> dict[str, Any]:
        """The event after `count` tokens, `new` of them not told before."""
        first = 0 if generation.plan.cumulative else count - new
        ids, logprobs = generation.sampled[first:count], generation.logprobs[first:count]
        meta = {
            "id": "x",
            "prompt_tokens": len(generation.prompt),
            "completion_tokens": count,
            "weight_version": generation.plan.version,
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
            "finish_reason": finish,
        }
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def _whole(self, request: web.Request, generation: Generation, finish: dict[str, Any]) -> web.StreamResponse:
        plan, count = generation.plan, len(generation.sampled)
        generation.arrived.set()
        if plan.hold is not None:
            await self._held(request, plan.hold, self._stopping)
        if plan.fault == "garbage":
            generation.ended = "refused"
            return web.Response(text="<html>busy</html>", content_type="text/html")
        if plan.fault == "drop":
            generation.ended = "refused"
            if request.transport is not None:
                request.transport.close()
            return web.Response()
        if plan.fault.startswith("malformed:"):
            return web.json_response(self._malformed(generation, plan.fault[10:]))
        if plan.fault == "excess":
            generation.delivered, generation.ended = count, "failed"
            return web.json_response(self._with_more(generation, finish, new=count))
        generation.delivered, generation.ended = count, "finished"
        return web.json_response(self._answer(generation, count, finish, new=count))

    def _with_more(self, generation: Generation, finish: dict[str, Any], *, new: int) -> dict[str, Any]:
        """The last answer, with `new` tokens not told before and three that nobody asked for."""
        answer = self._answer(generation, len(generation.sampled), finish, new=new)
        more = [generation.sampled[0]] * 3
        answer["output_ids"] += more
        answer["meta_info"]["output_token_logprobs"] += [[-0.5, token, None] for token in more]
        answer["meta_info"]["completion_tokens"] += len(more)
        return answer

    def _malformed(self, generation: Generation, name: str) -> Any:
        """One token, where the answer can be taken to say one: the record may keep it or not."""
        answer = copy.deepcopy(MALFORMED[name])
        generation.ended, generation.doubtful = "refused", True
        generation.sampled, generation.logprobs = [], []
        if name.startswith(("id_", "finish_")) and isinstance(token := answer["output_ids"][0], int):
            logprob = -self._random.random()
            answer["meta_info"]["output_token_logprobs"][0][0] = logprob
            generation.sampled, generation.logprobs, generation.delivered = [token], [logprob], 1
        return answer

    async def _stream(
        self, request: web.Request, generation: Generation, finish: dict[str, Any], aborted: asyncio.Event
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        plan, total = generation.plan, len(generation.sampled)
        faulty = bool(plan.fault) or plan.drops > 0
        until = min(plan.after, total - 1) if faulty or plan.hold else total
        try:
            await response.prepare(request)
            await self._send(response, generation, 0, until, finish)
            generation.arrived.set()
            if plan.hold is not None and not await self._held(request, plan.hold, aborted):
                generation.ended = "gone"
                return response
            if faulty:
                await self._misbehave(request, response, generation, until, finish)
                return response
            await self._send(response, generation, until, total, finish)
            generation.ended = "finished"
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, RuntimeError):
            generation.ended = "gone"
        return response

    async def _held(self, request: web.Request, hold: asyncio.Event, aborted: asyncio.Event) -> bool:
        """Waits until the driver lets it go on; False when the gateway has aborted or hung up."""
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
        self, response: web.StreamResponse, generation: Generation, start: int, end: int, finish: dict[str, Any]
    ) -> None:
        """Events for the tokens from `start` to `end`; the last token of all carries the finish reason."""
        total, at = len(generation.sampled), start
        if total == 0 and end == 0:
            await response.write(event(self._answer(generation, 0, finish, new=0)))
        while at < end:
            new = min(generation.plan.per_event, end - at)
            at += new
            await response.write(
                event(self._answer(generation, at, (finish or None) if at == total else None, new=new))
            )
            generation.delivered = at
            if at % 4 == 0:
                await asyncio.sleep(0)

    async def _misbehave(
        self,
        request: web.Request,
        response: web.StreamResponse,
        generation: Generation,
        sent: int,
        finish: dict[str, Any],
    ) -> None:
        plan, total = generation.plan, len(generation.sampled)
        fault = "drop" if plan.drops else plan.fault
        generation.ended = "failed"
        if fault in {"drop", "cut_event"}:
            if fault == "cut_event":
                await response.write(event(self._answer(generation, total, finish, new=total - sent))[:-9])
            self._continue_after_drop(generation, sent)
            await asyncio.sleep(0)
            if request.transport is not None:
                request.transport.close()
        elif fault in {"excess", "after_finish"}:
            await self._send(response, generation, sent, total, {} if fault == "excess" else finish)
            generation.ended = "failed" if fault == "excess" else "finished"
            await response.write(event(self._with_more(generation, finish, new=0)))
        elif fault == "error_event":
            await response.write(event({"error": {"message": "the worker died"}}))
        elif fault.startswith("malformed:"):
            await response.write(event(SHAPELESS[fault[10:]]))
        elif fault == "garbage":
            await response.write(b"data: {not json\n\n")
        elif fault == "rewrite_final":
            answer = self._answer(generation, total, finish, new=total - sent)
            ids, rows = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
            if not plan.cumulative or sent == 0:
                ids[:], rows[:] = [], []
            else:
                ids[0], rows[0][1] = rows[-1][1] + 1, rows[-1][1] + 1
            await response.write(event(answer))
        elif fault == "shrink_final":
            await response.write(event(self._answer(generation, max(sent - 1, 0), finish, new=max(sent - 1, 0))))
        elif fault == "disagree":
            answer = self._answer(generation, total, finish, new=total - sent)
            answer["output_ids"][-1] += 1
            await response.write(event(answer))
        with contextlib.suppress(ConnectionError, RuntimeError):
            await response.write(b"data: [DONE]\n\n")

    def _continue_after_drop(self, generation: Generation, sent: int) -> None:
        """The generation that goes on from the tokens already given gets the rest of the output."""
        plan = generation.plan
        rest = Output(ids=plan.output.ids[sent:], text="")
        after = max(1, plan.after // 2)
        more = Plan(
            output=rest, drops=max(0, plan.drops - 1), after=after, version=plan.version, cumulative=plan.cumulative
        )
        self.plans[generation.session].appendleft(more)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def packed(ids: tuple[int, ...]) -> bytes:
    return array("q", ids).tobytes()
