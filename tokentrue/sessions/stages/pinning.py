"""Pinned prompts: a conversation keeps its first system prompt, whatever the agent sends later (a clock, a list of
files). A request that continues a recorded turn is read as if it began with that turn's system prompt. The tools and
all messages after it decide what is continued; only the record decides."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter

from tokentrue.conversation import Conversation, ConversationMessage
from tokentrue.conversation.match_keys import count_system, find_changes, message_key, read_role
from tokentrue.errors import ConfigError
from tokentrue.plain_json import digest
from tokentrue.records import record
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Message, Messages


@record
class PinnedRequest:
    """`conversation`: what the model gets; `replaced`: the client's prompt, if it differs."""

    conversation: Conversation
    prompt: tuple[Message, ...] = ()
    replaced: tuple[Message, ...] = ()


class PinnedPrompts:
    def __init__(self, pin: Sequence[str], tree: Tree) -> None:
        self._is_on = "system" in pin
        self._tree = tree
        self._roots: dict[bytes, list[Node]] = defaultdict(list)  # by tools and first message
        for node in tree.in_order():
            self.add(node)

    def add(self, node: Node) -> None:
        if not self._is_on or node.parent is not None:
            return
        messages = self._tree.given_messages(node)
        length = _count_prompt(messages)
        if 0 < length < len(messages):
            self._roots[_root_key(messages[length], digest(node.tools))].append(node)

    def apply(self, conversation: Conversation, *, retried: tuple[Message, ...] = ()) -> PinnedRequest:
        length = count_system(read.role for read in conversation.facts) if self._is_on else 0
        if not 0 < length < len(conversation):
            return PinnedRequest(conversation=conversation)
        sent = tuple(conversation[:length])
        prompt = retried or self._find_prompt(sent, conversation)
        pinned = conversation.replace_first(length, prompt)
        return PinnedRequest(conversation=pinned, prompt=prompt, replaced=() if pinned is conversation else sent)

    def prompt(self, node: Node) -> tuple[Message, ...]:
        messages = self._tree.given_messages(self._tree.path(node)[0])
        return tuple(messages[: _count_prompt(messages)])

    def _find_prompt(self, sent: tuple[Message, ...], conversation: Conversation) -> tuple[Message, ...]:
        """Of the conversation that the messages after `sent` continue; else `sent`."""
        # Of several continued equally far, the one that was sent this very prompt. Any other would be a guess, and a
        # new conversation is better than the wrong one.
        rest = conversation.facts[len(sent) :]
        roots = self._roots.get(_root_key(rest[0].message, conversation.tools_digest), ())
        found = {root.id: self.prompt(root) for root in roots if self._end_of_replay(root, rest, 0)}
        if _has_several(found.values()):
            ends = {name: self._find_deepest(self._tree.nodes[name], rest) for name in found}
            furthest = max(end for _, end in ends.values())
            found = {name: prompt for name, prompt in found.items() if ends[name][1] == furthest}
            known = {name: found[name] for name in found if sent in (found[name], ends[name][0].replaced)}
            found = known or found
        return sent if not found or _has_several(found.values()) else next(iter(found.values()))

    def _find_deepest(self, root: Node, rest: Sequence[ConversationMessage]) -> tuple[Node, int]:
        """The last turn after `root` that `rest` replays, and where it ends."""
        best, waiting = (root, 0), [(root, 0)]
        while waiting:
            node, start = waiting.pop()
            end = self._end_of_replay(node, rest, start)
            best = max(best, (node, end), key=itemgetter(1))
            waiting += [(child, end) for child in self._tree.children.get(node.id, ()) if end]
        return best

    def _end_of_replay(self, node: Node, rest: Sequence[ConversationMessage], start: int) -> int:
        """0 if `rest` does not have the messages of `node` from `start` on."""
        recorded = [*self._tree.given_messages(node), node.served]
        recorded = recorded if start else recorded[_count_prompt(recorded) :]
        end = start + len(recorded)
        return end if end <= len(rest) and all(map(_is_replay, recorded, rest[start:end])) else 0


def _has_several(prompts: Iterable[tuple[Message, ...]]) -> bool:
    return len({digest(*prompt) for prompt in prompts}) > 1


def _is_replay(recorded: Message, now: ConversationMessage) -> bool:
    if message_key(recorded) != message_key(now.message):
        return False
    return read_role(recorded) != "assistant" or find_changes(recorded, now.message) is not None


def _root_key(first: Message, tools_digest: bytes) -> bytes:
    return digest(message_key(first), tools_digest)


def _count_prompt(messages: Messages) -> int:
    return count_system(map(read_role, messages))


def check_pin(pin: Iterable[str]) -> tuple[str, ...]:
    chosen = (pin,) if isinstance(pin, str) else tuple(dict.fromkeys(pin))
    if others := [name for name in chosen if name != "system"]:
        raise ConfigError(f"pin: {others[0]!r} cannot be pinned; choose from system")
    return chosen
