"""The coverage table: 20 turns of 100 sampled tokens on the real Qwen3 tokenizer, one row per behaviour of a harness.

`python -m tests.turn.coverage_table` prints it as it stands in docs/coverage.md.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokentrue as tt
from tests.turn.world import OPENING, OTHER_TOOLS, TOOLS, Engine, agent, answer_to, encode, renderer, sampled_turn
from tokentrue.sessions import Journal
from tokentrue.types import Coverage, Message, TurnRequest

TURNS = 20


@dataclass(frozen=True)
class Row:
    """What one harness left behind."""

    behaviour: str
    session: Any
    coverage: Coverage
    samples: list[Any]

    @property
    def cells(self) -> list[str]:
        cover = self.coverage
        left_out = Counter(item.why for item in cover.untrained for _ in range(item.tokens))
        edges = Counter(
            node.edge_reason for node in self.session.tree.nodes.values() if node.edge_reason not in (None, "first")
        )
        return [
            self.behaviour,
            str(cover.sampled),
            str(cover.trained),
            f"{cover.ratio:.1%}",
            str(len(self.samples)),
            ", ".join(f"{count} {why}" for why, count in sorted(left_out.items())) or "–",
            ", ".join(f"{why} ×{count}" for why, count in sorted(edges.items())) or "–",
        ]


COLUMNS = ["the harness …", "sampled", "trained", "coverage", "samples", "not trained, and why", "edges"]


# Replays: what comes back of a served message.
def verbatim(message: Message, turn: int) -> Message:
    return message


def reasoning_dropped(message: Message, turn: int) -> Message:
    return {k: v for k, v in message.items() if k != "reasoning_content"}


def reasoning_inlined(message: Message, turn: int) -> Message:
    return {
        **reasoning_dropped(message, turn),
        "content": f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}",
    }


def ids_rewritten(message: Message, turn: int) -> Message:
    calls = [{**call, "id": f"toolu_{turn}_{i}"} for i, call in enumerate(message.get("tool_calls", ()))]
    return {**message, **({"tool_calls": calls} if calls else {})}


def arguments_respelled(message: Message, turn: int) -> Message:
    def respell(text: str) -> str:
        value = json.loads(text)
        if not value:
            return ""
        value["line"], value["big"] = 1, 1000
        return json.dumps(dict(sorted(value.items())), separators=(",", ":"), ensure_ascii=False)

    calls = [
        {**c, "function": {**c["function"], "arguments": respell(c["function"]["arguments"])}}
        for c in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def as_parts(message: Message, turn: int) -> Message:
    return {
        **message,
        "content": [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}],
    }


def empty_content(message: Message, turn: int) -> Message:
    assert not message["content"]
    return [
        {**message, "content": ""},
        {**message, "content": None},
        {k: v for k, v in message.items() if k != "content"},
    ][turn % 3]


def whitespace(message: Message, turn: int) -> Message:
    return {
        **message,
        "content": f"\n{message['content'].strip()}  \n",
        "reasoning_content": message["reasoning_content"].strip() + "\n",
    }


def extra_fields(message: Message, turn: int) -> Message:
    return {
        **message,
        "refusal": None,
        "annotations": [{"x": 1}],
        "provider_specific_fields": {"a": turn},
        "audio": None,
    }


def several(message: Message, turn: int) -> Message:
    return extra_fields(as_parts(whitespace(ids_rewritten(arguments_respelled(reasoning_inlined({**message}, turn) | {
        "reasoning_content": message["reasoning_content"]}, turn), turn), turn), turn), turn)  # fmt: skip


def other_dialect(message: Message, turn: int) -> Message:
    """As an Anthropic client replays it: blocks, arguments as an object, its own ids, thinking on odd turns only."""
    blocks: list[Any] = (
        [{"type": "thinking", "thinking": message["reasoning_content"], "signature": "x"}] if turn % 2 else []
    )
    calls = ids_rewritten(message, turn).get("tool_calls", ())
    spelled = [{**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}} for c in calls]
    content = [*blocks, {"type": "text", "text": message["content"]}]
    return {"role": "assistant", "content": content, **({"tool_calls": spelled} if spelled else {})}


def answers(count: int = TURNS, **options: Any) -> list[tuple[int, ...]]:
    return [sampled_turn(turn, **options) for turn in range(count)]


def new_session(ids: list[tuple[int, ...]], **options: Any) -> tuple[Any, Engine]:
    engine = Engine(ids)
    return tt.Session(renderer=renderer(), provider=engine, **options), engine


async def replaying(replay: Any, ids: list[tuple[int, ...]] | None = None) -> Any:
    session, _ = new_session(ids or answers())
    await agent(session, replay, turns=TURNS)
    return session


def silent_turn(turn: int) -> tuple[int, ...]:
    """A call without a word: its content is empty."""
    text = f'<think>\n{turn}\n</think>\n\n<tool_call>\n{{"name": "look", "arguments": {{}}}}\n</tool_call>'
    ids, filler = encode(text), encode(" so")[0]
    at = ids.index(encode("</think>")[0]) - 1
    ids[at:at] = [filler] * (99 - len(ids))
    return (*ids, renderer().stop_token_ids[0])


# Behaviours.
async def retried(place: int, *, depth: int = 0) -> Any:
    """At turn `place` the agent throws away the last `depth` turns and the answer after them, and asks that turn
    again."""
    session, _ = new_session(answers(TURNS + depth + 1))
    history, turn, again = [list(OPENING)], 0, False
    while turn < TURNS:
        reply = await session.chat(history[turn], TOOLS)
        if turn == place and not again:
            again = True
            turn -= depth
            del history[turn + 1 :]
            continue
        history.append([*history[turn], reply.message, *answer_to(reply.message, turn)])
        turn += 1
    return session


async def twice_in_flight() -> Any:
    session, _ = new_session(answers())
    history = list(OPENING)
    for turn in range(TURNS):
        first, second = await asyncio.gather(session.chat(history, TOOLS), session.chat(list(history), TOOLS))
        assert first.node == second.node and second.from_record
        history = [*history, first.message, *answer_to(first.message, turn)]
    return session


async def parallel() -> Any:
    """Ten turns, then five requests at once on the same prefix with different questions, each going on for two
    turns."""
    session, _ = new_session(answers(TURNS))
    history = list(OPENING)
    for turn in range(10):
        reply = await session.chat(history, TOOLS)
        history = [*history, reply.message, *answer_to(reply.message, turn)]

    async def explore(number: int) -> None:
        mine = [*history, {"role": "user", "content": f"idea {number}"}]
        for turn in range(2):
            reply = await session.chat(mine, TOOLS)
            mine = [*mine, reply.message, *answer_to(reply.message, turn)]

    await asyncio.gather(*(explore(number) for number in range(5)))
    return session


async def best_of_n() -> Any:
    session, _ = new_session([sampled_turn(turn, tag=f"{i} ") for turn in range(TURNS) for i in range(4)])
    history = list(OPENING)
    for turn in range(TURNS):
        replies = await session.turn(TurnRequest(messages=history, tools=TOOLS, n=4))
        chosen = replies[turn % 4]
        history = [*history, reasoning_dropped(chosen.message, turn), *answer_to(chosen.message, turn)]
    return session


async def sub_agents() -> Any:
    """Four times: three turns of the main agent, then a sub-agent with its own opening for two."""
    session, _ = new_session(answers())
    history = list(OPENING)
    for block in range(4):
        for turn in range(3):
            reply = await session.chat(history, TOOLS)
            history = [*history, reply.message, *answer_to(reply.message, turn)]
        opening: list[Message] = [
            {"role": "system", "content": "You search."},
            {"role": "user", "content": f"find {block}"},
        ]
        await agent(session, verbatim, turns=2, messages=opening)
    return session


async def compaction() -> Any:
    session, _ = new_session(answers())
    await agent(session, verbatim, turns=12)
    summary: Message = {"role": "user", "content": "Summary of the work so far: the tests fail in module 3."}
    await agent(session, verbatim, turns=8, messages=[OPENING[0], summary])
    return session


async def reminders() -> Any:
    """Before turn 10 the harness writes a reminder into an old tool result (an edit of what the model saw)."""
    session, _ = new_session(answers())
    history = list(OPENING)
    for turn in range(TURNS):
        if turn == 10:
            edited = {
                **history[7],
                "content": str(history[7]["content"]) + "<system-reminder>Use the tool.</system-reminder>",
            }
            history = [*history[:7], edited, *history[8:]]
        reply = await session.chat(history, TOOLS)
        history = [*history, reply.message, *answer_to(reply.message, turn)]
    return session


async def clock(pin: tuple[str, ...] = ()) -> Any:
    """The system prompt of every turn tells another time."""
    session, _ = new_session(answers(), pin=pin)
    history = list(OPENING)
    for turn in range(TURNS):
        told: Message = {"role": "system", "content": f"Be careful. It is 10:{turn:02} now."}
        reply = await session.chat([told, *history[1:]], TOOLS)
        history = [*history, reasoning_dropped(reply.message, turn), *answer_to(reply.message, turn)]
    return session


async def tools_change() -> Any:
    session, _ = new_session(answers())
    history = list(OPENING)
    for turn in range(TURNS):
        reply = await session.chat(history, TOOLS if turn < 10 else OTHER_TOOLS)
        history = [*history, reasoning_dropped(reply.message, turn), *answer_to(reply.message, turn)]
    return session


async def alternating(tools: Sequence[Any], systems: Sequence[str] = ("Be careful.",), replay: Any = None) -> Any:
    """Turn `i` is asked under `tools[i]` and `systems[i]`, counted round."""
    session, _ = new_session(answers())
    history = list(OPENING)
    for turn in range(TURNS):
        system: Message = {"role": "system", "content": systems[turn % len(systems)]}
        reply = await session.chat([system, *history[1:]], tools[turn % len(tools)])
        replayed = (replay or reasoning_dropped)(reply.message, turn)
        history = [*history, replayed, *answer_to(replayed, turn)]
    return session


async def disconnects() -> Any:
    """At turn 10 the client hangs up after 40 tokens and asks again."""
    session, _ = new_session(answers(TURNS + 1))
    history = list(OPENING)
    for turn in range(TURNS):
        if turn == 10:
            events = session.stream(TurnRequest(messages=history, tools=TOOLS))
            heard = 0
            async for event in events:
                heard += len(event.token_ids)
                if heard == 40:
                    break
            await events.aclose()
        reply = await session.chat(history, TOOLS)
        history = [*history, reply.message, *answer_to(reply.message, turn)]
    return session


async def restart() -> Any:
    """After every fifth turn the process ends; the client comes back with its history."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:{Path(folder) / 'journal.db'}"
        engine = Engine(answers())
        journal = Journal(store)
        session = tt.Session(renderer=renderer(), provider=engine, journal=journal)
        history = list(OPENING)
        for turn in range(TURNS):
            if turn and turn % 5 == 0:
                journal.close()
                journal = Journal(store)
                session = await tt.Session.open(journal, session.id, renderer=renderer(), provider=engine)
            reply = await session.chat(history, TOOLS)
            history = [*history, reasoning_dropped(reply.message, turn), *answer_to(reply.message, turn)]
        journal.close()
        return session


async def cut_off() -> Any:
    """Every fifth turn hits the token limit; the conversation goes on behind it."""
    session, _ = new_session([sampled_turn(turn, tokens=200 if turn % 5 == 4 else 100) for turn in range(TURNS)])
    history = list(OPENING)
    for turn in range(TURNS):
        reply = await session.chat(history, TOOLS, sampling=tt.Sampling(max_tokens=100))
        history = [*history, reply.message, *answer_to(reply.message, turn)]
    return session


async def engine_fails() -> Any:
    session, engine = new_session(answers())
    history = list(OPENING)
    for turn in range(TURNS):
        if turn == 10:
            engine.fail = RuntimeError("the engine went away")
            with suppress(RuntimeError):
                await session.chat(history, TOOLS)
            engine.fail = None
        reply = await session.chat(history, TOOLS)
        history = [*history, reply.message, *answer_to(reply.message, turn)]
    return session


PROJECTIONS: dict[str, Callable[[], Awaitable[Any]]] = {
    "replays verbatim": lambda: replaying(verbatim),
    "drops the reasoning": lambda: replaying(reasoning_dropped),
    "inlines the reasoning as `<think>`": lambda: replaying(reasoning_inlined),
    "rewrites tool-call ids": lambda: replaying(ids_rewritten),
    "re-serialises arguments (order, spaces, escapes, numbers, `{}` → empty)": lambda: replaying(arguments_respelled),
    "sends content as parts": lambda: replaying(as_parts),
    "null, empty or missing content": lambda: replaying(empty_content, [silent_turn(turn) for turn in range(TURNS)]),
    "changes outer whitespace": lambda: replaying(whitespace),
    "adds unknown fields": lambda: replaying(extra_fields),
    "does six of these at once": lambda: replaying(several),
    "replays in another dialect (Anthropic blocks)": lambda: replaying(other_dialect),
}
BEHAVIOURS: dict[str, Callable[[], Awaitable[Any]]] = {
    "retries the last turn": lambda: retried(19),
    "retries a turn in the middle": lambda: retried(10),
    "goes back three turns and asks again": lambda: retried(10, depth=3),
    "retries the first turn": lambda: retried(0),
    "sends every request twice, in flight": twice_in_flight,
    "runs five requests on one prefix at once": parallel,
    "asks for n = 4 and continues one": best_of_n,
    "runs sub-agents in the session": sub_agents,
    "compacts its history to a summary": compaction,
    "writes a reminder into an old message": reminders,
    "changes its tools": tools_change,
    "changes its tools for 7 turns, then back": lambda: alternating([TOOLS] * 7 + [OTHER_TOOLS] * 7 + [TOOLS] * 6),
    "has other tools at every turn (plan and act)": lambda: alternating([TOOLS, OTHER_TOOLS]),
    "has another system prompt at every turn": lambda: alternating([TOOLS], ["Plan.", "Act."]),
    "has both at every turn": lambda: alternating([TOOLS, OTHER_TOOLS], ["Plan.", "Act."]),
    "puts a clock into its system prompt": clock,
    'the same, pinned (`pin = ["system"]`)': lambda: clock(("system",)),
    "hangs up in mid-stream, then asks again": disconnects,
    "comes back after the gateway restarted": restart,
    "is cut off by max_tokens every fifth turn": cut_off,
    "meets an engine failure, then asks again": engine_fails,
}


async def row(name: str) -> Row:
    session = await (PROJECTIONS | BEHAVIOURS)[name]()
    return Row(behaviour=name, session=session, coverage=session.coverage(), samples=session.samples())


def table() -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(asyncio.run(row(name)).cells) + " |" for name in (*PROJECTIONS, *BEHAVIOURS)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
