"""One case: a session of the target, an agent that talks to it, and what the oracle says."""

import asyncio
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tokentrue.conformance.agents.dialects import (
    ANTHROPIC,
    FINISHES,
    Answer,
    Wire,
    read_answers,
    read_signatures,
    write_request,
)
from tokentrue.conformance.agents.messages import Losses, Message, Tool, lose
from tokentrue.conformance.agents.streams import Broken, Heard, Unsound, assemble, read_events
from tokentrue.conformance.oracle import Fault, Oracle, Row, Severity, find_uneven
from tokentrue.conformance.standin.engine import Engine
from tokentrue.conformance.standin.generation import Generation, Output, Plan, Writer
from tokentrue.conformance.standin.vocabulary import Vocabulary, draw_picture, is_same_picture, see_picture
from tokentrue.conformance.standin.wires import MODEL
from tokentrue.conformance.target import Session, Target, TargetProcess
from tokentrue.records import record

AT = {"type": "object", "properties": {"at": {"type": "string"}, "depth": {"type": "integer"}}}
LOOK = Tool(name="look", description="Look at a place.", parameters=AT)
MOVE = Tool(name="move", description="Move to a place.", parameters=AT)
FAITHFUL, PLAIN = Losses(), Wire()


class Stop(Exception):
    """The case cannot continue; what was found is in `Play.faults`."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """What cases share."""

    target: Target
    process: TargetProcess | None
    engine: Engine
    vocabulary: Vocabulary
    http: aiohttp.ClientSession


@record
class Score:
    """The share of the answers' tokens that is trained, rows, and tokens to forward."""

    coverage: float
    rows: int
    tokens: int


@record
class Turn:
    """An answered request; `choice` counts the answers to it, `order` the requests up to then."""

    asked: Sequence[Message]
    answer: Message
    generation: Generation
    choice: int
    order: int

    @property
    def past(self) -> list[Message]:
        """The history up to the last answer in it; turns that share one are branches."""
        at = max((at for at, message in enumerate(self.asked) if message.role == "assistant"), default=-1)
        return list(self.asked[: at + 1])


class Play:
    def __init__(self, bench: Bench, dialect: str, turns: int, seed: str) -> None:
        self.bench, self.target, self.dialect, self.turns, self.seed = bench, bench.target, dialect, turns, seed
        self.rng = random.Random(seed)
        self.writer = Writer(bench.vocabulary, self.rng)
        self.faults: list[Fault] = []
        self.transcript: list[str] = []
        self.score: Score | None = None
        self.foreign: set[int] = set()  # generations of another session that is played at the same time
        self.served: list[Turn] = []
        self._requests: list[Sequence[Message]] = []
        self._signatures: dict[str, str] = {}
        self._first = len(bench.engine.log[""])
        self._serial = self._outputs = self.pictures = 0
        self._last: list[Message] = []

    @property
    def log(self) -> list[Generation]:
        return [one for one in self.bench.engine.log[""][self._first :] if one.number not in self.foreign]

    def fault(self, rule: str, detail: str, severity: Severity = "fatal", *, tokens: int = 0) -> None:
        self._add([Fault(rule=rule, severity=severity, detail=detail, tokens=tokens)])

    def stop(self, rule: str, detail: str) -> Stop:
        self.fault(rule, detail)
        return Stop()

    def _add(self, faults: Iterable[Fault]) -> None:
        """Without rules and levels that the target makes no promise about."""
        skipped = self.target.not_promised
        self.faults += [one for one in faults if one.rule not in skipped and one.rule.split(".")[0] not in skipped]

    async def open(self) -> None:
        try:
            self.session: Session = await asyncio.to_thread(self.target.open)
        except Exception as error:
            raise self.stop("0.1", f"no session could be opened: {error!r}") from error

    # What the agent says.
    def text(self) -> str:
        self._serial += 1
        return f"{self.writer.words(5)} #{self._serial}"

    def opening(self) -> list[Message]:
        return [Message(role="system", text=self.text()), Message(role="user", text=self.text())]

    def picture(self, *size: int) -> bytes:
        """Of a new colour; `size`: width and height in tokens."""
        self.pictures += 1
        return draw_picture(tuple(self.pictures * factor % 256 for factor in (37, 71, 113)), *size)

    def output(self, *, calls: int = 1, reasoning: bool = True) -> Output:
        """One output of four is in ids that the tokenizer would not choose."""
        self._outputs += 1
        arguments = {"depth": self._serial, "at": self.writer.words(3)}
        made = [("look", json.dumps(arguments, ensure_ascii=False)) for _ in range(calls)]
        thought = self.writer.words(10) if reasoning else ""
        split = 0.5 if self._outputs % 4 == 3 else 0.0
        return self.writer.structured(thought, self.writer.words() if not made else "", made, split=split)

    def after(self, conversation: Sequence[Message], answer: Message) -> list[Message]:
        """The conversation with the answer, and results of its calls or another question."""
        results = [Message(role="tool", text=self.text(), answers=call.id) for call in answer.calls]
        return [*conversation, answer, *(results or [Message(role="user", text=self.text())])]

    # Asking.
    async def post(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (LOOK,),
        losses: Losses = FAITHFUL,
        wire: Wire = PLAIN,
        stream: bool = False,
        fields: Mapping[str, Any] = {},
        headers: Mapping[str, str] = {},
        heard: Heard | None = None,
    ) -> Heard:
        """Sends the request as this agent's habit makes it, and reads the answer; `heard` is filled meanwhile. A field
        that is None is left out."""
        self._requests.append(messages)
        sent = lose(messages, losses, self.rng)
        if self.dialect == ANTHROPIC and not wire.inline:  # a thinking block needs the signature it was served with
            sent = [m if m.reasoning in self._signatures else replace(m, reasoning="") for m in sent]
        asked = {"model": MODEL, "max_tokens": 4096, "temperature": 1.0, **fields}
        asked = {name: value for name, value in asked.items() if value is not None}
        wire = replace(wire, signatures=self._signatures)
        path, body = write_request(self.dialect, sent, tools, wire, asked, stream=stream)
        url = self.session.urls[self.dialect] + path
        same = next((at for at, (a, b) in enumerate(zip(self._last, sent, strict=False)) if a != b), len(self._last))
        before = [f"{same} messages as before"] if same else []
        said = " | ".join([*before, *map(brief, sent[same:])])
        self.transcript.append(f"{self.dialect}{', streamed' if stream else ''}: {said}")
        self._last, heard = sent, heard or Heard()
        version = {"anthropic-version": "2023-06-01"} if self.dialect == ANTHROPIC else {}
        async with self.bench.http.post(url, json=body, headers={**version, **self.session.headers, **headers}) as got:
            async for _ in read_events(got, heard):
                pass
        return heard

    def plan(self, output: Output | None = None, **how: Any) -> Plan:
        plan = Plan(output=output or self.output(), **how)
        self.bench.engine.plans[""].append(plan)
        return plan

    async def ask(self, messages: Sequence[Message], *, output: Output | None = None, **how: Any) -> Message:
        """A request that must be answered, with what the engine sampled."""
        self.bench.engine.plans[""].clear()
        plan, start = self.plan(output), len(self.log)
        try:
            heard = await self.post(messages, **how)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.stop("0.1", f"a good request was not answered: {error!r}") from error
        asked = (how.get("fields") or {}).get("temperature", 1.0)
        for one in self.log[start:]:
            if abs(one.asked.temperature - (1.0 if asked is None else asked)) > 1e-6:
                wanted = "no temperature" if asked is None else f"temperature {asked}"
                self.fault("1.4", f"the agent asked for {wanted}, the engine was asked for {one.asked.temperature}")
        (answer,) = self.serve(messages, heard, [plan], start, streamed=bool(how.get("stream")))
        return answer

    def serve(
        self, messages: Sequence[Message], heard: Heard, plans: Sequence[Plan], start: int, *, streamed: bool = False
    ) -> list[Message]:
        """The answers, one per plan, after the rules about what an agent is shown."""
        if heard.status != 200:
            raise self.stop("0.1", f"a good request got {heard.status}: {brief_json(heard.whole)}")
        if streamed and heard.whole is not None:
            self.fault("4.3", f"a streamed request got one body of type {heard.kind}")
        made = [one for one in self.log[start:] if any(one.plan is plan for plan in plans)] or self.log[start:]
        if not made:
            raise self.stop("1.1", "the gateway answered, and the engine was not asked")
        try:
            whole = heard.whole if heard.whole is not None else assemble(self.dialect, heard.events)
            answers = read_answers(self.dialect, whole)
            self._signatures |= read_signatures(self.dialect, whole)
        except (Broken, Unsound) as error:
            raise self.stop("4.3", f"the stream is not sound: {error}") from error
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            rule = "4.3" if streamed else "0.1"
            raise self.stop(rule, f"the answer is not in the dialect: {error!r} {brief_json(heard.whole)}") from error
        if len(answers) != len(plans):
            raise self.stop("4.1", f"the agent asked for {len(plans)} answers and got {len(answers)}")
        for choice, answer in enumerate(answers):
            self.transcript.append(f"  -> {brief(answer.message)}")
            left = made
            if len(plans) > 1:
                left = [one for one in made if all(one is not turn.generation for turn in self.served)]
            one = next((one for one in reversed(left) if is_shown_as(answer.message, one)), (left or made)[-1])
            self._compare_shown(answer, one)
            order = len(self._requests)
            self.served.append(Turn(asked=messages, answer=answer.message, generation=one, choice=choice, order=order))
        return [answer.message for answer in answers]

    def _compare_shown(self, answer: Answer, one: Generation) -> None:
        """Rules 4.1 and 4.4, and 9.2 for what the engine was shown."""
        if not is_shown_as(answer.message, one):
            message = answer.message
            shown = (message.reasoning, message.text, [(call.name, call.arguments) for call in message.calls])
            self.fault("4.1", f"sampled {brief_json(one.plan.output.expected)}, shown {brief_json(shown)}")
        wanted = FINISHES[self.dialect][2 if one.finish.reason == "length" else bool(answer.message.calls)]
        if answer.finish != wanted:
            due = f"{wanted!r} is due, the answer says {answer.finish!r}"
            self.fault("4.4", f"the sampling ended by {one.finish.reason}: {due}")
        sent = [see_picture(image)[1] for message in self._last for image in message.images]
        given = [self.bench.vocabulary.colours[name] for name, _, _ in one.images]
        if len(sent) != len(given) or not all(map(is_same_picture, sent, given)):
            self.fault("9.2", f"the agent sent images of the colours {sent}, the engine was given {given}")

    async def turn(self, messages: Sequence[Message], *, calls: int = 1, **how: Any) -> list[Message]:
        return self.after(messages, await self.ask(messages, output=self.output(calls=calls), **how))

    # The record.
    async def rows(self) -> Sequence[Row]:
        """The rows, once all that was served is in them or the gateway had time to write it."""
        served = [turn.generation for turn in self.served]
        oracle, loop = Oracle(self.log), asyncio.get_running_loop()
        end = loop.time() + self.target.settle_s
        while True:
            try:
                rows = await asyncio.to_thread(self.target.rows, self.session)
                uneven = list(find_uneven(rows))
            except Exception as error:
                raise self.stop("0.2", f"the rows cannot be read: {error!r}") from error
            if uneven:
                self._add(uneven)
                raise Stop
            trained = oracle.trained(rows)
            if loop.time() > end or all((one.number, at) in trained for one in served for at in range(one.delivered)):
                return rows
            if await asyncio.to_thread(self.target.reasons, self.session):  # what is missing is missing on purpose
                return rows
            await asyncio.sleep(0.25)

    async def judge(self, *, versions: bool = False, kept: bool = False) -> Sequence[Row]:
        """Levels 1, 2 and 9 hold after every case."""
        rows = await self.rows()
        reasons = await asyncio.to_thread(self.target.reasons, self.session)
        log, served = self.log, [turn.generation for turn in self.served]
        oracle, answered = Oracle(log), Oracle(served)
        faults = list(oracle.judge(rows))
        if any(fault.rule == "1.1" for fault in faults):
            own = {one.number for one in log}
            others = Oracle([one for one in self.bench.engine.log[""] if one.number not in own])
            if strange := len(others.trained(rows)):
                faults = [fault for fault in faults if fault.rule != "1.1"]
                self.fault("2.4", f"trained tokens that were sampled in another session: {strange}", tokens=strange)
        self._add(faults)
        continued, excusable = set[int](), set[int]()
        for turn in self.served:
            if any(turn.answer is message for asked in self._requests[turn.order :] for message in asked):
                continued.add(turn.generation.number)
        taken = [turn.past for turn in self.served if turn.past and turn.generation.number in continued]
        for turn in self.served:
            start, later = list(turn.asked), self._requests[turn.order :]
            again = any(list(asked[: len(start)]) == start for asked in later)
            if turn.generation.number not in continued and (turn.choice or again or turn.past in taken):
                excusable.add(turn.generation.number)
        self._add(answered.judge_coverage(rows, reasons, continued=continued, excusable=excusable))
        self._add(oracle.judge_images(rows))
        self._add(oracle.judge_versions(rows) if versions else ())
        self._add(oracle.judge_kept(rows) if kept else ())
        if sampled := sum(len(one.logprobs) for one in served):
            coverage, tokens = len(answered.trained(rows)) / sampled, sum(len(row.ids) for row in rows)
            self.score = Score(coverage=coverage, rows=len(rows), tokens=tokens)
        return rows


def is_shown_as(message: Message, one: Generation) -> bool:
    """Rule 4.1. Reasoning may be withheld, or shown as <think> text; what is shown must be what was sampled. Of an
    answer that was cut, the parser says what is text."""
    if one.plan.output.expected is None or tuple(one.sampled) != one.plan.output.ids:
        return True
    reasoning, text, calls = one.plan.output.expected
    thought, closed, said = message.text.strip().rpartition("</think>")
    thought = thought.removeprefix("<think>").strip() if closed else message.reasoning.strip()
    shown = [(call.name, json.loads(call.arguments or "{}")) for call in message.calls]
    wanted = [(name, json.loads(arguments)) for name, arguments in calls]
    return (said.strip(), shown) == (text.strip(), wanted) and thought in ("", reasoning)


def brief(message: Message) -> str:
    text = message.text if len(message.text) <= 48 else f"{message.text[:45]}…"
    parts = [f"{message.role} {text!r}"]
    parts += [f"(image of the colour {see_picture(image)[1]})" for image in message.images]
    parts += [f"(reasoning, {len(message.reasoning)} characters)"] if message.reasoning else []
    parts += [f"calls {call.name} {call.arguments[:40]} as {call.id[-8:]}" for call in message.calls]
    return " ".join(parts)


def brief_json(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else f"{text[:300]}…"
