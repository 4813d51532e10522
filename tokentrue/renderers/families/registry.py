"""Which family a template belongs to. A new family is one file and one line here; the first that recognises the
template wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tokentrue.renderers.families import gemma, generic
from tokentrue.renderers.families.base import Clues, Family, Recognise
from tokentrue.renderers.families.json_calls import hermes, inkling, k2v3, llama, mistral, qwen3
from tokentrue.renderers.families.token_calls import deepseek, harmony, kimi
from tokentrue.renderers.families.xml_calls import glm, minimax, qwen3_coder

FAMILIES: tuple[Recognise, ...] = (
    harmony.recognise,
    inkling.recognise,
    kimi.recognise,
    minimax.recognise,
    deepseek.recognise,
    glm.recognise,
    qwen3_coder.recognise,
    k2v3.recognise,
    hermes.recognise,
    qwen3.recognise,
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
