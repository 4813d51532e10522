"""Harnesses with pictures in front of a gateway: every habit of the coverage table, in the four dialects. Each prompt
that the engine gets is compared with transformers' own processor on the whole conversation, in which the sampled ids
replace the text of the model's turns.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

import tokentrue as tt
from tests.gateway.inside import ask, new_session
from tests.images.double import Eyes
from tests.vision_families import VisionSubject
from tokentrue.conformance.agents import dialects
from tokentrue.conformance.agents.dialects import ANTHROPIC, CHAT, GOOGLE, PATHS, RESPONSES, Wire, write_request
from tokentrue.conformance.agents.messages import Losses, Message, Tool, lose, sort_keys
from tokentrue.conformance.agents.streams import Broken, assemble
from tokentrue.gateway import Gateway, GatewayConfig
from tokentrue.gateway.config import GatewayLimits
from tokentrue.sessions.journal import Journal
from tokentrue.types import Chunk, Completion, Ids, PromptImage, Sampling

TURNS = 4
AT = {"type": "object", "properties": {"path": {"type": "string"}}}
LOOK = Tool(name="look", description="Look at a file.", parameters=AT)
WRITE = Tool(name="write", description="Write.", parameters=AT)
SYSTEM = Message(role="system", text="Be careful.")
HERMES = '<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>'
XML = "<tool_call>\n<function=look>\n<parameter=path>\nsüß/%d.py\n</parameter>\n</function>\n</tool_call>"


def picture(number: int) -> bytes:
    size = 30 + 37 * number % 190, 40 + 53 * number % 170
    file = BytesIO()
    Image.frombytes("RGB", size, random.Random(number).randbytes(3 * size[0] * size[1])).save(file, "PNG")
    return file.getvalue()


class Told(Eyes):
    """Answers from a list of ids, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[int, ...]] = []
        self.fails, self.pause_s = False, 0.0

    def _completion(self, prompt_ids: Ids, sampling: Sampling) -> Completion:
        if self.fails:
            raise RuntimeError("the engine went away")
        self.ids = self.answers.pop(0)
        return super()._completion(prompt_ids, sampling)

    async def stream(  # type: ignore[override]
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str | None = None,
        whole: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> AsyncIterator[Chunk]:
        await asyncio.sleep(self.pause_s)
        async for chunk in super().stream(prompt_ids, sampling, session=session, whole=whole, images=images):
            yield chunk
            await asyncio.sleep(self.pause_s)


@dataclass(frozen=True)
class Turn:
    message: Message
    ids: tuple[int, ...]


History = list[Message | Turn]


class Oracle:
    """transformers' processor of a family."""

    def __init__(self, subject: VisionSubject) -> None:
        self.processor, self.subject = subject.processor(), subject
        self.stop = "<end_of_turn>" if subject.is_gemma else "<|im_end|>"
        self.stop_id = self.processor.tokenizer.convert_tokens_to_ids(self.stop)
        self.verified: list[tuple[History, Sequence[Tool], list[int]]] = []

    def encode(self, text: str) -> list[int]:
        return list(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _talk(self, history: History, *, actual: bool) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for place, each in enumerate(history):
            message = each.message if isinstance(each, Turn) else each
            if message.role != "assistant":
                text = {"type": "text", "text": message.text}
                parts = [text, *[{"type": "image"}] * len(message.images)] if message.images else message.text
                name = {"name": "look"} if message.role == "tool" else {}
                out.append({"role": message.role, "content": parts, **name})
            elif not actual and isinstance(each, Turn):
                out.append({"role": "assistant", "content": f"zturn{place}z"})
            else:
                calls = [
                    {
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")},
                    }
                    for call in message.calls
                ]
                said = {"role": "assistant", "content": message.text, "reasoning_content": message.reasoning}
                out.append({**said, **({"tool_calls": calls} if calls else {})})
        return out

    def _text(self, history: History, tools: Sequence[Tool], *, actual: bool, ask: bool = True) -> str:
        shown = [{"type": "function", "function": tool.function()} for tool in tools] or None
        talk = self._talk(history, actual=actual)
        return self.processor.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=ask, tools=shown, **self.subject.kwargs
        )

    def _process(self, text: str, given: History) -> list[int]:
        files = [file for each in given if isinstance(each, Message) for file in each.images]
        images = [Image.open(BytesIO(file)) for file in files]
        made = self.processor(text=[text], images=images or None, add_special_tokens=False)
        return [int(id_) for id_ in made["input_ids"][0]]

    def render(self, history: History, tools: Sequence[Tool]) -> list[int]:
        """The template's own text of every turn."""
        return self._process(self._text(history, tools, actual=True), history)

    def splice(self, history: History, tools: Sequence[Tool]) -> list[int]:
        """The sampled ids of every turn that was served."""
        text = self._text(history, tools, actual=False)
        asking = text.removeprefix(self._text(history, tools, actual=False, ask=False))
        opening = asking.split("\n")[0]
        out: list[int] = []
        given: History = []
        for place, each in enumerate(history):
            if not isinstance(each, Turn):
                given.append(each)
                continue
            before, text = text.split(f"zturn{place}z")
            text = text.removeprefix(self.stop)
            out += self._process(before[: before.rindex(opening)] + asking, given)
            out += each.ids if each.ids[-1] == self.stop_id else (*each.ids, self.stop_id)
            given = []
        return out + self._process(text, given)

    def check(self, history: History, tools: Sequence[Tool], prompt: list[int], *, spliced: bool) -> None:
        """`spliced`: no turn may be rendered again. Otherwise what an earlier prompt has may be continued, too."""
        whole = self.splice(history, tools)
        ways = [whole] if spliced else [whole, self.render(history, tools)]
        for known, known_tools, ids in [] if spliced else self.verified:
            if known_tools == tools and known == history[: len(known)] and len(history) > len(known):
                ways.append(ids + whole[len(self.splice(known, tools)) :])
        assert prompt in ways, f"{history[-1]}: {prompt} is not {ways[0]}"
        self.verified.append((list(history), tools, prompt))


class Harness:
    """One session of one habit."""

    def __init__(self, subject: VisionSubject, dialect: str, *, stream: bool, store: str = "memory") -> None:
        self.oracle, self.dialect, self.stream, self.store = Oracle(subject), dialect, stream, store
        self.subject, self.engine, self.rng = subject, Told(), random.Random(7)
        self.renderer: Any = _load(subject)
        self.has_calls = subject.calls and not subject.is_gemma
        self.tools: tuple[Tool, ...] = (LOOK,) if self.has_calls else ()
        self.signatures: dict[str, str] = {}
        self.number = self.said = 0
        self.lossy: tuple[Losses, Wire] = Losses(), Wire()
        self.spliced = True
        self.open()

    def open(self) -> None:
        config = GatewayConfig(model="m", admin_key="boss", limits=GatewayLimits())
        self.journal = Journal(self.store)
        provider: Any = self.engine
        self.app = Gateway(config=config, renderer_for=lambda _: self.renderer, provider=provider, journal=self.journal)

    async def restart(self) -> None:
        await self.app.close()
        self.open()

    def show(self, role: str = "user", answers: str = "") -> Message:
        self.number += 1
        return Message(role=role, text=f"What is in {self.number}?", answers=answers, images=(picture(self.number),))

    def opening(self) -> History:
        return [SYSTEM, self.show()]

    def sample(self, *, silent: bool = False, call: bool | None = None) -> tuple[int, ...]:
        """Queues an answer whose ids no tokenizer would choose."""
        turn = self.said = self.said + 1
        body = "" if silent else f"Looking at {turn}. "
        if self.has_calls if call is None else call:
            arguments = json.dumps(
                {} if turn % 4 == 3 else {"path": f"süß/{turn}.py", "line": 1, "deep": {"y": [1, 2.5], "x": True}}
            )
            is_xml = self.subject.model_type == "qwen3_5"
            body += ("\n\n" if is_xml else "\n") * (not silent) + (XML % turn if is_xml else HERMES % arguments)
        thought = f"hm {turn}\n</think>\n\n" if self.subject.model_type == "qwen3_5" else ""
        cut = 4  # in a word: a marker that is not one token is text
        ids = (
            *self.oracle.encode(thought),
            *self.oracle.encode(body[:cut]),
            *self.oracle.encode(body[cut:]),
            self.oracle.stop_id,
        )
        self.engine.answers.append(ids)
        return ids

    def answer(self, message: Message) -> list[Message]:
        calls = message.calls
        if not calls:
            return [self.show()]
        role = "tool" in self.subject.roles
        return [self.show("tool", calls[0].id) if role else Message(role="tool", text="nothing", answers=calls[0].id)]

    def body(self, history: History, tools: Sequence[Tool], dialect: str, fields: dict[str, Any]) -> Any:
        losses, wire = self.lossy
        messages = [each.message if isinstance(each, Turn) else each for each in history]
        sent = lose(messages, losses, self.rng)
        if dialect == ANTHROPIC and not wire.inline:
            sent = [m if m.reasoning in self.signatures else replace(m, reasoning="") for m in sent]
        sent = [replace(m, inline=wire.inline and bool(m.reasoning)) for m in sent]
        wire = replace(wire, signatures=self.signatures)
        return write_request(dialect, sent, tools, wire, {"model": "m", **fields}, stream=self.stream)[1]

    def path(self, dialect: str) -> str:
        if dialect == GOOGLE:
            method = "streamGenerateContent?alt=sse" if self.stream else "generateContent"
            return f"/sessions/{self.session}/v1beta/models/m:{method}"
        return f"/sessions/{self.session}/{PATHS[dialect]}"

    async def post(self, history: History, tools: Sequence[Tool], dialect: str, fields: dict[str, Any]) -> Any:
        body = json.dumps(self.body(history, tools, dialect, fields)).encode()
        status, answer = await ask(self.app, "POST", self.path(dialect), body)
        if status != 200 or not self.stream:
            return status, json.loads(answer)
        lines = [line[5:].strip() for line in answer.split(b"\n") if line.startswith(b"data:")]
        events = [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]
        with suppress(Broken):
            return status, assemble(dialect, events)
        return 502, events

    async def ask(
        self, history: History, *, tools: Sequence[Tool] | None = None, dialect: str | None = None, **fields: Any
    ) -> list[Turn]:
        """The answers; the prompt that the engine got is checked."""
        used, spoken, before = self.tools if tools is None else tools, dialect or self.dialect, len(self.engine.seen)
        status, whole = await self.post(history, used, spoken, fields)
        assert status == 200, whole
        self.signatures |= dialects.read_signatures(spoken, whole)
        for prompt, _ in self.engine.seen[before : before + 1]:
            self.oracle.check(history, used, list(prompt), spliced=self.spliced)
        return [Turn(found.message, ()) for found in dialects.read_answers(spoken, whole)]

    async def step(
        self, history: History, *, silent: bool = False, call: bool | None = None, **options: Any
    ) -> History:
        ids = self.sample(silent=silent, call=call)
        (turn,) = await self.ask(history, **options)
        limit = options.get("max_tokens")
        return [*history, Turn(turn.message, ids[:limit]), *self.answer(turn.message)]

    async def run(self, history: History, turns: int = TURNS, **options: Any) -> History:
        for _ in range(turns):
            history = await self.step(history, **options)
        return history

    async def start(self, **settings: Any) -> None:
        self.session = (await new_session(self.app, **settings))["session_id"]

    async def samples(self) -> dict[str, Any]:
        status, body = await ask(self.app, "GET", f"/sessions/{self.session}/samples")
        assert status == 200, body
        return json.loads(body)


_LOADED: dict[str, Any] = {}


def _load(subject: VisionSubject) -> Any:
    if subject.name not in _LOADED:
        _LOADED[subject.name] = tt.load_renderer(subject.folder(), template_kwargs=dict(subject.kwargs) or None)
    return _LOADED[subject.name]


# ---- habits. Each returns the reasons for which tokens may be untrained.
Habit = Callable[[Harness], Awaitable[set[str]]]


def replaying(*lossy: tuple[Losses, Wire], silent: bool = False) -> Habit:
    """The losses of turn i are `lossy[i]`, counted round."""

    async def habit(harness: Harness) -> set[str]:
        await harness.start()
        history = harness.opening()
        for turn in range(TURNS):
            harness.lossy = lossy[turn % len(lossy)]
            history = await harness.step(history, silent=silent and harness.has_calls)
        return set()

    return habit


async def other_dialect(harness: Harness) -> set[str]:
    await harness.start()
    history = harness.opening()
    for dialect in (harness.dialect, ANTHROPIC, CHAT, GOOGLE, RESPONSES):
        history = await harness.step(history, dialect=dialect)
    return set()


def retried(place: int, depth: int = 0) -> Habit:
    async def habit(harness: Harness) -> set[str]:
        await harness.start()
        histories = [harness.opening()]
        for _ in range(place + 1):
            histories.append(await harness.step(histories[-1]))
        again = await harness.step(histories[place - depth])
        await harness.run(again, TURNS - place)
        return {"rolled_back" if depth else "retried"}

    return habit


async def twice_in_flight(harness: Harness) -> set[str]:
    await harness.start()
    harness.engine.pause_s = 0.02
    history = harness.opening()
    for _ in range(TURNS):
        ids = harness.sample()
        (one,), (two,) = await asyncio.gather(harness.ask(history), harness.ask(list(history)))
        assert one.message.text == two.message.text
        history = [*history, Turn(one.message, ids), *harness.answer(one.message)]
    return set()


async def parallel(harness: Harness) -> set[str]:
    """Each branch has another picture."""
    await harness.start()
    base = await harness.run(harness.opening(), 2)
    for _ in range(3):
        last = base[-1]
        assert isinstance(last, Message)
        other = [*base[:-1], harness.show(last.role, last.answers) if last.images else last]
        other = other if other != base else [*base, harness.show()]
        await harness.run(other, 2)
    return set()


async def best_of_n(harness: Harness) -> set[str]:
    await harness.start()
    if harness.dialect != CHAT:
        await harness.run(harness.opening())
        return set()
    history = harness.opening()
    for turn in range(TURNS):
        said = [harness.sample() for _ in range(3)]
        turns = await harness.ask(history, n=3)
        # Choices are generated at once: the text says which ids are whose.
        chosen = turns[turn % 3].message
        number = re.search(r"\d+", chosen.text)
        assert number is not None
        ids = said[int(number[0]) - harness.said + 2]
        history = [*history, Turn(chosen, ids), *harness.answer(chosen)]
    return {"not_chosen"}


async def sub_agents(harness: Harness) -> set[str]:
    await harness.start()
    history = harness.opening()
    for _ in range(2):
        history = await harness.run(history, 2)
        await harness.run([Message(role="system", text="You search."), harness.show()], 2)
    return set()


async def compaction(harness: Harness) -> set[str]:
    """The summary has the first picture again."""
    await harness.start()
    await harness.run(harness.opening(), 3)
    summary = Message(role="user", text="Summary: module 3 fails.", images=(picture(1),))
    await harness.run([SYSTEM, summary], 2)
    return set()


async def reminders(harness: Harness) -> set[str]:
    await harness.start()
    history = await harness.run(harness.opening(), 2)
    harness.spliced = False
    first = history[1]
    assert isinstance(first, Message)
    history[1] = replace(first, text=f"<system-reminder>Hurry.</system-reminder>{first.text}")
    await harness.run(history, 2)
    return set()


def alternating(tools: Sequence[int] = (0,), systems: Sequence[str] = ("Be careful.",), pin: bool = False) -> Habit:
    async def habit(harness: Harness) -> set[str]:
        await harness.start(**({"pin": ["system"]} if pin else {}))
        harness.spliced = pin
        sets, history = ((harness.tools, (*harness.tools, WRITE)) if harness.tools else ((), ())), harness.opening()
        for turn in range(TURNS + 2):
            head = SYSTEM if pin else Message(role="system", text=systems[turn % len(systems)])
            history[0] = Message(role="system", text=systems[turn % len(systems)])
            if pin:
                harness.oracle.verified.clear()
                history = await _pinned(harness, history, head)
            else:
                history = await harness.step(history, tools=sets[tools[turn % len(tools)]])
        return set()

    return habit


async def _pinned(harness: Harness, history: History, head: Message) -> History:
    """What the client says about its system prompt is replaced by the first one."""
    check = harness.oracle.check

    def pinned(told: History, *rest: Any, **options: Any) -> None:
        first = Message(role="system", text="It is 10:00 now.")
        check([first, *told[1:]], *rest, **options)

    harness.oracle.check = pinned  # type: ignore[method-assign]
    try:
        return await harness.step(history)
    finally:
        harness.oracle.check = check  # type: ignore[method-assign]


async def disconnects(harness: Harness) -> set[str]:
    await harness.start()
    history = await harness.run(harness.opening(), 2)
    ids = harness.sample()
    if not harness.stream:
        (turn,) = await harness.ask(history)
        await harness.run([*history, Turn(turn.message, ids), *harness.answer(turn.message)], 1)
        return set()
    body = json.dumps(harness.body(history, harness.tools, harness.dialect, {})).encode()
    harness.engine.pause_s = 0.01
    await _hang_up(harness.app, harness.path(harness.dialect), body)
    harness.engine.pause_s = 0.0
    await harness.run(history, 2)
    return {"disconnected"}


async def _hang_up(app: Gateway, path: str, body: bytes) -> None:
    """The client leaves after the first events."""
    events = 0
    gone = asyncio.Event()
    delivered = False

    async def receive() -> dict[str, Any]:
        nonlocal delivered
        if delivered:
            await gone.wait()
            return {"type": "http.disconnect"}
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal events
        events += 1
        if events >= 3:
            gone.set()
            await asyncio.sleep(0.02)

    where, _, query = path.partition("?")
    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer boss")]
    scope = {
        "type": "http", "method": "POST", "path": where, "raw_path": where.encode(), "query_string": query.encode(),
        "headers": headers, "scheme": "http", "server": ("localhost", 80), "root_path": "", "http_version": "1.1",
    }  # fmt: skip
    with suppress(OSError, asyncio.CancelledError):
        await app(scope, receive, send)


async def restarts(harness: Harness) -> set[str]:
    await harness.start()
    history = harness.opening()
    for _ in range(2):
        history = await harness.run(history, 2)
        await harness.restart()
    await harness.run(history, 1)
    return set()


async def cut_off(harness: Harness) -> set[str]:
    await harness.start()
    history = harness.opening()
    for turn in range(TURNS):
        # In the text: what closes a thought that was cut is the template's.
        thought = f"hm {turn + 1}\n</think>\n\n" if harness.subject.model_type == "qwen3_5" else ""
        limit = 3 + len(harness.oracle.encode(thought)) if turn % 2 else 999
        history = await harness.step(history, max_tokens=limit)
    return set()


async def engine_fails(harness: Harness) -> set[str]:
    await harness.start()
    history = await harness.run(harness.opening(), 2)
    harness.engine.fails = True
    status, _ = await harness.post(history, harness.tools, harness.dialect, {})
    assert status >= 500
    harness.engine.fails = False
    await harness.run(history, 2)
    return set()


def respell(arguments: str, **how: Any) -> str:
    return json.dumps(json.loads(arguments or "{}"), **how)


def pad(text: str) -> str:
    return f"\n{text} " if text.strip() else text


SPELLINGS: tuple[dict[str, Any], ...] = (
    {"sort_keys": True, "ensure_ascii": False},
    {"separators": (",", ":"), "ensure_ascii": False},
    {"ensure_ascii": True},
    {"indent": 2, "ensure_ascii": False},
)
CLOCK = [f"It is 10:0{minute} now." for minute in range(6)]
HABITS: dict[str, Habit] = {
    "replays verbatim": replaying((Losses(), Wire())),
    "drops the reasoning": replaying((Losses(reasoning=True), Wire())),
    "inlines the reasoning": replaying((Losses(), Wire(inline=True))),
    "rewrites tool-call ids": replaying((Losses(ids=True), Wire())),
    "re-serialises arguments": replaying(*((Losses(arguments=partial(respell, **how)), Wire()) for how in SPELLINGS)),
    "sends content as parts": replaying((Losses(), Wire(parts=True))),
    "null, empty or missing content": replaying(
        *((Losses(), Wire(empty=how)) for how in ("null", "empty", "missing")), silent=True
    ),
    "changes outer whitespace": replaying((Losses(whitespace=str.strip), Wire()), (Losses(whitespace=pad), Wire())),
    "adds unknown fields": replaying((Losses(), Wire(extra=True))),
    "does six of these at once": replaying(
        (Losses(ids=True, arguments=sort_keys, whitespace=pad), Wire(inline=True, parts=True, extra=True))
    ),
    "replays in another dialect": other_dialect,
    "retries the last turn": retried(3),
    "retries a turn in the middle": retried(2),
    "goes back two turns and asks again": retried(2, depth=2),
    "retries the first turn": retried(0),
    "sends every request twice, in flight": twice_in_flight,
    "runs several branches on one prefix": parallel,
    "asks for n and continues one": best_of_n,
    "runs sub-agents in the session": sub_agents,
    "compacts its history to a summary": compaction,
    "writes a reminder into an old message": reminders,
    "changes its tools": alternating((0, 0, 0, 1, 1, 1)),
    "changes its tools, then back": alternating((0, 0, 1, 1, 0, 0)),
    "has other tools at every turn": alternating((0, 1)),
    "has another system prompt at every turn": alternating(systems=("Plan.", "Act.")),
    "has both at every turn": alternating((0, 1), ("Plan.", "Act.")),
    "puts a clock into its system prompt": alternating(systems=CLOCK),
    "the same, pinned": alternating(systems=CLOCK, pin=True),
    "hangs up in mid-stream, then asks again": disconnects,
    "comes back after the gateway restarted": restarts,
    "is cut off by max_tokens": cut_off,
    "meets an engine failure, then asks again": engine_fails,
}


async def play(name: str, subject: VisionSubject, dialect: str, *, stream: bool, folder: Path) -> None:
    """Plays a habit and checks what a trainer gets."""
    store = f"sqlite:{folder}/journal.db" if name == "comes back after the gateway restarted" else "memory"
    harness = Harness(subject, dialect, stream=stream, store=store)
    reasons = await HABITS[name](harness)
    answer = await harness.samples()
    samples = [tt.samples.sample_from_json(row) for row in answer["samples"]]
    coverage = answer["coverage"]
    assert {item["why"] for item in coverage["untrained"]} == reasons, coverage
    assert reasons or coverage["ratio"] == 1.0
    assert tt.samples.audit(samples).ok
    prompts = {tuple(prompt) for prompt, _ in harness.engine.seen}
    pad = harness.renderer.codec.literals[harness.renderer.vision.repeated]
    for sample in samples:
        spans = [span for span in sample.spans if span.kind == "sampled"]
        assert spans and all(tuple(sample.token_ids[: span.start]) in prompts for span in spans)
        runs = [place for run in sample.images for place in range(run.start, run.start + run.count)]
        assert runs == [place for place, id_ in enumerate(sample.token_ids) if id_ == pad]
    await harness.app.close()
