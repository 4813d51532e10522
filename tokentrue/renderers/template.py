"""A chat template compiled in transformers' sandbox, and the inputs that it accepts. For inputs in the shape the
template takes, `Template.render` returns the string of `apply_chat_template(tokenize=False)`."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, cast

from tokentrue.errors import TemplateError, TemplateLimitError
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue
from tokentrue.records import record
from tokentrue.renderers.earlier import compile_for_later

if TYPE_CHECKING:
    from jinja2 import Template as CompiledTemplate
    from jinja2.sandbox import SandboxedEnvironment


@record
class InputFormat:
    """Found by rendering small conversations; the defaults suit most templates."""

    parts: bool = False  # content parts are understood
    text: bool = True  # plain strings are understood
    no_tools: Literal["none", "empty"] = "none"  # the value for "no tools"
    bare_tools: bool = False  # takes the function objects themselves, not {"type": "function", "function": …}
    arguments: Literal["object", "string"] = "object"
    short_ids: bool = False  # call ids must be nine letters or digits
    developer: bool = False  # knows the developer role


def make_content(text: str, inputs: InputFormat) -> JsonValue:
    if inputs.text or not inputs.parts:
        return text
    return [{"type": "text", "text": text}] if text else []


def make_arguments(values: JsonObject, inputs: InputFormat) -> JsonObject | str:
    return values if inputs.arguments == "object" else json.dumps(values, ensure_ascii=False)


class Template:
    """Its failures of any kind are TemplateErrors. `deadline` limits each rendering."""

    def __init__(
        self, source: str, *, variables: JsonMapping, deadline: AbstractContextManager[object] | None = None
    ) -> None:
        self.source = source
        self.hash = "sha256:" + sha256(source.encode()).hexdigest()
        self._variables = dict(variables)
        self._deadline = deadline or nullcontext()

    @cached_property
    def _compiled(self) -> "CompiledTemplate":
        """With a cached proof, loading does not need it."""
        from transformers.utils.chat_template_utils import _compile_jinja_template  # pyright: ignore[reportPrivateUsage]

        try:
            return _compile_jinja_template(self.source)
        except MemoryError:
            raise
        except Exception as error:  # syntax errors, and errors in constants that jinja folds
            raise TemplateError(
                f"chat_template: does not compile: {error}; pass a corrected one as chat_template=…"
            ) from error

    def compile(self) -> None:
        _ = self._compiled

    @cached_property
    def _without_earlier(self) -> "CompiledTemplate":
        return compile_for_later(self.source, cast("SandboxedEnvironment", self._compiled.environment))

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        kwargs: JsonMapping,
        *,
        generate: bool = True,
        inputs: InputFormat | None = None,
        skips_earlier: bool = False,
    ) -> str:
        """`generate` adds the generation prompt. With `skips_earlier`, nothing need be written for `EarlierMessage`s."""
        if not tools:
            tools = [] if inputs is not None and inputs.no_tools == "empty" else None
        given = {"messages": messages, "tools": tools, "add_generation_prompt": generate}
        compiled = self._without_earlier if skips_earlier else self._compiled
        variables = {**self._variables, "documents": None, **kwargs, **given}
        try:
            with self._deadline:
                return compiled.render(variables)
        except TemplateError:
            raise
        except MemoryError as error:
            raise TemplateLimitError(
                "chat_template: out of memory while rendering; shorten the conversation"
            ) from error
        except Exception as error:  # jinja's own errors, raise_exception, and Python errors out of filters and methods
            raise TemplateError(f"chat_template: {type(error).__name__}: {str(error)[:300]}") from error


def find_input_format(template: Template, kwargs: JsonMapping) -> InputFormat:
    """Decides each fact by whether marked words survive a render, never by name. Raises if it does not compile."""
    template.compile()
    inputs = InputFormat(developer="developer" in template.source)
    first, second = "qzfirstqz", "qzsecondqz"
    parts = [{"type": "text", "text": first}, {"type": "text", "text": second}]
    empty = replace(inputs, no_tools="empty")
    if not _shows_content(template, kwargs, inputs, first, first) and _shows_content(
        template, kwargs, empty, first, first
    ):
        inputs = empty
    inputs = replace(
        inputs,
        text=_shows_content(template, kwargs, inputs, first, first),
        parts=_shows_content(template, kwargs, inputs, parts, first, second),
    )
    trials = [
        (inputs, "call_0123456789"),
        (replace(inputs, short_ids=True), "abcdefghi"),
        (replace(inputs, bare_tools=True), "call_0123456789"),
        (replace(inputs, arguments="string"), "call_0123456789"),
    ]
    return next((trial for trial, call_id in trials if _shows_result(template, kwargs, trial, call_id)), inputs)


def _shows_content(
    template: Template, kwargs: JsonMapping, inputs: InputFormat, content: JsonValue, *words: str
) -> bool:
    try:
        text = template.render([{"role": "user", "content": content}], None, kwargs, inputs=inputs)
    except TemplateError:
        return False
    # with a quote before it, the list was printed as is, not interpreted
    return all(text.count(word) == 1 and f"'{word}" not in text and f'"{word}' not in text for word in words)


def _shows_result(template: Template, kwargs: JsonMapping, inputs: InputFormat, call_id: str) -> bool:
    messages, tools = make_call_talk(inputs, "qzwordqz", "qzresultqz", call_id)
    try:
        return "qzresultqz" in template.render(messages, tools, kwargs, inputs=inputs)
    except TemplateError:
        return False


def make_call_talk(
    inputs: InputFormat, argument: str, result: str, call_id: str
) -> tuple[list[JsonObject], list[JsonObject]]:
    """A question, a call and its result, and the tools."""
    call = {"name": "qzlook", "arguments": make_arguments({"q": argument}, inputs)}
    calls = [{"id": call_id, "type": "function", "function": call}]
    messages: list[JsonObject] = [
        {"role": "user", "content": make_content("Hello.", inputs)},
        {"role": "assistant", "content": make_content("", inputs), "tool_calls": calls},
        {"role": "tool", "content": make_content(result, inputs), "tool_call_id": call_id, "name": "qzlook"},
    ]
    parameters = {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}, "required": ["q"]}
    function: JsonObject = {"name": "qzlook", "description": "Looks.", "parameters": parameters}
    return messages, [function if inputs.bare_tools else {"type": "function", "function": function}]
