"""A gateway of another design than ours, small enough to be read: it renders every request whole, asks the engine by ids,
keeps one record per call in a file, and merges calls by their prefixes. `DEFECTS` are ways to break it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from transformers import AutoTokenizer

from tests.fuzz.spelling import spell
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
    "columns_differ": ("1.sound.chat.1", "0.2"),
    "temperature_of_its_own": ("1.default_temperature.chat.1", "1.4"),
    "last_turn_dropped": ("1.sound.chat.2", "2.2"),
    "last_turn_abandoned": ("1.sound.chat.2", "2.2"),  # nothing else follows the turn before it
    "reason_made_up": ("3.retry.chat.2", "2.2"),
    "second_answer_forgotten": ("2.several.chat.1", "2.2"),
    "rows_of_another_session": ("2.sessions.chat.1", "2.4"),
    "stream_without_finish": ("4.shown.chat.1", "4.3"),
    "stream_without_done": ("4.shown.chat.1", "4.3"),
    "finish_always_stop": ("4.cut.chat.1", "4.4"),
    "image_swapped": ("9.swapped.chat.2", "9.1"),
    "image_moved": ("9.two.chat.1", "9.1"),
    "image_kept": ("9.swapped.chat.2", "9.2"),
}


class ReferenceTarget(Target):
    name, engine, settle_s = "reference", "generate", 0.0

    def __init__(self, defect: str = "") -> None:
        self.defect = defect

    def open(self) -> Session:
        made = self.post("/sessions")
        return Session(id=made["id"], urls={"chat": f"{self.url}/sessions/{made['id']}/v1/chat/completions"})

    def rows(self, session: Session) -> Sequence[Row]:
        return [Row(**row) for row in self.get(f"/sessions/{session.id}/rows")]

    def reasons(self, session: Session) -> Mapping[str, int]:
        reasons = {"last_turn_dropped": "retried", "last_turn_abandoned": "abandoned", "reason_made_up": "low quality"}
        return {reasons[self.defect]: 1 << 30} if self.defect in reasons else {}

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
        self._first_urls: list[str] = []
        self._by_size: dict[int, str] = {}

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

        def hide(text: str) -> str:
            texts.append(text)
            return f"\ue000{len(texts) - 1}\ue001"

        messages = [chat_message(message) for message in body["messages"]]
        for message in messages:
            content = message["content"]
            if message["role"] == "assistant" or self.defect == "special_token_injected":
                continue
            if isinstance(content, str):
                message["content"] = hide(content)
            else:
                message["content"] = [{**p, "text": hide(p["text"])} if p["type"] == "text" else p for p in content]
        shown = self._tokenizer.apply_chat_template(
            messages, tools=body.get("tools"), tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = []
        for at, part in enumerate(re.split(r"\ue000(\d+)\ue001", shown)):
            text = texts[int(part)] if at % 2 else part
            is_plain = at % 2 == 0 or not any(mark in text for mark in self._vocabulary.added)
            ids += self._vocabulary.encode(text) if is_plain else spell(self._vocabulary, text)
        return ids

    def _urls(self, body: Mapping[str, Any]) -> list[str]:
        parts = [part for one in body["messages"] if isinstance(one["content"], list) for part in one["content"]]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        if self.defect == "image_kept":  # the first picture that was sent at this place
            self._first_urls += urls[len(self._first_urls) :]
            return self._first_urls[: len(urls)]
        return urls

    def _place(self, prompt: Sequence[int], urls: Sequence[str]) -> list[tuple[str, int, int]]:
        """The engine's placeholders, one run for each image."""
        pad, places, at = self._vocabulary.added.get("<|image_pad|>"), list[tuple[str, int, int]](), 0
        while at < len(prompt):
            count = next((n for n, token in enumerate(prompt[at:]) if token != pad), 0)
            if count:
                name = hashlib.sha256(base64.b64decode(urls[len(places)].partition(",")[2])).hexdigest()
                if self.defect == "image_swapped":  # kept by its size: the last one of that size has its name
                    self._by_size[count] = name
                moved = at + (self.defect == "image_moved" and len(places))
                places.append((name, moved, count))
            at += count + 1
        return places

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except ConnectionError:  # the agent hung up
            return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("n", 1) > 1 and self.defect != "second_answer_forgotten":
            return web.json_response({"error": {"message": "n must be 1"}}, status=400)
        prompt, urls = self._render(body), self._urls(body)
        default = 0.6 if self.defect == "temperature_of_its_own" else 1.0
        temperature = 1.0 if self.defect == "temperature_ignored" else body.get("temperature", default)
        params = {"temperature": temperature, "top_p": body.get("top_p", 1.0), "max_tokens": body.get("max_tokens")}
        call = {"session": request.match_info["id"], "prompt": prompt, "sampled": [], "logprobs": [], "kept": []}
        call |= {
            "temperature": temperature,
            "versions": [],
            "filtered": params["top_p"] < 1,
            "finish": "",
            "images": [],
        }
        streamed = bool(body.get("stream"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        sent = ["", ""]
        if streamed:
            await response.prepare(request)
        try:
            async for event in self._generate(prompt, params, urls):
                choice = event["choices"][0]
                if urls and event.get("prompt_token_ids"):
                    call["prompt"] = event["prompt_token_ids"]
                    call["images"] = self._place(call["prompt"], urls)
                call["finish"] = choice["finish_reason"] or ""
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
            await response.write(b"data: [DONE]\n\n" if self.defect != "stream_without_done" else b"")
            return response
        made = [self._choice(call, 0)]
        if body.get("n", 1) > 1:
            other = {**call, "sampled": []}
            async for event in self._generate(prompt, params, urls):
                other["sampled"] += event["choices"][0]["token_ids"]
            made.append(self._choice(other, 1))
        return web.json_response({"id": "x", "model": "standin", "choices": made})

    def _choice(self, call: Mapping[str, Any], index: int) -> dict[str, Any]:
        reasoning, text, calls = self._parsed(call, ended=True)
        message = {"role": "assistant", "content": text, "reasoning_content": reasoning, "tool_calls": calls}
        return {"index": index, "message": message, "finish_reason": self._finish(call, calls)}

    def _finish(self, call: Mapping[str, Any], calls: Sequence[Any]) -> str:
        if self.defect == "finish_always_stop":
            return "stop"
        return "length" if call["finish"] == "length" else "tool_calls" if calls else "stop"

    async def _generate(self, prompt: list[int], params: Mapping[str, Any], urls: Sequence[str]) -> Any:
        asked = {"model": "standin", "token_ids": prompt, "sampling_params": params, "stream": True}
        parts = [{"type": "image_url", "url": url} for url in urls]
        asked |= {"content_parts": parts, "return_token_ids": True} if parts else {}
        async with self.http.post(f"{self._engine}/inference/v1/generate", json=asked) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        return
                    yield event

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
        finish = self._finish(call, calls) if ended and self.defect != "stream_without_finish" else None
        chunk = {"id": "x", "model": "standin", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _commit(self, call: dict[str, Any]) -> None:
        self._calls.setdefault(call["session"], []).append(call)
        if self.defect != "lost_on_kill":
            with self._file.open("a") as out:
                out.write(json.dumps(call) + "\n")

    async def _rows(self, request: web.Request) -> web.Response:
        calls = self._calls.get(request.match_info["id"], [])
        if self.defect == "rows_of_another_session":
            calls = [call for several in self._calls.values() for call in several]
        rows = self._spliced(calls) if self.defect == "prefix_spliced" else self._merged(calls)
        names = ("ids", "mask", "logprobs", "versions", "kept", "images")
        return web.json_response([{name: list_of(getattr(row, name)) for name in names} for row in rows])

    def _row(self, call: Mapping[str, Any]) -> Row:
        given, sampled = call["prompt"], call["sampled"]
        logprobs = call["logprobs"]
        if self.defect == "logprobs_of_another_temperature":
            logprobs = [value * call["temperature"] for value in logprobs]
        kept = [None] * len(given) + call["kept"] if call["filtered"] and self.defect != "kept_ids_lost" else None
        versions = None if self.defect == "version_missing" else [None] * len(given) + call["versions"]
        mask = [0] * len(given) + [1] * len(sampled)
        logprobs = [None] * len(given) + logprobs
        images = [(self._by_size.get(count, name), at, count) for name, at, count in call["images"]]
        return Row(
            ids=given + sampled,
            mask=mask,
            logprobs=logprobs[:-1] if self.defect == "columns_differ" else logprobs,
            versions=versions,
            kept=kept,
            images=images,
        )

    def _merged(self, calls: Sequence[Mapping[str, Any]]) -> Sequence[Row]:
        rows = [self._row(call) for call in calls]
        if any(call["filtered"] for call in calls):
            return rows
        if self.defect == "trained_twice" or (self.defect == "trained_twice_later" and len(self._calls) > 2):
            return [*rows, *rows[:1]]
        if self.defect in ("last_turn_dropped", "last_turn_abandoned", "columns_differ"):
            return rows if self.defect == "columns_differ" else rows[:-1]
        if self.defect == "reason_made_up":  # of two answers to one request, the first
            return [row for at, row in enumerate(rows) if not is_retry(calls, at)]
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


def is_retry(calls: Sequence[Mapping[str, Any]], at: int) -> bool:
    return any(call["prompt"] == calls[at]["prompt"] for call in calls[at + 1 :])


def list_of(value: Sequence[Any] | None) -> list[Any] | None:
    return None if value is None else list(value)


def start_reference(target: Target, engine: str, folder: Path, model: Path) -> Any:
    assert isinstance(target, ReferenceTarget)
    return ReferenceProcess(target, engine, folder, model)
