"""Where turns begin and end in a sequence of ids: which tokens are structure, which of them open a turn, and how an assistant's turn opens.

Found by rendering, not from a table. `tokentrue.compare` reads a sequence by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokentrue.errors import TokenTrueError
from tokentrue.types import Message

if TYPE_CHECKING:
    from tokentrue.renderers.renderer import Renderer

_USER, _ASSISTANT, _SYSTEM = "qzuserqz", "qzassistantqz", "qzsystemqz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """`assistant` is the token that opens an assistant's turn; `word` the text right after it, where other roles share the token.

    Qwen3: `<|im_start|>` and "assistant"; GLM: `<|assistant|>` and ""; `openers` are the tokens that open a turn of any role.
    """

    special: frozenset[int]
    openers: frozenset[int]
    stops: frozenset[int]
    assistant: int | None
    word: str


def structure_of(renderer: Renderer) -> Structure:
    codec = renderer.codec
    special = frozenset(id_ for id_, text in codec.texts.items() if text.strip(" \t\r\n▁"))
    prompt = _generation_prompt(renderer)
    place = next((place for place, id_ in enumerate(prompt) if id_ in special), None)
    openers: set[int] = set()
    word = ""
    if place is not None:
        openers.add(prompt[place])
        after = next((n for n in range(place + 1, len(prompt)) if prompt[n] in special), len(prompt))
        word = codec.decode(prompt[place + 1 : after]).split("\n")[0].strip()
    openers |= _openers(renderer, special, openers)
    return Structure(
        special=special,
        openers=frozenset(openers),
        stops=frozenset(renderer.stop_token_ids),
        assistant=prompt[place] if place is not None else None,
        word=word,
    )


def _text(renderer: Renderer, messages: list[Message], *, generate: bool) -> str:
    from tokentrue.renderers.messages import filled_in, plain_messages

    plain = filled_in(plain_messages(messages, renderer.habits))
    return renderer.template.text(plain, None, renderer.template_kwargs, generate=generate, habits=renderer.habits)


def _generation_prompt(renderer: Renderer) -> list[int]:
    """The ids that a template writes to open the assistant's turn."""
    user: list[Message] = [{"role": "user", "content": _USER}]
    try:
        whole, without = _text(renderer, user, generate=True), _text(renderer, user, generate=False)
    except TokenTrueError:
        return []
    if whole.startswith(without) and len(whole) > len(without):
        return renderer.codec.encode(whole[len(without) :])
    return renderer.codec.encode(whole[whole.rfind(_USER) + len(_USER) :])


def _openers(renderer: Renderer, special: frozenset[int], known: set[int]) -> set[int]:
    """The structure between two contents: a known opener if there is one, else the first token after the one that ends the turn before."""
    found: set[int] = set()
    turns: list[Message] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": _ASSISTANT},
        {"role": "user", "content": _USER + "2"},
    ]
    for messages in (turns, turns[1:]):
        try:
            text = _text(renderer, messages, generate=False)
        except TokenTrueError:
            continue
        stops = frozenset(renderer.stop_token_ids)
        for before, word in ((_SYSTEM, _USER), (_USER, _ASSISTANT), (_ASSISTANT, _USER + "2")):
            start, end = text.find(before), text.rfind(word)
            if 0 <= start < end:
                gap = [id_ for id_ in renderer.codec.encode(text[start + len(before) : end]) if id_ in special]
                closed = next((n + 1 for n, id_ in enumerate(gap) if id_ in stops), 0)
                shared = [id_ for id_ in gap if id_ in known]
                found.update((shared or gap[closed:] or gap[-1:])[:1])
        break
    return found
