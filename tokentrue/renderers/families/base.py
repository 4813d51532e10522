"""The `Family` record, and formats of reasoning and calls that families share. A call format has two fields:
`tool_calls` and, if that captures a name, `broken_calls`: the same block with any other body, so that a failed attempt
is recognised as one."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Literal

from tokentrue.json_types import JsonMapping, JsonObject, read_table
from tokentrue.records import record

PLAIN: JsonMapping = {"start_anchor_pattern": r"\A(?!)", "fields": {"content": {}}}
"""Response template of an unknown model: all text is content."""


@record
class CallForm:
    """How the model writes a call: `opening`, `begin` with the tool's name for NAME (`"NAME"`: as a JSON string), the
    arguments in JSON, `end`. No special tokens: engines exclude those from grammars."""

    opening: str
    begin: str
    end: str


@record
class Family:
    """What a chat template does not say. `response_template`: a schema of `transformers.utils.chat_parsing`;
    `template_kwargs`: defaults for what the caller omits. `call_ids`: "openai" (`call_` and hex), or "short" if the
    template requires nine letters and digits (Mistral)."""

    name: str
    response_template: JsonMapping | None = None
    template_kwargs: JsonMapping = field(default_factory=JsonObject)
    chat_template: str | None = None
    call_ids: Literal["openai", "short"] = "openai"
    call_form: CallForm | None = None


@record
class Clues:
    """Evidence to recognise a family: the template's text and the tokenizer's added tokens, never the model's name."""

    template: str
    tokens: frozenset[str]

    def has(self, *markers: str) -> bool:
        return all(marker in self.template for marker in markers)


_KEEPING = {
    "clear_thinking": False,  # GLM-4.7 and later
    "truncate_history_thinking": False,  # Nemotron-3
    "preserve_thinking": True,  # Qwen3.6 and later, Kimi-K2.6, LFM2.5
    "keep_past_thinking": True,  # LFM2.5
    "drop_thinking": False,  # DeepSeek-V4
}


def keep_reasoning(clues: Clues) -> JsonObject:
    """The template's switches against dropping earlier reasoning, set to keep it. A template shows that it has such a
    switch, not which setting a recorded history needs."""
    return {name: value for name, value in _KEEPING.items() if name in clues.template}


Field = JsonMapping
Fields = Mapping[str, Field]

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""The opening pattern captures the name; the body is the arguments."""

THINK: Field = {"open": "<think>", "close": "</think>"}

FORMATS: Mapping[str, Fields] = read_table(__file__, "formats.toml")
HERMES, FUNCTION_XML, ARG_PAIRS = FORMATS["hermes"], FORMATS["function_xml"], FORMATS["arg_pairs"]
HERMES_FORM = CallForm(opening="<tool_call>", begin='\n{"name": "NAME", "arguments": ', end="}\n</tool_call>")


def calls_as_invocations(block: str, *, tag: str = "", attribute: str = "") -> Fields:
    """`<BLOCK>⏎<invoke name="NAME">⏎<parameter name="KEY">VALUE</parameter>⏎</invoke>⏎</BLOCK>`: several calls share
    one block. `tag` precedes each tag's word (DeepSeek's `｜DSML｜`); `attribute`: pattern for further attributes of a
    parameter."""
    opens, closes = f"<{tag}{block}>", f"</{tag}{block}>"
    return {
        "tool_calls": {
            "open_pattern": rf'(?:{opens}\s*|(?<=</{tag}invoke>)\s*)<{tag}invoke name="(?P<name>[^"]*)">',
            "close_pattern": rf"</{tag}invoke>(?:\s*{closes})?",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": rf'<{tag}parameter name="(?P<key>[^"]*)"{attribute}>(?P<value>.*?)</{tag}parameter>'
            },
            "repeats": True,
            "transform": NAMED,
        },
        "broken_calls": {"open": opens, "close": closes, "repeats": True},
    }


def calls_between_tokens(
    *, section: tuple[str, str], call: tuple[str, str], head: str, tail: str = "", transform: JsonMapping = NAMED
) -> Fields:
    """JSON calls, each between two marker tokens, all between two section tokens that belong to the first and last
    call. `head` is the pattern between a call's opening token and its arguments and captures the name; `tail` follows
    them."""
    begin, end = rf"(?:{section[0]}\s*)?{call[0]}", rf"{call[1]}(?:\s*{section[1]})?"
    return {
        "tool_calls": {
            "open_pattern": begin + head,
            "close_pattern": tail + end,
            "content": "json",
            "repeats": True,
            "transform": transform,
        },
        "broken_calls": {"open_pattern": begin, "close_pattern": end, "repeats": True},
    }


def response(calls: Fields, *, anchors: Sequence[str], reasoning: Field | None = THINK) -> Field:
    """A response template; one of `anchors` opens the turn."""
    fields: dict[str, Field] = {"content": {}}
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    return {"start_anchor": list(anchors), "fields": fields | dict(calls)}


CHATML = ("<|im_start|>assistant\n",)
