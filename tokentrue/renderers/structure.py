"""How turns begin and end in ids, found by rendering; used by `tokentrue.compare`."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

from tokentrue.errors import TokenTrueError
from tokentrue.ids import EMPTY, TokenIds
from tokentrue.records import record
from tokentrue.renderers.codec import BLANKS, Codec
from tokentrue.types import Ids, Message, Messages

_USER, _ASSISTANT, _SYSTEM = "qzuserqz", "qzassistantqz", "qzsystemqz"


class RenderText(Protocol):
    def __call__(self, messages: Messages, /, *, generate: bool = True) -> str: ...


@record
class Structure:
    """`assistant`: the token that opens an assistant turn; `word`: the text right after it if other roles share the
    token; `openers`: of any role. Qwen3: `<|im_start|>` and "assistant"; GLM: `<|assistant|>` and no word."""

    special: frozenset[int]
    openers: frozenset[int]
    stops: frozenset[int]
    assistant: int | None
    word: str


def find_structure(codec: Codec, stop_ids: Ids, render_text: RenderText) -> Structure:
    special = frozenset(id_ for id_, text in codec.texts.items() if text.strip(BLANKS))
    stops = frozenset(stop_ids)
    prompt = _encode_generation_prompt(codec, render_text)
    openers: set[int] = set()
    word = ""
    place = next((place for place, id_ in enumerate(prompt) if id_ in special), None)
    if place is not None:
        openers.add(prompt[place])
        after = next((n for n in range(place + 1, len(prompt)) if prompt[n] in special), len(prompt))
        word = codec.decode(prompt[place + 1 : after]).split("\n")[0].strip()
    for between in _list_gaps(render_text):
        gap = [id_ for id_ in codec.encode(between) if id_ in special]
        closed = next((n + 1 for n, id_ in enumerate(gap) if id_ in stops), 0)
        shared = [id_ for id_ in gap if place is not None and id_ == prompt[place]]
        openers.update((shared or gap[closed:] or gap[-1:])[:1])
    return Structure(
        special=special,
        openers=frozenset(openers),
        stops=stops,
        assistant=prompt[place] if place is not None else None,
        word=word,
    )


def _encode_generation_prompt(codec: Codec, render_text: RenderText) -> TokenIds:
    user: list[Message] = [{"role": "user", "content": _USER}]
    try:
        whole, without = render_text(user), render_text(user, generate=False)
    except TokenTrueError:
        return EMPTY
    if whole.startswith(without) and len(whole) > len(without):
        return codec.encode(whole[len(without) :])
    return codec.encode(whole[whole.rfind(_USER) + len(_USER) :])


def _list_gaps(render_text: RenderText) -> Iterator[str]:
    roles = {_SYSTEM: "system", _USER: "user", _ASSISTANT: "assistant", _USER + "2": "user"}
    turns: list[Message] = [{"role": role, "content": word} for word, role in roles.items()]
    for messages in (turns, turns[1:]):
        try:
            text = render_text(messages, generate=False)
        except TokenTrueError:
            continue
        for before, word in pairwise(roles):
            start, end = text.find(before), text.rfind(word)
            if 0 <= start < end:
                yield text[start + len(before) : end]
        return
