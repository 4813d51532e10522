"""Which family a template belongs to. A new family is one file and one line here; the first that recognises the
template wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tokentrue.renderers.families import (
    chatml,
    deepseek,
    gemma,
    generic,
    glm,
    harmony,
    inkling,
    kimi,
    llama,
    minimax,
    mistral,
)
from tokentrue.renderers.families.base import Clues, Family, Recognise

FAMILIES: tuple[Recognise, ...] = (
    harmony.recognise,
    inkling.recognise,
    kimi.recognise,
    minimax.recognise,
    deepseek.recognise,
    glm.recognise,
    chatml.recognise_coder,
    chatml.recognise_k2v3,
    chatml.recognise_hermes,
    chatml.recognise_qwen3,
    mistral.recognise,
    llama.recognise,
    gemma.recognise,
    generic.recognise,
)


def family_for(template_text: str, tokenizer: Any, tokens: Iterable[str] | None = None) -> Family:
    """The family of a template, or "plain": all text is content, no calls. A response template that the tokenizer ships
    wins over ours.

    `tokens` are the tokenizer's added tokens where the caller has them already: some have thousands.
    """
    if tokens is None:
        tokens = (str(token.content) for token in tokenizer.added_tokens_decoder.values())
    clues = Clues(template=template_text, tokens=frozenset(tokens))
    family = next((found for recognise in FAMILIES if (found := recognise(clues)) is not None), Family(name="plain"))
    own = getattr(tokenizer, "response_template", None)
    return replace(family, response_template=own) if own else family
