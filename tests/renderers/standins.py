"""A tokenizer for any template: a real one that has all its tokens, else our BPE with the tokens that the template's
own renders show."""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests import parts

_TOKENLIKE = re.compile(
    r"<[|｜][^<>|｜\s]{1,48}[|｜]>|</?(?:think|tool_calls?|tool_responses?|tool_sep|arg_key|arg_value)(?::[a-z]+)?>|<SPECIAL_\d+>|<end_of_utterance>"
    r"|<(?:beginning|begin|end)_of_(?:sentence|turn|text)>|</?(?:assistant|user|system|sep|tool)>|<reserved_\d+>|<_(?:user|bot|system|end)>"
    r"|\[\|[A-Za-z]{1,24}\|\]|<extra_id_\d+>"
)
_TALK = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "So?"},
]


def standin(template: str) -> Any:
    from tokenizers import AddedToken

    tokenizer = parts.standin_tokenizer(template)
    tokenizer.chat_template = template
    text = template
    for messages in (
        _TALK,
        [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in _TALK],
    ):
        try:
            text += tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template that refuses this talk shows its tokens in its text alone
            continue
    known = set(tokenizer.get_added_vocab())
    marks = sorted({mark for mark in _TOKENLIKE.findall(text) if mark not in known and "{" not in mark})
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return tokenizer


def standin_dir(template: str) -> Path:
    """The same as a directory, for another process."""
    digest = sha256(template.encode() + _TOKENLIKE.pattern.encode()).hexdigest()[:16]
    target = parts.CACHE / "standins" / f"rendered-{digest}"
    if not (target / "tokenizer.json").exists():
        parts.build_once(target, lambda folder: standin(template).save_pretrained(folder))
    return target


@cache
def real_tokenizers() -> dict[str, Any]:
    from transformers import AutoTokenizer

    return {
        name: AutoTokenizer.from_pretrained(parts.tokenizer_dir(name))
        for name in parts.REAL
        if parts.shared() is not None
    }


def tokenizer_for(template: str) -> tuple[str, Any]:
    """The name ("stand-in" where it is ours) and the tokenizer."""
    fake = standin(template)
    needed = {text for text in fake.get_added_vocab() if text in template}
    for name, tokenizer in real_tokenizers().items():
        if needed and needed <= set(tokenizer.get_added_vocab()):
            return name, tokenizer
    return "stand-in", fake
