"""Steps about histories: system prompts that change and come back, chains of response ids, tool sets, sub-agents and
summaries."""

from __future__ import annotations

from dataclasses import replace

from tests.fuzz.case import Case, next_messages
from tests.fuzz.harness import TOOLS
from tests.fuzz.native import Wire
from tests.fuzz.oracle import Turn, Violation
from tokentrue.conformance.agents.dialects import CHAT, RESPONSES
from tokentrue.conformance.agents.messages import Message


def with_system(messages: list[Message], text: str | None) -> list[Message]:
    rest = messages[1:] if messages[0].role == "system" else messages
    return rest if text is None else [Message(role="system", text=text), *rest]


async def change_system(case: Case) -> None:
    """Another system prompt, or none, and back: a fork, and then the conversation of before."""
    messages = next_messages(case)
    turn = case.turns[-1] if case.turns else None
    text = case.some_text() if messages[0].role != "system" or case.rng.random() < 0.5 else None
    case.plan()
    await case.ask(case.request(with_system(messages, text), lossy=case.rng.random() < 0.5))
    if turn is not None:
        case.plan()
        await case.ask(case.request(case.after(turn), lossy=case.rng.random() < 0.5))


async def chain_responses(case: Case) -> None:
    """Responses by id, one after the other and from an older one, with the same instructions, others, or none."""
    turns = [turn for turn in case.turns if turn.response_id]
    turn: Turn | None = case.rng.choice(turns[-3:]) if turns and case.rng.random() < 0.7 else None
    for _ in range(case.rng.randint(2, 4)):
        if turn is None:
            asked = replace(case.request(case.opening(), lossy=False), dialect=RESPONSES, fields={"model": "m"})
        else:
            messages = case.after(turn)
            new = len(messages) - len(turn.path)
            if case.rng.random() < 0.3:
                messages = with_system(messages, case.rng.choice((None, case.some_text())))
            asked = replace(
                case.request(messages, lossy=False), dialect=RESPONSES, fields={"model": "m"}, messages=messages
            )
            asked.previous, asked.new, asked.tools = turn.response_id, new, turn.tools
        case.plan()
        made = await case.ask(asked)
        if made[0] not in case.turns:
            return
        turn = made[0] if case.rng.random() < 0.8 else turn or made[0]


async def change_tools(case: Case) -> None:
    """Other tools, the same in another order, or none."""
    tools = list(TOOLS)
    case.rng.shuffle(tools)
    before = case.tools
    case.tools = tuple(case.rng.choice((tools[:2], tools[:4], list(reversed(before)), [])))
    case.plan()
    await case.ask(case.request(next_messages(case)))
    if case.rng.random() < 0.5:
        case.tools = before
        case.plan()
        await case.ask(case.request(next_messages(case)))


async def alternate_tools(case: Case) -> None:
    """Plan and act: two tool sets, sometimes two system prompts as well, turn by turn. Each return continues the turn
    that was last sampled under the same ones, so that the rows to train on are as many as there are kinds of turn."""
    tools = list(TOOLS)
    case.rng.shuffle(tools)
    kinds = [(tuple(tools[:2]), None), (tuple(tools[: case.rng.randint(3, 5)]), None)]
    if case.rng.random() < 0.3:
        kinds = [(own, case.some_text()) for own, _ in kinds]
        if case.rng.random() < 0.5:  # the same tools throughout
            kinds = [(kinds[0][0], text) for _, text in kinds]
    before, messages = case.tools, case.opening()
    newest: dict[int, Turn] = {}
    for number in range(case.rng.randint(3, 7)):
        kind = number % 2
        case.tools, system = kinds[kind]
        case.plan()
        asked = case.request(messages)
        if system is not None:  # what the first request under a system prompt says is given: the client keeps to it
            verbatim = with_system(messages, system)
            asked = replace(asked, messages=verbatim, dialect=CHAT, wire=Wire(), fields={"model": "m"})
        (made,) = await case.ask(asked)
        prompt = case.log[-1].prompt
        before_it = newest[kind].full if kind in newest else ()
        is_stopped = before_it[-1:] == (case.world.vocabulary.stop,)  # a turn that was cut off may need a new root
        if is_stopped and prompt[: len(before_it)] != before_it:
            raise Violation(
                "a return to recorded tools rejoins their branch",
                f"turn {newest[kind].node} is no prefix of the prompt",
            )
        if made not in case.turns:
            break
        newest[kind] = made
        messages = case.after(made)
        if any(call.partial for message in messages for call in message.calls):  # another dialect may not know it again
            break
    case.tools = before


async def start_anew(case: Case) -> None:
    """A sub-agent, or a summary in place of the history."""
    messages = case.opening()
    if case.turns and case.rng.random() < 0.5:
        first = case.turns[0].path
        messages = [
            *first[: 1 + (first[0].role == "system")],
            Message(role="user", text="Summary: " + case.some_text()),
        ]
    case.plan()
    await case.ask(case.request(messages))
