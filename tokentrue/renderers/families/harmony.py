"""gpt-oss (harmony): every message names its channel; a recipient makes it a call. The shipped template differs from
openai-harmony, the models' library: it quotes tool results, writes text beside a call as reasoning, writes only the
first of several calls, and drops later system messages."""

from pathlib import Path

from tokentrue.renderers.families.base import NAMED, Clues, Family

_OPENER = r"(?:<\|start\|>assistant)?"
_TO = r"to=(?:functions\.)?(?P<name>[^\s<]+)"
_KIND = r"[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"
_ENDS = ["<|end|>", "<|return|>", "<|call|>"]
_PART = {"close": _ENDS, "repeats": True, "join": "\n"}

_TEMPLATE = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "content": {},
        "final": {"open_pattern": rf"{_OPENER}\s*<\|channel\|>final{_KIND}", **_PART},
        "preamble": {"open_pattern": rf"{_OPENER}\s*<\|channel\|>commentary\s*<\|message\|>", **_PART},
        "reasoning_content": {"open_pattern": rf"{_OPENER}\s*<\|channel\|>analysis\s*<\|message\|>", **_PART},
        "tool_calls": {
            # the recipient is before the channel (as templates write it) or after it (as the model does)
            "open_pattern": rf"{_OPENER}\s*(?:{_TO}\s*{_CHANNEL}{_KIND}|{_CHANNEL}\s+{_TO}{_KIND})",
            "close": _ENDS,
            "content": "json",
            "repeats": True,
            "transform": NAMED,
        },
    },
}


_BEGIN = "{%- set last_tool_call = namespace(name=none) %}"
_BLANK_LINES = '{{- developer_message }}\n        {{- "\\n\\n" }}'
_TODAY = 'strftime_now("%Y-%m-%d")'
_TALK = Path(__file__).with_name("harmony.jinja")  # what follows the head of the shipped template


def correct_template(template: str) -> str | None:
    """The shipped template changed to match the library; `conversation_start_date` sets the date. None if the
    template is a different one."""
    head, found, _ = template.partition(_BEGIN)
    if not found or head.count(_BLANK_LINES) != 1 or head.count(_TODAY) != 1:
        return None
    head = head.replace(_BLANK_LINES, _BLANK_LINES.replace('"\\n\\n"', '"\\n\\n" if tools else ""'))
    return head.replace(_TODAY, f"(conversation_start_date or {_TODAY})") + _TALK.read_text(encoding="utf-8")


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|start|>", "<|channel|>", "<|message|>"):
        return None
    return Family(name="harmony", response_template=_TEMPLATE, chat_template=correct_template(clues.template))
