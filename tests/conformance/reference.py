"""A gateway of another design than ours, small enough to be read: it renders every request whole, asks the engine by ids,
keeps one record per call in a file, and merges calls by their prefixes. `DEFECTS` are ways to break it."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from aiohttp import web
from transformers import AutoTokenizer

from tokentrue.conformance import Row, Session, Target, merge_calls
from tokentrue.conformance.standin.vocabulary import Vocabulary
from tokentrue.conformance.standin.wires import chat_message, parse_output

DEFECTS = {  # name -> (a case that shows it, the rule that it breaks)
    "prefix_spliced": ("3.verbatim.chat.4", "1.3"),
    "trained_twice": ("1.sound.chat.2", "2.1"),
    "logprobs_of_another_temperature": ("1.sound.chat.1", "1.2"),
    "temperature_ignored": ("1.sound.chat.1", "1.4"),
    "version_missing": ("6.versions.chat.2", "6.1"),
    "stream_unlike_record": ("4.shown.chat.1", "4.1"),
    "stream_held_back": ("4.first_token.chat.1", "4.2"),
    "error_hidden": ("5.engine_error.chat.1", "5.1"),
    "lost_on_kill": ("5.kill.chat.1", "5.5"),
    "special_token_injected": ("7.injection.chat.1", "7.1"),
    "retry_dropped": ("3.verbatim.chat.5", "2.3"),
    "kept_ids_lost": ("1.filters.chat.1", "1.5"),
    "audit_blind": ("8.audit.chat.2", "8.2"),
}


class ReferenceTarget(Target):
    name, engine, settle_s = "reference", "generate", 0.0
    not_promised: ClassVar = {"9": "no images"}

    def __init__(self, defect: str = "") -> None:
        self.defect = defect

    def open(self) -> Session:
        made = self.post("/sessions")
        return Session(id=made["id"], urls={"chat": f"{self.url}/sessions/{made['id']}/v1/chat/completions"})

    def rows(self, session: Session) -> Sequence[Row]:
        return [Row(**row) for row in self.get(f"/sessions/{session.id}/rows")]

    def export(self, session: Session, folder: Path) -> Path:
        path = folder / "rows.jsonl"
        rows = self.get(f"/sessions/{session.id}/rows")
        path.write_text("".join(json.dumps({**row, "digest": digest(row)}) + "\n" for row in rows))
        return path

    def audit(self, path: Path) -> bool:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return self.defect == "audit_blind" or all(row.pop("digest") == digest(row) for row in rows)


def digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps({name: row[name] for name in sorted(row) if name != "digest"}).encode()
    ).hexdigest()


class ReferenceProcess:
    """In this process: `stop` with SIGKILL forgets all that is not in the file."""

    def __init__(self, target: ReferenceTarget, engine: str, folder: Path, model: Path) -> None:
        self.target, self.command = target, ["reference"]
        self._engine, self._file, self._model = engine, folder / "calls.jsonl", model
        self._port = 0

    async def start(self) -> None:
        self.gateway = Reference(self.target.defect, self._engine, self._file, self._model)
        self._runner = web.AppRunner(self.gateway.app(), access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.target.url = f"http://127.0.0.1:{self._port}"

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        await self.gateway.http.close()
        await self._runner.cleanup()


class Reference:
    def __init__(self, defect: str, engine: str, file: Path, model: Path) -> None:
        self.defect, self._engine, self._file = defect, engine, file
        self._vocabulary, self._tokenizer = Vocabulary(model), AutoTokenizer.from_pretrained(str(model))
        self._calls: dict[str, list[dict[str, Any]]] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            call = json.loads(line)
            self._calls.setdefault(call["session"], []).append(call)
        self.http = aiohttp.ClientSession()

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/sessions", self._open),
                web.post("/sessions/{id}/v1/chat/completions", self._chat),
                web.get("/sessions/{id}/rows", self._rows),
            ]
        )
        return app

    async def _open(self, request: web.Request) -> web.Response:
        name = f"s{len(self._calls)}"
        self._calls[name] = []
        return web.json_response({"id": name})

    def _render(self, body: Mapping[str, Any]) -> list[int]:
        """Text of users and tools is encoded apart, so that it gives no control token."""
        texts: list[str] = []
        messages = [chat_message(message) for message in body["messages"]]
        for message in messages:
            if message["role"] != "assistant" and self.defect != "special_token_injected":
                texts.append(message["content"])
                message["content"] = f"\ue000{len(texts) - 1}\ue001"
        shown = self._tokenizer.apply_chat_template(
            messages, tools=body.get("tools"), tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = []
        for at, part in enumerate(re.split(r"\ue000(\d+)\ue001", shown)):
            text = texts[int(part)] if at % 2 else part
            is_plain = at % 2 == 0 or not any(mark in text for mark in self._vocabulary.added)
            ids += self._vocabulary.encode(text) if is_plain else self._vocabulary.spell(text)
        return ids

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except ConnectionError:  # the agent hung up
            return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = self._render(body)
        temperature = 1.0 if self.defect == "temperature_ignored" else body.get("temperature", 1.0)
        params = {"temperature": temperature, "top_p": body.get("top_p", 1.0), "max_tokens": body.get("max_tokens")}
        call = {"session": request.match_info["id"], "prompt": prompt, "sampled": [], "logprobs": [], "kept": []}
        call |= {"temperature": temperature, "versions": [], "filtered": params["top_p"] < 1}
        streamed = bool(body.get("stream"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        sent = ["", ""]
        if streamed:
            await response.prepare(request)
        try:
            async for choice in self._generate(prompt, params):
                call["sampled"] += choice["token_ids"]
                call["logprobs"] += [row["logprob"] for row in choice["logprobs"]["content"]]
                call["kept"] += choice.get("sampling_mask") or []
                for span in choice.get("weight_versions") or ():
                    call["versions"] += [span["version"]] * (span["end"] - span["start"])
                if streamed and self.defect != "stream_held_back":
                    await self._show(response, call, sent, ended=False)
        except ConnectionError:
            raise
        except aiohttp.ClientError as error:
            return await self._fail(response, str(error), streamed=streamed)
        if not call["versions"] and self.defect != "error_hidden":
            return await self._fail(response, "the engine's answer ended early", streamed=streamed)
        self._commit(call)
        if streamed:
            await self._show(response, call, sent, ended=True)
            await response.write(b"data: [DONE]\n\n")
            return response
        reasoning, text, calls = self._parsed(call, ended=True)
        message = {"role": "assistant", "content": text, "reasoning_content": reasoning, "tool_calls": calls}
        made = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        return web.json_response({"id": "x", "model": "standin", "choices": [made]})

    async def _generate(self, prompt: list[int], params: Mapping[str, Any]) -> Any:
        asked = {"model": "standin", "token_ids": prompt, "sampling_params": params, "stream": True}
        async with self.http.post(f"{self._engine}/inference/v1/generate", json=asked) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        return
                    yield event["choices"][0]

    async def _fail(self, response: web.StreamResponse, why: str, *, streamed: bool) -> web.StreamResponse:
        if not streamed:
            return web.json_response({"error": {"message": why}}, status=502)
        await response.write(b"data: " + json.dumps({"error": {"message": why}}).encode() + b"\n\n")
        return response

    def _parsed(self, call: Mapping[str, Any], *, ended: bool) -> tuple[str, str, list[Any]]:
        reasoning, text, calls = parse_output(self._vocabulary.text(call["sampled"]), ended=ended)
        names = [f"call_{len(call['prompt'])}_{at}" for at in range(len(calls))]
        made = [{"id": name, "type": "function", "function": one} for name, one in zip(names, calls, strict=True)]
        return reasoning, text, made

    async def _show(self, response: web.StreamResponse, call: Any, sent: list[str], *, ended: bool) -> None:
        reasoning, text, calls = self._parsed(call, ended=ended)
        if self.defect == "stream_unlike_record":
            text = text[1:]
        delta: dict[str, Any] = {"reasoning_content": reasoning[len(sent[0]) :], "content": text[len(sent[1]) :]}
        if not ended and not any(delta.values()):
            return
        sent[:] = [reasoning, text]
        if ended:
            delta["tool_calls"] = [{"index": at, **one} for at, one in enumerate(calls)]
        finish = ("tool_calls" if calls else "stop") if ended else None
        chunk = {"id": "x", "model": "standin", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _commit(self, call: dict[str, Any]) -> None:
        self._calls.setdefault(call["session"], []).append(call)
        if self.defect != "lost_on_kill":
            with self._file.open("a") as out:
                out.write(json.dumps(call) + "\n")

    async def _rows(self, request: web.Request) -> web.Response:
        calls = self._calls.get(request.match_info["id"], [])
        rows = self._spliced(calls) if self.defect == "prefix_spliced" else self._merged(calls)
        names = ("ids", "mask", "logprobs", "versions", "kept")
        return web.json_response([{name: list_of(getattr(row, name)) for name in names} for row in rows])

    def _row(self, call: Mapping[str, Any]) -> Row:
        given, sampled = call["prompt"], call["sampled"]
        logprobs = call["logprobs"]
        if self.defect == "logprobs_of_another_temperature":
            logprobs = [value * call["temperature"] for value in logprobs]
        kept = [None] * len(given) + call["kept"] if call["filtered"] and self.defect != "kept_ids_lost" else None
        versions = None if self.defect == "version_missing" else [None] * len(given) + call["versions"]
        mask = [0] * len(given) + [1] * len(sampled)
        return Row(
            ids=given + sampled, mask=mask, logprobs=[None] * len(given) + logprobs, versions=versions, kept=kept
        )

    def _merged(self, calls: Sequence[Mapping[str, Any]]) -> Sequence[Row]:
        rows = [self._row(call) for call in calls]
        if any(call["filtered"] for call in calls):
            return rows
        if self.defect == "trained_twice":
            return [*rows, *rows[:1]]
        merged = merge_calls(rows)
        if self.defect == "retry_dropped":  # whatever nobody extends is taken for a retry, except the last
            return merged[-1:]
        return merged

    def _spliced(self, calls: Sequence[Mapping[str, Any]]) -> Sequence[Row]:
        """One row of the last prompt, with every sampled body in place of its canonical text."""
        ids, mask, logprobs = list[int](), list[int](), list[float | None]()
        before = 0
        for call in calls:
            glue = call["prompt"][before:]
            ids += glue + call["sampled"]
            mask += [0] * len(glue) + [1] * len(call["sampled"])
            logprobs += [None] * len(glue) + call["logprobs"]
            canonical = self._vocabulary.encode(self._vocabulary.text(call["sampled"]))
            before = len(call["prompt"]) + len(canonical)
        return [Row(ids=ids, mask=mask, logprobs=logprobs)]


def list_of(value: Sequence[Any] | None) -> list[Any] | None:
    return None if value is None else list(value)


def start_reference(target: Target, engine: str, folder: Path, model: Path) -> Any:
    assert isinstance(target, ReferenceTarget)
    return ReferenceProcess(target, engine, folder, model)
