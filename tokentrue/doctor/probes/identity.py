"""Identity: does the engine tokenise, render and count as the model directory does?"""

from __future__ import annotations

from collections.abc import Sequence

from tokentrue.doctor.context import QUESTIONS, Examination
from tokentrue.doctor.findings import Finding, cannot_tell, fault, ok
from tokentrue.errors import RenderError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonObject
from tokentrue.protocols import Tokenizing

TEXTS = (
    "The quick brown fox jumps over 1234567 lazy dogs.",
    "  two spaces, a tab\tand a line\n\nbreak; naïve café, 你好, Привет 🙂",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2.5e-3]}",
)
CHATS: tuple[tuple[str, tuple[JsonObject, ...]], ...] = (
    ("user", ({"role": "user", "content": QUESTIONS[0]},)),
    ("system, user", ({"role": "system", "content": "Answer briefly."}, {"role": "user", "content": QUESTIONS[1]})),
    (
        "user, assistant, user",
        (
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": QUESTIONS[2]},
        ),
    ),
)


async def probe_identity(exam: Examination) -> list[Finding]:
    return [await _tokenizer(exam), await _special_tokens(exam), await _template(exam)]


async def _tokenizer(exam: Examination) -> Finding:
    name = "identity: ids of a text"
    for text in TEXTS:
        theirs, ours = await _tokenize(exam, text), exam.renderer.encode_sampled(text)
        if theirs is None:
            return cannot_tell(name, "the engine has no route that tokenises text")
        if theirs != list(ours):
            return fault(
                name,
                "tokenizer",
                f"{len(theirs)} ids, expected {len(ours)}",
                detail=_first_difference(ours, theirs, exam),
            )
    return ok(name, f"{len(TEXTS)} texts equal")


async def _special_tokens(exam: Examination) -> Finding:
    """The stop tokens, by their text: an engine encodes them as special tokens."""
    name = "identity: stop tokens"
    for stop in exam.renderer.stop_token_ids:
        text = exam.renderer.decode([stop])
        theirs = await _tokenize(exam, text)
        if theirs is None:
            return cannot_tell(name, "the engine has no route that tokenises text")
        if theirs != [stop]:
            return fault(name, "special_tokens", f"{text!r} is {theirs.tolist()}, expected [{stop}]")
    return ok(name, f"{len(exam.renderer.stop_token_ids)} stop tokens equal")


async def _tokenize(exam: Examination, text: str) -> TokenIds | None:
    return await exam.provider.tokenize(text) if isinstance(exam.provider, Tokenizing) else None


async def _template(exam: Examination) -> Finding:
    name = "identity: chat template"
    compared = 0
    for label, messages in CHATS:
        try:
            ours = list(exam.renderer.render(messages).token_ids)
        except RenderError:
            continue  # a role that this template refuses
        theirs = await exam.routes.tokenize_chat(messages)
        if theirs is None:
            return cannot_tell(name, "the engine has no route that renders a conversation")
        if theirs != ours:
            detail = f"conversation {label}: {_first_difference(ours, theirs, exam)}"
            return fault(name, "template", f"{len(theirs)} ids, expected {len(ours)}", detail=detail)
        compared += 1
    return ok(name, f"{compared} conversations equal")


def _first_difference(ours: Sequence[int], theirs: Sequence[int], exam: Examination) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    expected, got = list(ours[at : at + 6]), list(theirs[at : at + 6])
    return f"from token {at} on: {got} ({_text(got, exam)}), expected {expected} ({_text(expected, exam)})"


def _text(ids: Sequence[int], exam: Examination) -> str:
    known = [i for i in ids if 0 <= i < exam.reference.vocab_size]
    return repr(exam.renderer.decode(known)) if known else "nothing"
