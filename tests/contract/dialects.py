"""How the models of each family write a turn: the text that they sample after their generation prompt, its stop token
included.

Written by hand from the formats, independent of both the templates and the parser: the contract suite plays a model
with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Call = Mapping[str, Any]  # {"name", "arguments": dict}
WriteCalls = Callable[[Sequence[Call]], str]


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {dumps(c)}}}\n</tool_call>' for c in calls)


def function_xml(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n<function={c['name']}>\n{_parameters(c)}</function>\n</tool_call>" for c in calls)


def _parameters(call: Call) -> str:
    return "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in call["arguments"].items())


def arg_pairs(calls: Sequence[Call], *, gap: str = "\n") -> str:
    return gap.join(
        f"<tool_call>{c['name']}{gap}"
        + "".join(
            f"<arg_key>{k}</arg_key>{gap}<arg_value>{_plain(v)}</arg_value>{gap}" for k, v in c["arguments"].items()
        )
        + "</tool_call>"
        for c in calls
    )


def tight_pairs(calls: Sequence[Call]) -> str:
    return arg_pairs(calls, gap="")


def kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{c['name']}:{n}<|tool_call_argument_begin|>{dumps(c)}<|tool_call_end|>"
        for n, c in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def minimax(calls: Sequence[Call]) -> str:
    return f"<minimax:tool_call>\n{_invokes(calls)}</minimax:tool_call>"


def _invokes(calls: Sequence[Call]) -> str:
    return "".join(
        f'<invoke name="{c["name"]}">\n'
        + "".join(f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in c["arguments"].items())
        + "</invoke>\n"
        for c in calls
    )


def deepseek_fenced(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c['name']}\n```json\n{dumps(c)}\n```<｜tool▁call▁end｜>"
        for c in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_bare(calls: Sequence[Call]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{c['name']}<｜tool▁sep｜>{dumps(c)}<｜tool▁call▁end｜>" for c in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def dsml(calls: Sequence[Call], *, block: str) -> str:
    mark = "｜DSML｜"
    inner = "".join(
        f'<{mark}invoke name="{c["name"]}">\n'
        + "".join(
            f'<{mark}parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">{_plain(v)}</{mark}parameter>\n'
            for k, v in c["arguments"].items()
        )
        + f"</{mark}invoke>\n"
        for c in calls
    )
    return f"<{mark}{block}>\n{inner}</{mark}{block}>"


def harmony_call(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{c['name']} <|constrain|>json<|message|>{dumps(c)}" for c in calls
    )


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{c["name"]}", "parameters": {dumps(c)}}}' for c in calls)


def mistral_list(calls: Sequence[Call]) -> str:
    inner = ", ".join(f'{{"name": "{c["name"]}", "arguments": {dumps(c)}}}' for c in calls)
    return f"[TOOL_CALLS][{inner}]"


def mistral_each(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{c['name']}[ARGS]{dumps(c)}" for c in calls)


def dumps(call: Call) -> str:
    return json.dumps(call["arguments"], ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """`think`: what the model writes around its reasoning; where the prompt has already opened it, the model goes on
    inside.

    `closes`: what the template writes, in history, where the model sampled its stop; differs for harmony only.
    """

    calls: WriteCalls | None
    stop: str
    call_stop: str = ""
    think: tuple[str, str] | None = ("<think>\n", "\n</think>\n\n")
    before_calls: str = "\n"
    parallel: bool = True
    text_with_calls: bool = True
    closes: Mapping[str, str] = field(default_factory=dict[str, str])
    ids: Callable[[str, int, int], str] = lambda name, turn, place: f"call{turn:03d}{place:02d}"

    def write(self, message: Mapping[str, Any], *, prompt: str) -> str:
        """`prompt` is the end of the text that the model goes on from."""
        calls = [
            {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            for call in message.get("tool_calls") or ()
        ]
        content = message.get("content") or ""
        text = self._thinking(message.get("reasoning_content") or "", prompt) + content
        if calls:
            assert self.calls is not None
            text += (self.before_calls if content else "") + self.calls(calls)
        return text + ((self.call_stop or self.stop) if calls else self.stop)

    def _thinking(self, reasoning: str, prompt: str) -> str:
        if self.think is None:
            return ""
        opener, closer = self.think
        if prompt.rstrip().endswith(opener.strip()):
            return (opener.lstrip()[len(opener.strip()) :] if prompt.endswith(">") else "") + reasoning + closer
        return opener + reasoning + closer if reasoning else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inkling(Dialect):
    """A block per part; the prompt has opened the first one."""

    def write(self, message: Mapping[str, Any], *, prompt: str) -> str:
        parts: list[str] = []
        if message.get("reasoning_content"):
            parts.append(f"<|content_thinking|>{message['reasoning_content']}<|end_message|>")
        if message.get("content"):
            parts.append(f"<|content_text|>{message['content']}<|end_message|>")
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            body = json.dumps({"name": name, "args": arguments}, ensure_ascii=False, separators=(",", ":"))
            parts.append(f"{name}<|content_invoke_tool_json|>{body}<|end_message|>")
        return "<|message_model|>".join(parts) + self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Harmony(Dialect):
    """Every message has its channel and its end; the stop token ends the last one."""

    def write(self, message: Mapping[str, Any], *, prompt: str) -> str:
        parts: list[str] = []
        if message.get("reasoning_content"):
            parts.append(f"<|channel|>analysis<|message|>{message['reasoning_content']}")
        if message.get("content"):
            channel = "commentary" if message.get("tool_calls") else "final"
            parts.append(f"<|channel|>{channel}<|message|>{message['content']}")
        for call in message.get("tool_calls") or ():
            function = {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            parts.append(harmony_call([function]))
        return "<|end|><|start|>assistant".join(parts) + (self.call_stop if message.get("tool_calls") else self.stop)
