"""What a family entry may say: only what a chat template cannot tell. Boundaries and stop tokens are never in here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tokentrue.json_types import JsonMapping, JsonObject

PLAIN: JsonMapping = {"start_anchor_pattern": r"\A(?!)", "fields": {"content": {}}}
"""The response template of a model about which nothing is known: all text is content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How the model writes a call, where that can be enforced: `opening`, `begin` with the tool's name in place of
    NAME (`"NAME"`: as a JSON string), the arguments in JSON, `end`.

    Only text that ordinary tokens can spell, or added tokens that are not special: engines keep special tokens out of
    their grammars.
    """

    opening: str
    begin: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`response_template` is a schema of `transformers.utils.chat_parsing`; `template_kwargs` are pinned where the
    caller gives none.

    `call_ids`: "openai" (`call_` and hex), or "short" where the template insists on nine letters and digits (Mistral).
    """

    name: str
    response_template: JsonMapping | None = None
    template_kwargs: JsonMapping = field(default_factory=JsonObject)
    chat_template: str | None = None
    call_ids: Literal["openai", "short"] = "openai"
    call_form: CallForm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clues:
    """What a family is recognised by: its template's text and its tokenizer's added tokens. Never the model's name."""

    template: str
    tokens: frozenset[str]

    def has(self, *markers: str) -> bool:
        """Every marker is written in the template."""
        return all(marker in self.template for marker in markers)


Recognise: TypeAlias = Callable[[Clues], Family | None]

_KEEPING = {
    "clear_thinking": False,  # GLM-4.7 and later
    "truncate_history_thinking": False,  # Nemotron-3
    "preserve_thinking": True,  # Qwen3.6 and later, Kimi-K2.6, LFM2.5
    "keep_past_thinking": True,  # LFM2.5
    "drop_thinking": False,  # DeepSeek-V4
}


def keep_reasoning(clues: Clues) -> JsonObject:
    """The switches that this template offers against dropping earlier reasoning, set to keep it.

    A template shows that it has such a switch, not which way a recorded history wants it.
    """
    return {name: value for name, value in _KEEPING.items() if name in clues.template}
