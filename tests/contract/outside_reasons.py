"""Why a cell of the suite of `renderers` differs from ours: reasons that count only where they are seen to hold on that
very cell.

Runs inside that suite's process (see renderers_adapter.py), where `tests` is its own folder. A reason is a sentence and
a check; a failing test that no check explains is a failure of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from tokentrue.types import Extension

Message = Mapping[str, Any]


def reason(name: str, parameters: Mapping[str, Any], adapter: Any) -> str:
    """The first reason that holds for the failed test `name`, or "". `adapter` is the one that was examined last."""
    checks = _PARITY if name == "test_renderer_matches_reference" else _BRIDGE
    for sentence, check in checks.items():
        try:
            if check(parameters, adapter):
                return sentence
        except Exception:  # a check that cannot be made explains nothing
            continue
    return ""


# Parity: `parameters` has the case, the scenario and the template's variables


def _reference(parameters: Mapping[str, Any], adapter: Any, messages: Sequence[Message]) -> list[int]:
    from tests.reference_rendering import render_reference

    case, scenario = parameters["case"], parameters["scenario"]
    given = {
        key: value for key, value in {**dict(case.oracle_defaults), **parameters["kwargs"]}.items() if value is not None
    }
    copies = [dict(message) for message in messages]
    return render_reference(adapter.tokenizer, copies, oracle=case.oracle, **given, **scenario.render_kwargs)


def _ours(parameters: Mapping[str, Any], adapter: Any) -> list[int]:
    scenario = parameters["scenario"]
    return adapter.render_ids(list(scenario.messages), **scenario.render_kwargs)


def _null_is_empty(parameters: Mapping[str, Any], adapter: Any) -> bool:
    messages = parameters["scenario"].messages
    if all(message.get("content") is not None for message in messages):
        return False
    said = [{**message, "content": message.get("content") or ""} for message in messages]
    return _reference(parameters, adapter, said) == _ours(parameters, adapter)


def _as_the_library(parameters: Mapping[str, Any], adapter: Any) -> bool:
    if parameters["case"].oracle != "harmony":
        return False
    scenario, kwargs = parameters["scenario"], parameters["kwargs"]
    date = kwargs.get("conversation_start_date") or datetime.now().strftime("%Y-%m-%d")
    effort = kwargs.get("reasoning_effort") or "medium"
    said = harmony_ids(
        scenario.messages, list(scenario.tools), effort=effort, date=date, generate=scenario.add_generation_prompt
    )
    return said == _ours(parameters, adapter)


def _as_the_template(parameters: Mapping[str, Any], adapter: Any) -> bool:
    """Where the suite's reference is no template: the template that we were given is what we follow."""
    scenario, given = (
        parameters["scenario"],
        {key: value for key, value in parameters["kwargs"].items() if value is not None},
    )
    said = [{**message, "content": message.get("content") or ""} for message in scenario.messages]
    found = adapter.tokenizer.apply_chat_template(
        said, tokenize=True, return_dict=False, **given, **scenario.render_kwargs
    )
    return parameters["case"].oracle == "deepseek-v4" and list(found) == _ours(parameters, adapter)


def _refused_by_name(parameters: Mapping[str, Any], adapter: Any) -> bool:
    from tokentrue.errors import MessageError

    odd = [index for index, message in enumerate(parameters["scenario"].messages) if message["role"] == "tool_declare"]
    try:
        _ours(parameters, adapter)
    except MessageError as error:
        return error.field == f"messages[{odd[0]}].role"
    return False


@cache
def load_harmony() -> Any:
    """The library reads its vocabulary anew at each call, for most of a second."""
    import openai_harmony as oh

    return oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)


def harmony_ids(messages: Sequence[Message], tools: list[Any], *, effort: str, date: str, generate: bool) -> list[int]:
    """openai-harmony's own encoding: calls typed as the model types them, text before a call in the commentary channel,
    results under their tool's name, the reasoning that the format keeps, and the library's own beginning of the next
    turn."""
    import openai_harmony as oh

    encoder = load_harmony()
    system = (
        oh.SystemContent.new()
        .with_reasoning_effort(oh.ReasoningEffort(effort.capitalize()))
        .with_conversation_start_date(date)
    )
    out = [oh.Message.from_role_and_content(oh.Role.SYSTEM, system)]
    lead = messages[0] if messages[0]["role"] == "system" else None
    if (lead and lead["content"]) or tools:
        developer = oh.DeveloperContent.new()
        if lead and lead["content"]:
            developer = developer.with_instructions(lead["content"])
        if tools:
            said = [tool["function"] for tool in tools]
            described = [
                oh.ToolDescription.new(tool["name"], tool["description"], parameters=tool["parameters"])
                for tool in said
            ]
            developer = developer.with_function_tools(described)
        out.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer))
    rest = messages[1:] if lead else messages
    for index, message in enumerate(rest):
        out += _harmony_message(oh, message, rest[:index], rest[index + 1 :], generate=generate)
    talk = oh.Conversation.from_messages(out)
    as_given = oh.RenderConversationConfig(auto_drop_analysis=False)
    if generate:
        return encoder.render_conversation_for_completion(talk, oh.Role.ASSISTANT, config=as_given)
    return encoder.render_conversation_for_training(talk, config=as_given)


def _harmony_message(
    oh: Any, message: Message, before: Sequence[Message], after: Sequence[Message], *, generate: bool
) -> list[Any]:
    import json

    role, content, calls = message["role"], message.get("content") or "", message.get("tool_calls") or []
    if role == "user":
        return [oh.Message.from_role_and_content(oh.Role.USER, content)]
    if role in {"system", "developer"}:
        return [
            oh.Message.from_role_and_content(oh.Role.DEVELOPER, oh.DeveloperContent.new().with_instructions(content))
        ]
    if role == "tool":
        asked = {call.get("id"): call["function"]["name"] for said in before for call in said.get("tool_calls") or ()}
        name = message.get("name") or asked.get(message.get("tool_call_id")) or list(asked.values())[-1]
        result = oh.Message.from_author_and_content(oh.Author.new(oh.Role.TOOL, f"functions.{name}"), content)
        return [result.with_recipient("assistant").with_channel("commentary")]

    def said(text: str, channel: str) -> Any:
        return oh.Message.from_role_and_content(oh.Role.ASSISTANT, text).with_channel(channel)

    answered = any(later["role"] == "assistant" and not later.get("tool_calls") for later in after)
    keeps = bool(message.get("reasoning_content")) and not answered and bool(calls or (not after and not generate))
    out = [said(message["reasoning_content"], "analysis")] if keeps else []
    if content or not calls:
        out.append(said(content, "commentary" if calls else "final"))
    for call in calls:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        to = f"functions.{call['function']['name']}"
        out.append(said(text, "commentary").with_recipient(to).with_content_type("<|constrain|>json"))
    return out


# Bridge: the adapter remembers its last extension


def _rendered(adapter: Any, messages: Sequence[Message]) -> list[int]:
    result = adapter.tokenizer.apply_chat_template(
        [_as_objects(message) for message in messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **adapter.variables,
    )
    return list(result)


def _as_objects(message: Message) -> dict[str, Any]:
    import json

    out = {**message, "content": message.get("content") or ""}
    if "reasoning_content" in out:
        out["thinking"] = out["reasoning_content"]
    if message.get("tool_calls"):
        functions = [call["function"] for call in message["tool_calls"]]
        objects = [{**function, "arguments": json.loads(function["arguments"])} for function in functions]
        out["tool_calls"] = [
            {**call, "function": function} for call, function in zip(message["tool_calls"], objects, strict=True)
        ]
    return out


def _assistant_goes_on(parameters: Mapping[str, Any], adapter: Any) -> bool:
    prefix, history, new, found = adapter.last_bridge
    if not isinstance(found, Extension) or [message["role"] for message in new] != ["assistant"]:
        return False
    whole = _rendered(adapter, [*history, *new])
    return list(found.prefix_ids) == prefix and whole[-len(found.added_ids) :] == list(found.added_ids)


def _reasoning_stays(parameters: Mapping[str, Any], adapter: Any) -> bool:
    """On the suite's own turn, its call given an id, of which Kimi's calls are made."""
    from test_bridge import _simulate_prior_turn

    call = {"id": "functions.lookup:0", "type": "function", "function": {"name": "lookup", "arguments": {"q": "x"}}}
    turn = {"role": "assistant", "reasoning_content": "Let me think.", "content": "", "tool_calls": [call]}
    prompt, sampled = _simulate_prior_turn(adapter, [turn])
    found = adapter.bridge_to_next_turn(prompt, sampled, [{"role": "user", "content": "next"}])
    _, history, new, _ = adapter.last_bridge
    kept = "Let me think." in adapter.tokenizer.decode(_rendered(adapter, [*history, *new]))
    result = {"role": "tool", "content": "result", "tool_call_id": "functions.lookup:0"}
    return found is not None and kept and adapter.bridge_to_next_turn(prompt, sampled, [result]) is not None


_PARITY: dict[str, Callable[[Mapping[str, Any], Any], bool]] = {
    "null content is an empty text: with an empty text in its place the reference gives our ids": _null_is_empty,
    "openai-harmony itself gives our ids, without the suite's own choices": _as_the_library,
    "the model ships an encoder, not a template: the template at hand gives our ids": _as_the_template,
    "`tool_declare` is no role of a chat request: refused by name": _refused_by_name,
}
_BRIDGE: dict[str, Callable[[Mapping[str, Any], Any], bool]] = {
    "an assistant turn of the harness is a continuation: what is added is what the template's render has": _assistant_goes_on,
    "the template keeps this reasoning when a user follows: there is nothing to decline for": _reasoning_stays,
}
