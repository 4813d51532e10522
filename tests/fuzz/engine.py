"""The engine stand-in of `tokentrue.conformance` as the fuzz needs it: SGLang's `/generate` with a queue by session,
and more ways to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import Any

from aiohttp import web

from tests.fuzz.malformed import MALFORMED, SHAPELESS
from tokentrue.conformance.standin import engine as base
from tokentrue.conformance.standin.engine import event
from tokentrue.conformance.standin.generation import Generation, Plan
from tokentrue.conformance.standin.wires import EngineRequest, EngineWire, Finished

__all__ = ["Engine", "Generation", "Plan"]

STREAM_FAULTS = (
    "error_event", "garbage", "drop", "cut_event", "no_finish", "rewrite_final", "shrink_final", "disagree",
    "excess", "after_finish", *(f"malformed:{name}" for name in SHAPELESS),
)  # fmt: skip
WHOLE_FAULTS = ("status_400", "status_500", "garbage", "drop", "excess", *(f"malformed:{name}" for name in MALFORMED))
LARGEST_EXCESS = 4096  # tokens that a request may ask for where the engine sends more
VERSIONS = ("default", "1", "7", "step-8", "20261115212000123456")


class Engine(base.Engine):
    def session_key(self, asked: EngineRequest) -> str:
        return asked.session

    def _limit(
        self, generation: Generation, ids: list[int], limit: int | None, finish: Finished
    ) -> tuple[list[int], Finished]:
        if generation.plan.fault != "excess":
            return super()._limit(generation, ids, limit, finish)
        if limit is None or limit > LARGEST_EXCESS or not ids:
            generation.plan.fault = ""
            return ids, finish
        return (ids * limit)[:limit], finish

    async def _misbehave_whole(
        self, request: web.Request, wire: EngineWire, generation: Generation, finish: Finished
    ) -> web.StreamResponse:
        fault, count = generation.plan.fault, len(generation.sampled)
        if fault == "garbage":
            generation.ended = "refused"
            return web.Response(text="<html>busy</html>", content_type="text/html")
        if fault.startswith("malformed:"):
            return web.json_response(self._malformed(generation, fault[10:]))
        if fault == "excess":
            generation.delivered, generation.ended = count, "failed"
            return web.json_response(self._with_more(wire, generation, finish, new=count))
        if fault == "drop":
            return await super()._misbehave_whole(request, wire, generation, finish)
        generation.delivered, generation.ended = count, "finished"
        return web.json_response(wire.answer(generation, count, finish, new=count))

    def _with_more(self, wire: EngineWire, generation: Generation, finish: Finished, *, new: int) -> dict[str, Any]:
        """The last answer, with `new` tokens not told before and three that nobody asked for."""
        answer = wire.answer(generation, len(generation.sampled), finish, new=new)
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

    async def _misbehave(
        self,
        request: web.Request,
        response: web.StreamResponse,
        wire: EngineWire,
        generation: Generation,
        sent: int,
        finish: Finished,
    ) -> None:
        plan, total = generation.plan, len(generation.sampled)
        fault = "drop" if plan.drops else plan.fault
        generation.ended = "failed"
        if fault in {"drop", "error_event"}:
            await super()._misbehave(request, response, wire, generation, sent, finish)
            return
        if fault == "cut_event":
            await response.write(event(wire.answer(generation, total, finish, new=total - sent))[:-9])
            self._continue_after_drop(generation, sent)
            await asyncio.sleep(0)
            if request.transport is not None:
                request.transport.close()
        elif fault in {"excess", "after_finish"}:
            await self._send(response, wire, generation, sent, total, None if fault == "excess" else finish)
            generation.ended = "failed" if fault == "excess" else "finished"
            await response.write(event(self._with_more(wire, generation, finish, new=0)))
        elif fault.startswith("malformed:"):
            await response.write(event(SHAPELESS[fault[10:]]))
        elif fault == "garbage":
            await response.write(b"data: {not json\n\n")
        elif fault == "rewrite_final":
            answer = wire.answer(generation, total, finish, new=total - sent)
            ids, rows = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
            if not plan.cumulative or sent == 0:
                ids[:], rows[:] = [], []
            else:
                ids[0], rows[0][1] = rows[-1][1] + 1, rows[-1][1] + 1
            await response.write(event(answer))
        elif fault == "shrink_final":
            await response.write(event(wire.answer(generation, max(sent - 1, 0), finish, new=max(sent - 1, 0))))
        elif fault == "disagree":
            answer = wire.answer(generation, total, finish, new=total - sent)
            answer["output_ids"][-1] += 1
            await response.write(event(answer))
        with contextlib.suppress(ConnectionError, RuntimeError):
            await response.write(b"data: [DONE]\n\n")
