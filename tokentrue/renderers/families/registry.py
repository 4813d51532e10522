"""The families and how a template is matched to one. A new family is one function and its name in `FAMILIES`."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from tokentrue.protocols import find_plugins, load_plugin
from tokentrue.renderers.families import harmony
from tokentrue.renderers.families.base import (
    ARG_PAIRS,
    CHATML,
    FORMATS,
    FUNCTION_XML,
    HERMES,
    HERMES_FORM,
    NAMED,
    THINK,
    Clues,
    Family,
    Field,
    Fields,
    calls_as_invocations,
    calls_between_tokens,
    keep_reasoning,
    response,
)


def recognise_inkling(clues: Clues) -> Family | None:
    """Each part of a turn (thinking, text, a call in JSON) is a block that ends with `<|end_message|>`."""
    if not clues.has("<|message_model|>", "<|content_invoke_tool_json|>"):
        return None
    template = {"start_anchor": "<|message_model|>", "fields": FORMATS["inkling"]}
    return Family(name="inkling", response_template=template)


def recognise_kimi(clues: Clues) -> Family | None:
    """Kimi-K2, K2.5, K2.6: calls between section tokens; results repeat the id `functions.NAME:INDEX` of their
    call."""
    if not clues.has("<|im_assistant|>", "<|im_middle|>", "<|tool_call_begin|>"):
        return None
    name = r"(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)"
    calls = calls_between_tokens(
        section=(r"<\|tool_calls_section_begin\|>", r"<\|tool_calls_section_end\|>"),
        call=(r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>"),
        head=rf"\s*{name}\s*<\|tool_call_argument_begin\|>",
        transform={**NAMED, "id": "{id}"},
    )
    return _make_family("kimi-k2", clues, calls, "<|im_assistant|>assistant<|im_middle|>")


def recognise_minimax(clues: Clues) -> Family | None:
    """MiniMax-M2, M2.5, M2.7: the prompt opens the thinking; calls are `<invoke name=…>`."""
    if not clues.has("]~b]ai", "minimax:tool_call"):
        return None
    return _make_family("minimax-m2", clues, calls_as_invocations("minimax:tool_call"), "]~b]ai\n")


def recognise_deepseek(clues: Clues) -> Family | None:
    """R1 and V3 (calls as fenced JSON), V3.1 (plain JSON), V3.2 and V4 (`｜DSML｜` tags that mark string values)."""
    if not clues.has("<｜Assistant｜>"):
        return None
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    name: str = "deepseek"
    calls: Fields = {}
    if clues.has("｜DSML｜"):
        name, block = ("deepseek-v4", "tool_calls") if clues.has("tool_calls>") else ("deepseek-v3.2", "function_calls")
        calls = calls_as_invocations(block, tag="｜DSML｜", attribute=r'(?: string="(?P<string>true|false)")?')
    elif clues.has("tool▁call▁begin", "```json"):
        fence = r"\s*function<｜tool▁sep｜>(?P<name>[^\n`<]+)\n\s*```json\n"
        name, calls = ("deepseek-v3", calls_between_tokens(section=section, call=call, head=fence, tail=r"\n?```\s*"))
    elif clues.has("tool▁call▁begin"):
        head = r"\s*(?P<name>[^\n`<]+)<｜tool▁sep｜>"
        name, calls = "deepseek-v3.1", calls_between_tokens(section=section, call=call, head=head)
    return _make_family(name, clues, calls, "<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>")


def recognise_glm(clues: Clues) -> Family | None:
    """GLM-4.5, 4.6, 4.7 and 5: calls as pairs of `<arg_key>` and `<arg_value>`."""
    if not clues.has("<tool_call>", "<arg_key>", "<arg_value>"):
        return None
    other = ("<assistant>", "<|im_start|>assistant\n", "<role>ASSISTANT</role>")
    anchors = ("<|assistant|>",) if clues.has("<|assistant|>") else other
    return _make_family("glm", clues, ARG_PAIRS, *anchors)


def recognise_coder(clues: Clues) -> Family | None:
    """Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron-3: calls as `<function=NAME>` with untyped parameters."""
    if not clues.has("<|im_start|>", "<tool_call>", "<function=", "<parameter="):
        return None
    reasoning = THINK if clues.has("<think>") else None
    name = "nemotron-3" if clues.has("truncate_history_thinking") else "qwen3.5" if reasoning else "qwen3-coder"
    return _make_family(name, clues, FUNCTION_XML, *CHATML, reasoning=reasoning)


def recognise_k2v3(clues: Clues) -> Family | None:
    """K2V3: Hermes calls; the prompt opens the thinking at one of three efforts."""
    if not clues.has("<|im_start|>", "<tool_call>", "think_fast", "think_faster"):
        return None
    efforts = ("think", "think_fast", "think_faster")
    reasoning = {"open": [f"<{effort}>" for effort in efforts], "close": [f"</{effort}>" for effort in efforts]}
    return _make_family("k2v3", clues, HERMES, *CHATML, reasoning=reasoning, call_form=HERMES_FORM)


def recognise_hermes(clues: Clues) -> Family | None:
    """Hermes-2-Pro and Hermes-3: the original Hermes call format, another vocabulary, no thinking."""
    if not clues.has("<|im_start|>", "<tool_call>", "You are a function calling AI model"):
        return None
    return _make_family("hermes", clues, HERMES, *CHATML, reasoning=None, call_form=HERMES_FORM)


def recognise_qwen3(clues: Clues) -> Family | None:
    """Qwen3, Qwen3-2507, Qwen3-Next, QwQ: `<think>`, Hermes calls in JSON. Qwen2.5 is the same without thinking."""
    if not clues.has("<|im_start|>", "<|im_end|>", "<tool_call>"):
        return None
    reasoning = THINK if clues.has("think>") or "<think>" in clues.tokens else None
    name = "qwen3" if reasoning else "qwen2.5"
    return _make_family(name, clues, HERMES, *CHATML, reasoning=reasoning, call_form=HERMES_FORM)


def recognise_mistral(clues: Clues) -> Family | None:
    """`[TOOL_CALLS]` and a JSON list (Nemo, Large), or `[TOOL_CALLS]NAME[ARGS]{…}` per call (Small 3.2, Devstral)."""
    if not clues.has("[TOOL_CALLS]", "[/INST]"):
        return None
    calls = FORMATS["mistral_args" if clues.has("[ARGS]") else "mistral"]
    reasoning = {"open": "[THINK]", "close": "[/THINK]"} if clues.has("[THINK]") else None
    return _make_family("mistral", clues, calls, "[/INST]", "[/TOOL_RESULTS]", reasoning=reasoning, call_ids="short")


def recognise_llama(clues: Clues) -> Family | None:
    """Llama-3.x: a call is the whole turn, JSON with `name` and `parameters`, perhaps after `<|python_tag|>`."""
    if not clues.has("<|start_header_id|>", "<|end_header_id|>"):
        return None
    anchor = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    return _make_family("llama-3", clues, FORMATS["llama"], anchor, reasoning=None)


def recognise_gemma(clues: Clues) -> Family | None:
    """Gemma-2 and Gemma-3: the template knows neither tools nor reasoning."""
    if not clues.has("<start_of_turn>"):
        return None
    return _make_family("gemma-3", clues, {}, "<start_of_turn>model\n", reasoning=None)


def recognise_generic(clues: Clues) -> Family | None:
    """Any other template: `<think>` and Hermes calls if its text shows them, after the common openers."""
    if not clues.has("messages"):
        return None
    openers = ("<|start_of_role|>assistant<|end_of_role|>", "<|assistant|>", "<|Assistant|>")
    more = ("<SPECIAL_11>Assistant\n", "<|turn>model\n")
    calls: Fields = HERMES if clues.has("<tool_call>") else {}
    reasoning = THINK if clues.has("<think>", "</think>") else None
    return _make_family("generic", clues, calls, *CHATML, *openers, *more, reasoning=reasoning)


def _make_family(
    name: str, clues: Clues, calls: Fields, *anchors: str, reasoning: Field | None = THINK, **more: Any
) -> Family:
    template = response(calls, anchors=anchors, reasoning=reasoning)
    return Family(name=name, response_template=template, template_kwargs=keep_reasoning(clues), **more)


FAMILIES: tuple[Callable[[Clues], Family | None], ...] = (
    harmony.recognise,
    recognise_inkling,
    recognise_kimi,
    recognise_minimax,
    recognise_deepseek,
    recognise_glm,
    recognise_coder,
    recognise_k2v3,
    recognise_hermes,
    recognise_qwen3,
    recognise_mistral,
    recognise_llama,
    recognise_gemma,
    recognise_generic,
)
"""The first that recognises the template wins, and those of other packages come before ours."""


def family_for(template_text: str, tokenizer: Any, tokens: Iterable[str] | None = None) -> Family:
    """The template's family, or "plain" (all text is content, no calls). A response template shipped with the tokenizer
    overrides ours. `tokens`: the tokenizer's added tokens, if the caller has them."""
    if tokens is None:
        tokens = (str(token.content) for token in tokenizer.added_tokens_decoder.values())
    clues = Clues(template=template_text, tokens=frozenset(tokens))
    plugins = map(load_plugin, find_plugins("families").values())
    recognised = (recognise(clues) for recognise in chain(plugins, FAMILIES))
    family = next((found for found in recognised if found is not None), Family(name="plain"))
    own = getattr(tokenizer, "response_template", None)
    return replace(family, response_template=own) if own else family
