"""The engine stand-in of `tokentrue.conformance` as the fuzz needs it: SGLang's `/generate` with a queue by session,
and more ways to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.fuzz.malformed import MALFORMED, SHAPELESS
from tokentrue.conformance.standin import engine as base
from tokentrue.conformance.standin import generation as base_generation
from tokentrue.conformance.standin.engine import Exchange
from tokentrue.conformance.standin.generation import EngineRequest, Generation, Output

__all__ = ["Engine", "Generation", "Plan"]

STREAM_FAULTS = (
    "error_event", "garbage", "drop", "cut_event", "no_finish", "rewrite_final", "shrink_final", "disagree",
    "excess", "after_finish", *(f"malformed:{name}" for name in SHAPELESS),
)  # fmt: skip
WHOLE_FAULTS = ("status_400", "status_500", "garbage", "drop", "excess", *(f"malformed:{name}" for name in MALFORMED))
LARGEST_EXCESS = 4096  # tokens that a request may ask for where the engine sends more
VERSIONS = ("default", "1", "7", "step-8", "20261115212000123456")


@dataclass(slots=True, kw_only=True)
class Plan(base_generation.Plan):
    """`drops` is how often the connection is lost before the generation resumes."""

    drops: int = 0

    def __post_init__(self) -> None:
        self.fault = "drop" if self.drops else self.fault


class Engine(base.Engine):
    abort_delay_s = 0.0

    async def _abort(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.abort_delay_s)
        return await super()._abort(request)

    def session_key(self, asked: EngineRequest) -> str:
        return str(asked.body.get("routing_key"))

    def _limit(self, generation: Generation, ids: list[int], limit: int | None) -> list[int]:
        if generation.plan.fault != "excess":
            return super()._limit(generation, ids, limit)
        if limit is None or limit > LARGEST_EXCESS or not ids:
            generation.plan.fault = ""
            return ids
        return (ids * limit)[:limit]

    async def _misbehave_whole(self, exchange: Exchange) -> web.StreamResponse:
        generation = exchange.generation
        fault, count = generation.plan.fault, len(generation.sampled)
        if fault == "garbage":
            generation.ended = "refused"
            return web.Response(text="<html>busy</html>", content_type="text/html")
        if fault.startswith("malformed:"):
            return web.json_response(self._malformed(generation, fault[10:]))
        if fault == "excess":
            generation.delivered, generation.ended = count, "failed"
            return web.json_response(self._with_more(exchange, new=count))
        if fault == "drop" and not getattr(generation.plan, "drops", 0):
            return await super()._misbehave_whole(exchange)
        generation.delivered, generation.ended = count, "finished"
        return web.json_response(exchange.answer(count, new=count))

    def _with_more(self, exchange: Exchange, *, new: int) -> dict[str, Any]:
        """The last answer, with `new` tokens not told before and three that nobody asked for."""
        answer = exchange.answer(len(exchange.generation.sampled), new=new)
        more = [exchange.generation.sampled[0]] * 3
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

    async def _misbehave(self, exchange: Exchange, sent: int) -> None:
        generation, response = exchange.generation, exchange.response
        plan, total, fault = generation.plan, len(generation.sampled), generation.plan.fault
        if fault == "error_event":
            await super()._misbehave(exchange, sent)
            return
        if fault in {"drop", "cut_event"}:
            if fault == "cut_event":
                answer = json.dumps(exchange.answer(total, new=total - sent))
                await response.write(f"data: {answer}\n\n".encode()[:-9])
            self._continue_after_drop(generation, sent)
            await asyncio.sleep(0)
            exchange.hang_up()
        elif fault in {"excess", "after_finish"}:
            await self._send(exchange, sent, total, ended=fault == "after_finish")
            generation.ended = "failed" if fault == "excess" else "finished"
            await exchange.send(self._with_more(exchange, new=0))
        elif fault.startswith("malformed:"):
            await exchange.send(SHAPELESS[fault[10:]])
        elif fault == "garbage":
            await response.write(b"data: {not json\n\n")
        elif fault == "rewrite_final":
            answer = exchange.answer(total, new=total - sent)
            ids, rows = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
            if not plan.cumulative or sent == 0:
                ids[:], rows[:] = [], []
            else:
                ids[0], rows[0][1] = rows[-1][1] + 1, rows[-1][1] + 1
            await exchange.send(answer)
        elif fault == "shrink_final":
            await exchange.send(exchange.answer(max(sent - 1, 0), new=max(sent - 1, 0)))
        elif fault == "disagree":
            answer = exchange.answer(total, new=total - sent)
            answer["output_ids"][-1] += 1
            await exchange.send(answer)
        with contextlib.suppress(ConnectionError, RuntimeError):
            await response.write(b"data: [DONE]\n\n")

    def _continue_after_drop(self, generation: Generation, sent: int) -> None:
        """The generation that resumes from the tokens already given gets the rest of the output."""
        plan = generation.plan
        rest, drops = Output(ids=plan.output.ids[sent:], text=""), getattr(plan, "drops", 0)
        more = Plan(
            output=rest, drops=max(0, drops - 1), after=max(1, plan.after // 2), version=plan.version,
            cumulative=plan.cumulative,
        )  # fmt: skip
        self.plans[generation.session].appendleft(more)
