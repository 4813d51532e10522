"""One case: a session, a random sequence of things that harnesses and engines do, and the rules checked after each.

Every step draws from a random source of its own (seed, case, step), so that steps can be left out and the others stay
what they are.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fuzz.comparable import comparable
from tests.fuzz.engine import Engine, Generation, Plan
from tests.fuzz.gateway import Gateway
from tests.fuzz.harness import random_losses, random_wire
from tests.fuzz.messages import Fit, fit
from tests.fuzz.native import Tool, Wire, custom_input, drop_result_ids, make_native, make_plain, read_node
from tests.fuzz.oracle import Judge, Sampled, Turn, Violation, join_parts, short
from tests.fuzz.outputs import MARKERS, Writer
from tests.fuzz.streams import assemble_strictly
from tokentrue.conformance.agents import dialects
from tokentrue.conformance.agents.dialects import ANTHROPIC, CHAT, GOOGLE, PATHS, RESPONSES, write_request
from tokentrue.conformance.agents.messages import Message, lose
from tokentrue.conformance.agents.streams import Broken, Heard, Unsound
from tokentrue.conformance.standin.generation import Output
from tokentrue.conformance.standin.vocabulary import Vocabulary

ENGINE_AT_FAULT = {502, 503, 504}


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request, not yet sent."""

    messages: list[Message]
    tools: tuple[Tool, ...]
    dialect: str
    wire: Wire = field(default_factory=Wire)
    stream: bool = False
    n: int = 1
    key: str | None = None
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    previous: str | None = None  # a response id that stands for all messages but the new ones
    new: int = 0  # how many messages are new, where `previous` is set


@dataclass(slots=True, kw_only=True)
class World:
    """What all cases of a run share."""

    gateway: Gateway
    engine: Engine
    vocabulary: Vocabulary
    judge: Judge
    requests: int = 0


class Case:
    def __init__(self, world: World, seed: int, index: int, *, name: str = "") -> None:
        self.world, self.seed, self.index = world, seed, index
        self.session = f"fuzz-{seed}-{index}{name}"
        self.turns: list[Turn] = []
        self.heard_partly: list[tuple[Generation, list[str]]] = []
        self.uncertain: list[Generation] = []
        self.must_train: dict[str, Asked] = {}
        self.models_with_tools: set[str] = set()
        self.transcript: list[str] = []
        self.signatures: dict[str, str] = {}
        self.tools: tuple[Tool, ...] = ()
        self.deleted = False
        self._serial = 0
        self.use(0)

    def use(self, step: int) -> None:
        self.rng = random.Random(f"{self.seed}/{self.index}/{step}")
        self.writer = Writer(self.world.vocabulary, self.rng)

    # Building requests.
    def some_text(self) -> str:
        """Every text is told from every other by its number; some hold what looks like structure."""
        self._serial += 1
        forged = f" {self.rng.choice(MARKERS)}" if self.rng.random() < 0.15 else ""
        return f"{self.writer.words(6)} #{self._serial}{forged} {self.writer.words(2)}"

    def opening(self) -> list[Message]:
        system = [Message(role="system", text=self.some_text())] if self.rng.random() < 0.6 else []
        return [*system, Message(role="user", text=self.some_text())]

    def after(self, turn: Turn) -> list[Message]:
        """The conversation to `turn`, with what an agent adds: results of the calls, or another question."""
        calls = turn.path[-1].calls
        new = [
            Message(role="tool", text=self.some_text() if self.rng.random() < 0.9 else "", answers=call.id)
            for call in calls
        ]
        if len(new) > 1 and self.rng.random() < 0.2:  # results as they came in, or one that is missing
            self.rng.shuffle(new)
            new = new[: self.rng.choice((len(new), len(new) - 1))]
        if not calls or self.rng.random() < 0.15:
            new.append(Message(role="user", text=self.some_text()))
        return [*turn.path, *new]

    def pick(self) -> Turn | None:
        """Mostly the newest turn; sometimes an older one, which the agent goes back to."""
        if not self.turns:
            return None
        return self.turns[-1] if self.rng.random() < 0.8 else self.rng.choice(self.turns)

    def request(self, messages: Sequence[Message], *, lossy: bool = True) -> Asked:
        rng = self.rng
        sent = lose(messages, random_losses(rng), rng) if lossy else list(messages)
        dialect = rng.choice((CHAT, CHAT, RESPONSES, RESPONSES, ANTHROPIC, ANTHROPIC, GOOGLE))
        wire = random_wire(rng) if lossy else Wire()
        if dialect == ANTHROPIC and not wire.inline:  # a thinking block needs the signature that it was served with
            sent = [m if m.reasoning in self.signatures else replace(m, reasoning="") for m in sent]
        sent = [replace(m, inline=wire.inline and bool(m.reasoning)) for m in sent]
        asked = Asked(messages=sent, tools=self.tools, dialect=dialect, wire=wire, stream=rng.random() < 0.6)
        asked.fields = self._fields(dialect)
        asked.key = f"key-{self.session}-{rng.getrandbits(48):x}" if rng.random() < 0.3 else None
        return asked

    def _fields(self, dialect: str) -> dict[str, Any]:
        """Settings that go back and forth between few values from one request to the next."""
        rng = self.rng
        fields: dict[str, Any] = {"model": rng.choice(("m", "other-model"))}
        if rng.random() < 0.4:
            fields["temperature"] = rng.choice((0.7, 1.0))
        if rng.random() < 0.2:
            fields["metadata"] = {"user_id": rng.choice(("a", "b"))}
        if self.tools and rng.random() < 0.3:
            fields["tool_choice"] = {"type": "auto"} if dialect == ANTHROPIC else "auto"
        limit = rng.choice((None, None, None, 100_000, 90_000, rng.randint(1, 30)))
        if limit is not None:
            fields["max_output_tokens" if dialect == RESPONSES else "max_tokens"] = limit
        if dialect in {CHAT, RESPONSES} and rng.random() < 0.2:
            fields["user"] = rng.choice(("u1", "u2"))
        if dialect in {CHAT, GOOGLE} and rng.random() < 0.3:
            fields["seed"] = rng.choice((1, 2))
        if dialect != RESPONSES and rng.random() < 0.08:
            stops = rng.choice((["oo", "o"], ["the she", "he"], ["ok"], ["</", "/t"]))
            fields["stop_sequences" if dialect == ANTHROPIC else "stop"] = stops
        return fields

    def body(self, asked: Asked) -> dict[str, Any]:
        messages = asked.messages
        if asked.tools:
            self.models_with_tools.add(asked.fields["model"])
        if asked.previous is not None:
            system = messages[:1] if messages[0].role == "system" else []
            messages = [*system, *messages[-asked.new :]]
        fields = {**asked.fields, **({"n": asked.n} if asked.n > 1 else {})}
        wire = replace(asked.wire, signatures=self.signatures)
        _, body = write_request(asked.dialect, messages, asked.tools, wire, fields, stream=asked.stream)
        if asked.dialect == GOOGLE and wire.bare:
            return drop_result_ids(body)
        if asked.dialect == RESPONSES:
            body = make_native(body, asked.tools) if wire.native else body
            body |= {"previous_response_id": asked.previous} if asked.previous is not None else {}
        return body

    def path(self, asked: Asked) -> str:
        if asked.dialect == GOOGLE:
            method = "streamGenerateContent?alt=sse" if asked.stream else "generateContent"
            return f"/sessions/{self.session}/v1beta/models/{asked.fields.get('model', 'm')}:{method}"
        return f"/sessions/{self.session}/{PATHS[asked.dialect]}"

    def plan(self, output: Output | None = None, **how: Any) -> Plan:
        """Queues the next generation."""
        rng = self.rng
        plan = Plan(
            output=output or self.writer.output([tool.name for tool in self.tools]),
            per_event=rng.choice((1, 1, 2, 5)),
            **how,
        )
        plan.cumulative = rng.random() < 0.5
        if rng.random() < 0.15:
            plan.version = rng.choice(("default", "7", "step-8"))
        self.world.engine.plans[self.session].append(plan)
        return plan

    # Sending them.
    @property
    def log(self) -> list[Generation]:
        return self.world.engine.log[self.session]

    async def send(self, asked: Asked, **headers: str) -> Heard:
        self.world.requests += 1
        body = self.body(asked)
        self.note(f"POST {asked.dialect} key={asked.key} {json.dumps(body, ensure_ascii=False)}")
        heard = await self.world.gateway.post(self.path(asked), body, key=asked.key, headers=headers)
        self.hear(heard)
        return heard

    def hear(self, heard: Heard) -> None:
        self.note(
            f"  -> {heard.status} {short(heard.whole if heard.whole is not None else heard.events[-2:])} {heard.broken}"
        )
        if heard.status == 500 or (heard.status >= 400 and not isinstance(heard.whole, dict)):
            raise Violation("nothing answers 500", f"{heard.status} {short(heard.whole)}")
        for event in heard.events:
            if isinstance(event, dict) and '"internal"' in json.dumps(
                event.get("error") or event.get("response", {}).get("error") or ""
            ):
                raise Violation("nothing answers 500", f"in the stream: {short(event)}")

    async def ask(self, asked: Asked) -> list[Turn]:
        """A request to an engine that behaves: it must be answered, and everything about the answer is checked."""
        start = len(self.log)
        heard = await self.send(asked)
        return self.judged(asked, heard, join_parts(self.log[start:]))

    def judged(self, asked: Asked, heard: Heard, sampled: Sequence[Sampled]) -> list[Turn]:
        if heard.status != 200:
            raise Violation("a good request is answered", f"{heard.status} {short(heard.whole)}")
        whole = self.whole(asked, heard)
        answers = dialects.read_answers(asked.dialect, make_plain(asked.dialect, whole))
        if len(answers) != asked.n or len(sampled) != asked.n:
            raise Violation("n answers to n", f"asked {asked.n}, {len(answers)} answers, {len(sampled)} generations")
        self.signatures |= dialects.read_signatures(asked.dialect, whole)
        sampled = sorted(sampled, key=lambda one: one.parts[0].asked.seed or 0)  # choice i is sampled with seed + i
        continued = [self.judge_prompt(asked, one) for one in sampled]
        made = [self._turn(asked, *each, whole) for each in zip(answers, sampled, continued, strict=True)]
        for answer, one in zip(answers, sampled, strict=True):
            self.world.judge.answer(answer.message, one)
        self.turns += [
            turn for turn in made if "Infinity" not in "".join(call.arguments for call in turn.path[-1].calls)
        ]
        return made

    def judge_prompt(self, asked: Asked, one: Sampled) -> Turn | None:
        """The turn that was continued. Custom tools' calls are known to have been sent as such: what they lost is in
        the record."""
        by_name = {tool.name: tool for tool in asked.tools if asked.dialect == RESPONSES and asked.wire.native}
        sent = [
            replace(
                message,
                calls=tuple(replace(call, custom=custom_input(call, by_name) is not None) for call in message.calls),
            )
            for message in asked.messages
        ]
        return self.world.judge.prompt(one.prompt, sent, asked.tools, self.turns)

    def _served(self, asked: Asked, message: Message, one: Sampled) -> Message:
        """With the calls marked of which a custom tool's input may not be all that the model wrote."""
        output = one.parts[0].plan.output
        is_sound = output.expected is not None and one.ids == output.ids
        custom = {tool.name for tool in asked.tools if tool.custom and asked.dialect == RESPONSES and asked.wire.native}
        return replace(
            message, calls=tuple(replace(call, partial=not is_sound and call.name in custom) for call in message.calls)
        )

    def whole(self, asked: Asked, heard: Heard) -> dict[str, Any]:
        if heard.whole is not None:
            return heard.whole
        try:
            return assemble_strictly(asked.dialect, heard.events)
        except Unsound as error:
            raise Violation("a stream is sound", str(error)) from None
        except Broken as error:
            raise Violation("a good request is answered", f"the stream broke: {error} {heard.broken}") from None

    def _turn(
        self, asked: Asked, answer: dialects.Answer, one: Sampled, continued: Turn | None, whole: dict[str, Any]
    ) -> Turn:
        return Turn(
            path=(*self._path(asked, continued), self._served(asked, answer.message, one)),
            tools=asked.tools,
            full=one.full,
            node=read_node(asked.dialect, whole),
            dialect=asked.dialect,
            response_id=whole["id"] if asked.dialect == RESPONSES else "",
            asked=asked,
            output=one.parts[0].plan.output,
        )

    def _path(self, asked: Asked, continued: Turn | None) -> tuple[Message, ...]:
        known = () if continued is None else continued.path
        others = [
            turn
            for turn in self.turns
            if turn.tools != asked.tools
            and len(turn.path) > len(known)
            and fit(turn.path, asked.messages)[0] is Fit.YES
        ]
        origin = max(others, key=lambda turn: len(turn.path), default=None)
        rivals = [
            turn
            for turn in others
            if origin is not None and len(turn.path) == len(origin.path) and turn.path != origin.path
        ]
        if origin is not None and not rivals:  # the tools changed: the conversation is the same
            between = rename(known, origin.path, origin.path[len(known) :], served=True)
            path = (*known, *between)
            return (*path, *rename(path, asked.messages, asked.messages[len(path) :]))
        return (*known, *rename(known, asked.messages, asked.messages[len(known) :]))

    async def compare_with_whole(self, asked: Asked, heard: Heard) -> None:
        """The same request under its key, sent the other way: the recorded answer, as the same objects."""
        if asked.key is None or heard.status != 200:
            return
        start = len(self.log)
        other = replace(asked, stream=not asked.stream)
        again = await self.send(other)
        if again.status != 200:
            raise Violation("a keyed retry is answered", f"{again.status} {short(again.whole)}")
        if len(self.log) != start:
            raise Violation("a keyed retry adds nothing", "the engine was asked again")
        first, second = self.whole(asked, heard), self.whole(other, again)
        one, two = comparable(asked.dialect, first), comparable(asked.dialect, second)
        if one != two:
            raise Violation(
                "a streamed answer is the whole answer",
                f"\n  {'streamed' if asked.stream else 'whole'}: {one}\n  the other: {two}",
            )

    def note(self, line: str) -> None:
        self.transcript.append(line)

    async def wait_in_flight(self, count: int) -> None:
        """Returns when the gateway has this many requests of the session in flight."""
        for _ in range(400):
            _, shown = await self.world.gateway.admin("GET", f"/sessions/{self.session}")
            if shown["in_flight"] >= count:
                return
            await asyncio.sleep(0.01)
        raise Violation("a request is admitted", f"{shown['in_flight']} in flight, {count} were sent")

    # The end.
    async def settle(self) -> dict[str, Any]:
        """The session as the gateway shows it, when nothing is in flight any more."""
        for _ in range(400):
            status, shown = await self.world.gateway.admin("GET", f"/sessions/{self.session}")
            if status != 200:
                raise Violation("a session stays readable", f"GET session: {status} {short(shown)}")
            if not shown.get("in_flight"):
                return shown
            await asyncio.sleep(0.05)
        raise Violation("a generation ends", f"still in flight: {shown['in_flight']}")

    def unsure(self) -> set[int]:
        """Generations of which any part may be in the record."""
        return {id(generation) for generation in (*self.uncertain, *(one for one in self.log if one.doubtful))}

    def tokens_of(self, generation: Generation, texts: Sequence[str]) -> int:
        """The fewest tokens that say all of these texts, which a client was sent."""
        pieces = [text.rstrip("\ufffd").strip() for text in texts]  # half a character may have been flushed at the end
        for count in range(generation.delivered + 1):
            text = self.world.vocabulary.text(generation.sampled[:count])
            if all(piece in text for piece in pieces):
                return count
        return generation.delivered

    async def check_record(self) -> None:
        shown = await self.settle()
        status, answer = await self.world.gateway.admin("GET", f"/sessions/{self.session}/samples")
        if status != 200:
            raise Violation("a session stays readable", f"GET samples: {status} {short(answer)}")
        samples, coverage = answer["samples"], answer["coverage"]
        self.world.judge.samples(samples, self.log)
        uncertain = self.unsure()
        most = sum(generation.delivered for generation in self.log)
        least = sum(generation.delivered for generation in self.log if id(generation) not in uncertain)
        least += sum(self.tokens_of(generation, texts) for generation, texts in self.heard_partly)
        self.world.judge.coverage(coverage, samples, least, most)
        if shown["coverage"] != coverage:
            raise Violation(
                "one coverage", f"the session says {short(shown['coverage'])}, its samples say {short(coverage)}"
            )
        newest = {turn.node for turn in self.turns[-1:] if turn.asked.n == 1}
        for item in coverage["untrained"]:
            asked = self.must_train.get(item["node"])
            if item["node"] in newest:
                raise Violation("the last turn is trained", f"{item}")
            if asked is not None and not (item["why"] == "side_request" and self.may_be_beside(asked)):
                raise Violation("what was not asked again is trained", f"{item} though this request was sent once")

    def may_be_beside(self, asked: Asked) -> bool:
        """One turn without tools, under a model name that no turn with tools has."""
        return not asked.tools and bool(self.models_with_tools) and asked.fields["model"] not in self.models_with_tools


def rename(
    path: Sequence[Message], sent: Sequence[Message], tail: Sequence[Message], *, served: bool = False
) -> list[Message]:
    """Tool results that answer calls under new ids, with the ids of the record. `served`: what was served stays so."""
    names: dict[str, str] = {}
    for was, now in zip(path, sent, strict=False):
        names |= {new.id: old.id for old, new in zip(was.calls, now.calls, strict=False)}
    return [
        replace(message, answers=names.get(message.answers, message.answers), served=served and message.served)
        for message in tail
    ]


def next_messages(case: Case) -> list[Message]:
    turn = case.pick()
    return case.opening() if turn is None else case.after(turn)


async def all_of(tasks: Sequence[asyncio.Future[Heard]]) -> list[Heard]:
    """All are awaited before the first violation is raised."""
    await asyncio.wait(tasks)
    return [task.result() for task in tasks]


async def until(condition: Callable[[], bool]) -> None:
    """For what must come sooner or later; a case that waits for ever is ended by its runner."""
    while not condition():
        await asyncio.sleep(0.002)
