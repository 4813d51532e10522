"""The prompt by hand: what `tests/fixtures/templates/qwen3-like.jinja` (and Qwen3's own, for appended messages) must
give.

Text is a list of segments; only structure may hold marker tokens, so that the markers of a prompt are known one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tokentrue.conformance.agents.messages import Message, Tool
from tokentrue.conformance.standin.vocabulary import Vocabulary

Segment = tuple[str, bool]  # text, and whether it is structure
GENERATE: Segment = ("<|im_start|>assistant\n", True)
TOOLS_INTRO = "You may call these functions, given as JSON inside <tools>:\n<tools>"
TOOLS_END = '\n</tools>\nWrite a call as:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n'


def appended(messages: Sequence[Message], *, stopped: bool) -> list[Segment]:
    """What comes after a sampled turn, up to the next generation; `stopped` says that the turn sampled its own stop
    token."""
    return [("\n" if stopped else "<|im_end|>\n", True), *rendered(messages), GENERATE]


def whole(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Segment]:
    """A prompt without recorded turns."""
    out: list[Segment] = []
    system = messages[0].text if messages[0].role == "system" else None
    if tools:
        out.append(("<|im_start|>system\n", True))
        if system is not None:
            out += [(system, False), ("\n\n", True)]
        out.append((TOOLS_INTRO, True))
        out += [
            ("\n" + json.dumps({"type": "function", "function": tool.function()}, ensure_ascii=False), False)
            for tool in tools
        ]
        out.append((TOOLS_END, True))
    elif system is not None:
        out += [("<|im_start|>system\n", True), (system, False), ("<|im_end|>\n", True)]
    return [*out, *rendered(messages[1:] if system is not None else messages), GENERATE]


def rendered(messages: Sequence[Message]) -> list[Segment]:
    out: list[Segment] = []
    for index, message in enumerate(messages):
        if message.role != "tool":
            out += [(f"<|im_start|>{message.role}\n", True), (message.text, False), ("<|im_end|>\n", True)]
            continue
        if index == 0 or messages[index - 1].role != "tool":
            out.append(("<|im_start|>user", True))
        out += [("\n<tool_response>\n", True), (message.text, False), ("\n</tool_response>", True)]
        if index == len(messages) - 1 or messages[index + 1].role != "tool":
            out.append(("<|im_end|>\n", True))
    return out


def text_of(segments: Sequence[Segment]) -> str:
    return "".join(text for text, _ in segments)


def markers_of(segments: Sequence[Segment], vocabulary: Vocabulary) -> list[int]:
    """The marker tokens that these segments must give, in order."""
    pattern = re.compile("|".join(re.escape(mark) for mark in sorted(vocabulary.added, key=len, reverse=True)))
    return [vocabulary.added[mark] for text, structure in segments if structure for mark in pattern.findall(text)]
