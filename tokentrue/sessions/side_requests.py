"""Finds side requests: what a harness asks beside the task (a title, a guess of the next message), which must not be
trained with the task's reward.

`RULES` (side_requests.toml) name what known harnesses ask. `other_model` holds for any: one turn without tools, under a
model name that no turn with tools has; not if the task may need the answer: it was given to another conversation, it
began after every turn with tools was over, it repeats what a conversation with tools was asked, or a loaded adapter
sampled it."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from tokentrue.conversation.match_keys import count_system, read_role, text_of
from tokentrue.json_types import read_table
from tokentrue.plain_json import digest
from tokentrue.sessions.tree import Node, ServedRef, Tree
from tokentrue.types import Message

SIDE_REQUEST = "side_request"  # the reason in coverage
OTHER_MODEL = "other_model"
SHORTEST_PIECE = 16  # letters and digits: shorter pieces of an answer occur elsewhere by chance
_NOT_LETTERS = re.compile(r"\\[nrt]|[\W_]+")  # what quoting, escaping and wrapping change


@dataclass(frozen=True, slots=True)
class SideRule:
    name: str
    where: Literal["system", "last"]
    opening: str


RULES = msgspec.convert(read_table(__file__, "side_requests.toml")["rule"], list[SideRule])


def find_side_requests(tree: Tree) -> dict[str, str]:
    found = {node.id: rule for node in tree.nodes.values() if (rule := _find_named(tree, node)) is not None}
    task = [node for node in tree.nodes.values() if node.id not in found]
    return {**found, **dict.fromkeys(_find_other_model(tree, task), OTHER_MODEL)} if task else {}


def _find_named(tree: Tree, node: Node) -> str | None:
    if tree.followers.get(node.id):
        return None
    if _is_one_turn(tree, node) and not node.tools:
        system = "\n".join(map(_text, node.given[: _count_system(node)]))
        lines = tuple(line.strip() for line in system.splitlines())
        return _find_rule("system", lines)
    last = node.given[-1] if node.given else None
    has_earlier_turns = node.parent is not None or any(_role(item) == "assistant" for item in node.given)
    if last is None or _role(last) != "user" or not has_earlier_turns:
        return None
    return _find_rule("last", [_text(last)])


def _find_rule(where: str, texts: Sequence[str]) -> str | None:
    fits = (rule for rule in RULES if rule.where == where and any(text.startswith(rule.opening) for text in texts))
    return next((rule.name for rule in fits), None)


def _find_other_model(tree: Tree, task: Sequence[Node]) -> list[str]:
    with_tools = [node for node in task if node.tools]
    models = {node.model for node in with_tools}
    if not with_tools or None in models:  # None: recorded by an older release
        return []
    newest = max(node.seq for node in with_tools)
    asked = {_asked(node) for node in with_tools if node.parent is None}
    candidates = [
        node
        for node in task
        if not node.tools
        and node.model not in {None, *models}
        and _is_one_turn(tree, node)
        and node.started <= newest
        and "adapter" not in node.sampling.extra
        and _asked(node) not in asked
    ]
    return _drop_used(tree, candidates) if candidates else []


def _drop_used(tree: Tree, candidates: Collection[Node]) -> list[str]:
    """Without those of whose answer a message contains a piece that was first given later."""
    seen, ends, texts, length = set[bytes](), dict[int, int](), list[str](), 0
    for node in tree.in_order():
        for item in node.given:
            if not isinstance(item, ServedRef) and (name := digest(item)) not in seen:
                seen.add(name)
                text = "\n".join(map(_letters, _texts(item)))
                texts.append(text)
                length += len(text) + 1
        ends[node.seq] = length
    given = "\n".join(texts)
    return [
        node.id
        for node in candidates
        if not any(given.find(piece, ends[node.seq]) >= 0 for piece in _pieces(_texts(node.served)))
    ]


def _is_one_turn(tree: Tree, node: Node) -> bool:
    return node.parent is None and node.origin is None and not tree.followers.get(node.id)


def _role(item: Message | ServedRef) -> str:
    return "assistant" if isinstance(item, ServedRef) else read_role(item)


def _text(item: Message | ServedRef) -> str:
    return "" if isinstance(item, ServedRef) else text_of(item.get("content"))


def _count_system(root: Node) -> int:
    return count_system(map(_role, root.given))


def _asked(root: Node) -> bytes:
    items = root.given[_count_system(root) :]
    return digest([{"served": item.node} if isinstance(item, ServedRef) else item for item in items])


def _texts(message: Message) -> list[str]:
    calls = message.get("tool_calls") or ()
    return [text_of(message.get("content")), *(str(call["function"]["arguments"]) for call in calls)]


def _pieces(texts: Iterable[str]) -> list[str]:
    """What a harness may pass on: lines and quoted strings. A short answer counts only as a whole."""
    pieces = [_letters(piece) for text in texts for piece in re.split(r'\n|"|\\n', text)]
    whole = "".join(pieces)
    return [piece for piece in pieces if len(piece) >= SHORTEST_PIECE] or ([whole] if whole else [])


def _letters(text: str) -> str:
    return _NOT_LETTERS.sub("", text)
