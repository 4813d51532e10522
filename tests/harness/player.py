"""An engine that plays its part by what it reads: SGLang's wire format over aiohttp, in a thread.

Some harnesses ask beside the conversation (a title, a guess of the next message); a script in order would hand its
lines to
whoever asks first. This engine looks at the prompt instead: it plays turn `k` where the prompt shows the results of all
calls of the turns before it, and answers `aside` where the prompt does not hold the task.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

from aiohttp import web

LOGPROB = -0.5


class Player:
    def __init__(
        self, renderer: Any, turns: Sequence[str], *, task: str, aside: str, result_mark: str = "<tool_response>"
    ) -> None:
        self._renderer, self.turns, self._task, self._aside = renderer, list(turns), task, aside
        self._result = renderer.encode_sampled(result_mark)[0]
        self.prompts: list[str] = []
        self.asides = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_forever()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.get("/model_info", self._info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._ok),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._started.set()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "player", "weight_version": "1"})

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    def _answer(self, ids: list[int]) -> list[int]:
        prompt = self._renderer.decode(ids)
        self.prompts.append(prompt)
        if self._task not in prompt:
            self.asides += 1
            text = self._aside
        else:
            text = self._turn_after(ids.count(self._result))
        return [*self._renderer.encode_sampled(text), self._renderer.stop_token_ids[0]]

    def _turn_after(self, results: int) -> str:
        for turn in self.turns[:-1]:
            if results <= 0:
                return turn
            results -= turn.count("<tool_call>")
        return self.turns[-1]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = self._answer(body["input_ids"])
        if not body.get("stream"):
            return web.json_response(self._event(body, ids, len(ids)))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for count in range(1, len(ids) + 1):
            await response.write(
                b"data: " + json.dumps(self._event(body, ids[:count], 1, last=count == len(ids))).encode() + b"\n\n"
            )
        await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, body: dict[str, Any], ids: list[int], new: int, *, last: bool = True) -> dict[str, Any]:
        meta = {
            "id": body["rid"],
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": "1",
            "output_token_logprobs": [[LOGPROB, token, None] for token in ids[-new:]],
            "finish_reason": {"type": "stop", "matched": ids[-1]} if last else None,
        }
        return {"text": "", "output_ids": ids[-new:], "meta_info": meta}
