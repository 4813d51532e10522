"""Identity: does the engine tokenise, render and count as the model directory does?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokentrue.doctor.exam import QUESTIONS, Examination, probe
from tokentrue.doctor.findings import Finding, cannot_tell, fault, ok
from tokentrue.errors import RenderError
from tokentrue.ids import TokenIds
from tokentrue.protocols import Tokenizing

TEXTS = (
    "The quick brown fox jumps over 1234567 lazy dogs.",
    "  two spaces, a tab\tand a line\n\nbreak; naïve café, 你好, Привет 🙂",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2.5e-3]}",
)
CHATS: Mapping[str, Sequence[str]] = {
    "user": (QUESTIONS[0],),
    "system, user": ("Answer briefly.", QUESTIONS[1]),
    "user, assistant, user": ("Hi.", "Hello!", QUESTIONS[2]),
}


async def probe_identity(exam: Examination) -> list[Finding]:
    return [await _tokenizer(exam), await _special_tokens(exam), await _template(exam)]


@probe("identity: ids of a text")
async def _tokenizer(exam: Examination) -> Finding:
    for text in TEXTS:
        theirs, ours = await _tokenize(exam, text), exam.renderer.encode_sampled(text)
        if theirs is None:
            return cannot_tell("the engine has no route that tokenises text")
        if theirs != list(ours):
            return _other_ids("tokenizer", ours, theirs, exam)
    return ok(f"{len(TEXTS)} texts equal")


@probe("identity: stop tokens")
async def _special_tokens(exam: Examination) -> Finding:
    """The stop tokens, by their text: an engine encodes them as special tokens."""
    for stop in exam.renderer.stop_token_ids:
        text = exam.renderer.decode([stop])
        theirs = await _tokenize(exam, text)
        if theirs is None:
            return cannot_tell("the engine has no route that tokenises text")
        if theirs != [stop]:
            return fault("special_tokens", f"{text!r} is {theirs.tolist()}, expected [{stop}]")
    return ok(f"{len(exam.renderer.stop_token_ids)} stop tokens equal")


async def _tokenize(exam: Examination, text: str) -> TokenIds | None:
    return await exam.provider.tokenize(text) if isinstance(exam.provider, Tokenizing) else None


@probe("identity: chat template")
async def _template(exam: Examination) -> Finding:
    compared = 0
    for roles, texts in CHATS.items():
        messages = [{"role": role, "content": text} for role, text in zip(roles.split(", "), texts, strict=True)]
        try:
            ours = list(exam.renderer.render(messages).token_ids)
        except RenderError:
            continue  # a role that this template refuses
        theirs = await exam.routes.tokenize_chat(messages)
        if theirs is None:
            return cannot_tell("the engine has no route that renders a conversation")
        if theirs != ours:
            return _other_ids("template", ours, theirs, exam, where=f"conversation {roles}: ")
        compared += 1
    return ok(f"{compared} conversations equal")


def _other_ids(name: str, ours: Sequence[int], theirs: Sequence[int], exam: Examination, where: str = "") -> Finding:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))

    def text(ids: Sequence[int]) -> str:
        known = [i for i in ids if 0 <= i < exam.reference.vocab_size]
        return f"{list(ids)} ({exam.renderer.decode(known)!r})" if known else f"{list(ids)} (nothing)"

    detail = f"{where}from token {at} on: {text(theirs[at : at + 6])}, expected {text(ours[at : at + 6])}"
    return fault(name, f"{len(theirs)} ids, expected {len(ours)}", detail=detail)
