"""gpt-oss (harmony): every message names its channel; a recipient makes it a call. The shipped template differs from
openai-harmony, the models' library: it quotes tool results, writes text beside a call as reasoning, writes only the
first of several calls, and drops later system messages."""

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
_TALK = """\
{%- set called = namespace(name="") %}
{%- for message in loop_messages %}
    {%- set alone = loop.last and not add_generation_prompt %}
    {%- if message.role == "assistant" %}
        {%- set answered = namespace(later=false) %}
        {%- for other in loop_messages[loop.index:] if other.role == "assistant" and not other.tool_calls %}
            {%- set answered.later = true %}
        {%- endfor %}
        {%- if message.thinking and not answered.later and (message.tool_calls or alone) %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- set names = (message.tool_calls or []) | map(attribute="function.name") | unique(true) | list %}
        {%- set called.name = names[0] if names | length == 1 else "" %}
        {%- if not message.tool_calls %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + ("<|return|>" if alone else "<|end|>") }}
        {%- elif message.content %}
            {{- "<|start|>assistant<|channel|>commentary<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- "<|start|>assistant to=functions." + call.function.name + "<|channel|>commentary <|constrain|>json<|message|>" }}
            {{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + "<|call|>" }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if not (message.name or called.name) %}
            {{- raise_exception("a tool's result needs a name or the id of its call") }}
        {%- endif %}
        {{- "<|start|>functions." + (message.name or called.name) + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content + "<|end|>" }}
    {%- elif message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- else %}
        {{- "<|start|>developer<|message|># Instructions\\n\\n" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start|>assistant" }}
{%- endif %}
"""


def correct_template(template: str) -> str | None:
    """The shipped template changed to match the library; `conversation_start_date` sets the date. None if the
    template is a different one."""
    head, found, _ = template.partition(_BEGIN)
    if not found or head.count(_BLANK_LINES) != 1 or head.count(_TODAY) != 1:
        return None
    head = head.replace(_BLANK_LINES, _BLANK_LINES.replace('"\\n\\n"', '"\\n\\n" if tools else ""'))
    return head.replace(_TODAY, f"(conversation_start_date or {_TODAY})") + _TALK


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<|start|>", "<|channel|>", "<|message|>"):
        return None
    return Family(name="harmony", response_template=_TEMPLATE, chat_template=correct_template(clues.template))
