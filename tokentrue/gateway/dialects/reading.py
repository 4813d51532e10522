"""Builds a request's conversation from the items of its dialect."""

from __future__ import annotations

from collections import Counter

from msgspec import Raw

from tokentrue.conversation import Conversation, Conversations, own_source
from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import DecodedBody, Dialect, parse_json
from tokentrue.types import Message, Messages


def read_conversation(
    dialect: Dialect, decoded: DecodedBody, earlier: Conversations, *, history: Messages = ()
) -> Conversation:
    """`history` precedes the items: a separate system prompt, or an earlier reply's conversation. An assistant turn of
    several items is shared with an earlier request only if all of them are equal.
    """
    base = earlier.find(dialect.name, [*map(own_source, history), *decoded.items])
    messages, known = list(base), len(base.sources)
    sources, ends, turn = list[Raw](), list[int | None](), list[Message]()  # consecutive assistant items of one turn
    for message in history[known:]:
        messages.append(message)
        sources.append(own_source(message))
        ends.append(len(messages))
    is_settled = True
    for index, item in enumerate(decoded.items[max(0, known - len(history)) :], max(0, known - len(history))):
        raw, path = bytes(item), f"{dialect.items_key}[{index}]"
        value = parse_json(raw, path)
        parsed = dialect.parse_item(value, path)
        is_settled = is_settled and dialect.is_settled(value)
        first = len(messages)
        for message in parsed:
            is_part = dialect.splits_turns and message["role"] == "assistant"
            if turn and not (is_part and dialect.continues_turn(turn, message)):
                messages.append(dialect.join_turn(turn))
                turn = []
            (turn if is_part else messages).append(message)
        pair_results(messages, first)
        sources.append(Raw(raw))  # a copy: `item` holds the whole body
        ends.append(len(messages) if is_settled and not turn else None)
    if turn:
        messages.append(dialect.join_turn(turn))
    if dialect.refuses_prefill and len(messages) > len(history) and messages[-1]["role"] == "assistant":
        said = "the last one is the model's: prefilled answers are not supported; end with the user's"
        raise MessageError(said, field=dialect.items_key)
    return earlier.add(base, messages[len(base) :], sources=sources, ends=ends, tools=decoded.head.tools)


def pair_results(messages: list[Message], first: int) -> None:
    """A result without a call id (Google) gets that of its function's first unanswered call in the turn before."""
    for index in range(first, len(messages)):
        if messages[index]["role"] != "tool" or "tool_call_id" in messages[index]:
            continue
        turn = next((place for place in range(index, -1, -1) if messages[place]["role"] == "assistant"), 0)
        answered = Counter(message["tool_call_id"] for message in messages[turn:] if "tool_call_id" in message)
        result = dict(messages[index])
        name = result.pop("name")
        found = f"{name}#{answered.total()}"  # no unanswered call is left
        for call in messages[turn].get("tool_calls", ()):
            if answered[call["id"]]:
                answered[call["id"]] -= 1
            elif call["function"]["name"] == name:
                found = call["id"]
                break
        messages[index] = {"role": "tool", "tool_call_id": found, **result}
