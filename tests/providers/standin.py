"""A stand-in for an SGLang server (which does not run on CPU from its wheels): the documented wire format of /generate,
/model_info,
/abort_request, /pause_generation, /continue_generation and /update_weights_from_disk, over a real tiny model.

It answers what SGLang answers: cumulative or incremental events, `[logprob, id, text]` rows, `finish_reason` objects,
`weight_version` strings, the sampling mask's renormalised log-probabilities. `faults` makes it misbehave on purpose.
"""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import torch
from aiohttp import web

from tokentrue.providers.hf import HFProvider
from tokentrue.routing_replay import SamplingMask, join_masks
from tokentrue.types import Completion, Finish, Sampling


class SGLangStandIn:
    def __init__(self, model: torch.nn.Module, *, incremental: bool = False) -> None:
        self.engine, self.model = HFProvider(model), model
        self.incremental = incremental
        self.weight_version = "default"
        self.aborted: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self._running: dict[str, asyncio.Event] = {}
        self.lora = True  # as started with --enable-lora
        self.adapters: dict[str, HFProvider] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.get("/model_info", self.model_info),
                web.post("/generate", self.generate),
                web.post("/abort_request", self.abort),
                web.post("/pause_generation", self.ok),
                web.post("/continue_generation", self.ok),
                web.post("/update_weights_from_disk", self.update_weights),
                web.post("/load_lora_adapter", self.load_adapter),
                web.post("/unload_lora_adapter", self.unload_adapter),
                web.get("/v1/models", self.models),
            ]
        )
        return app

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "tiny", "is_generation": True, "weight_version": self.weight_version})

    async def ok(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self._running:
            self._running[rid].set()
        return web.Response()

    async def update_weights(self, request: web.Request) -> web.Response:
        from safetensors.torch import load_file

        body = await request.json()
        await self.engine.publish(load_file(f"{body['model_path']}/model.safetensors").items(), version=0)
        self.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def load_adapter(self, request: web.Request) -> web.Response:
        from peft import PeftModel

        body = await request.json()
        if not self.lora:
            message = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
            return web.json_response({"success": False, "error_message": message}, status=400)
        adapted: Any = PeftModel.from_pretrained(copy.deepcopy(self.model), body["lora_path"])
        self.adapters[body["lora_name"]] = HFProvider(adapted.merge_and_unload().eval())
        return web.json_response({"success": True, "error_message": ""})

    async def unload_adapter(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.json_response({"success": True, "error_message": ""})

    async def models(self, request: web.Request) -> web.Response:
        cards = [{"id": "tiny", "root": "tiny"}]
        cards += [{"id": name, "root": "path", "parent": "tiny"} for name in self.adapters]
        return web.json_response({"object": "list", "data": cards})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "503":
            return web.Response(status=503, text="warming up")
        if fault == "400":
            return web.json_response({"error": {"message": "The input is too long"}}, status=400)
        if fault == "hang":
            await asyncio.sleep(30)
        stop = self._running.setdefault(body["rid"], asyncio.Event())
        try:
            if body["stream"]:
                return await self._stream(request, body, fault, stop)
            final = await self._whole(body, stop)
            return web.json_response(self._event(body, final, len(final.token_ids), fault, ended=True))
        finally:
            self._running.pop(body["rid"], None)

    async def _whole(self, body: dict[str, Any], stop: asyncio.Event) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        engine = self.adapters[body["lora_path"]] if "lora_path" in body else self.engine
        async for chunk in engine.stream(body["input_ids"], sampling_of(body)):
            if chunk.final is not None:
                return chunk.final
            ids += chunk.token_ids
            logprobs += chunk.logprobs
            if stop.is_set():
                break
        return self._cut(body, ids, logprobs)

    @torch.no_grad()
    def _before_filters(self, body: dict[str, Any], sampled: tuple[int, ...]) -> list[float]:
        """SGLang's output_token_logprobs: of softmax(logits / temperature), filters not applied."""
        logits = self.model(torch.tensor([[*body["input_ids"], *sampled]])).logits[0, len(body["input_ids"]) - 1 : -1]
        logprobs = torch.log_softmax(logits / (body["sampling_params"]["temperature"] or 1.0), -1)
        return [float(row[token]) for row, token in zip(logprobs, sampled, strict=True)]

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: str, stop: asyncio.Event
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        ids: list[int] = []
        logprobs: list[float] = []
        masks: list[SamplingMask] = []
        async for chunk in self.engine.stream(body["input_ids"], sampling_of(body)):
            new = len(chunk.token_ids)
            ids += chunk.token_ids
            logprobs += chunk.logprobs
            masks += [chunk.sampling_mask] if chunk.sampling_mask is not None else []
            ended = chunk.final is not None
            if fault == "break" and len(ids) == 3:
                assert request.transport is not None
                request.transport.close()
                return response
            if stop.is_set():
                event = self._event(body, self._cut(body, ids, logprobs), new, fault, ended=True)
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                break
            finish = chunk.final.finish if chunk.final else Finish.LENGTH
            so_far = Completion(
                token_ids=tuple(ids),
                logprobs=tuple(logprobs),
                finish=finish,
                stopped_by=chunk.final.stopped_by if chunk.final else None,
                prompt_tokens=len(body["input_ids"]),
                sampling_mask=join_masks(masks) if masks else None,
            )
            event = self._event(body, so_far, new, fault, ended=ended)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _cut(self, body: dict[str, Any], ids: list[int], logprobs: list[float]) -> Completion:
        return Completion(
            token_ids=tuple(ids), logprobs=tuple(logprobs), finish=Finish.ABORT, prompt_tokens=len(body["input_ids"])
        )

    def _event(
        self, body: dict[str, Any], completion: Completion, new: int, fault: str, *, ended: bool
    ) -> dict[str, Any]:
        filters = bool(sampling_of(body).filters)
        logprobs = self._before_filters(body, completion.token_ids) if filters else list(completion.logprobs)
        rows = [[logprob, token, None] for token, logprob in zip(completion.token_ids, logprobs, strict=True)]
        ids = list(completion.token_ids)
        first = len(ids) - new if self.incremental else 0
        if fault == "sentinel":
            rows[-1][0] = -9999.0
        if fault == "swap":
            ids[-1] += 1
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish_reason(completion) if ended else None,
            "prompt_tokens": len(body["input_ids"]) + (fault == "recount"),
            "weight_version": self.weight_version,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        }
        if fault != "no_logprobs":
            meta["output_token_logprobs"] = rows[first:]
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = list(completion.logprobs[first:])
            if completion.sampling_mask is not None:
                meta["output_token_sampling_mask"] = [
                    completion.sampling_mask.row(i).tolist() for i in range(first, len(ids))
                ]
        if body.get("top_logprobs_num") and completion.top_logprobs:
            meta["output_top_logprobs"] = [
                [[x, token, None] for token, x in top.items()] for top in completion.top_logprobs[first:]
            ]
        return {"text": None, "output_ids": ids[first:], "meta_info": meta}


def finish_reason(completion: Completion) -> dict[str, Any]:
    if completion.finish is Finish.STOP:
        return {"type": "stop", "matched": completion.stopped_by}
    if completion.finish is Finish.ABORT:
        return {"type": "abort", "message": "Aborted"}
    return {"type": "length", "length": len(completion.token_ids)}


def sampling_of(body: dict[str, Any]) -> Sampling:
    params = body["sampling_params"]
    return Sampling(
        temperature=params["temperature"],
        top_p=params["top_p"],
        top_k=params.get("top_k", 0),
        min_p=params["min_p"],
        max_tokens=params["max_new_tokens"],
        seed=params.get("sampling_seed"),
        stop_token_ids=tuple(params.get("stop_token_ids", ())),
        top_logprobs=body.get("top_logprobs_num", 0),
    )
