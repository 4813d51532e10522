"""A chat template, compiled once in transformers' own sandbox, and what this particular template wants of its inputs.

Invariant: for inputs already in the shape the template wants, `Template.text` is the string `apply_chat_template(tokenize=False)` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from tokentrue.errors import TemplateError

if TYPE_CHECKING:
    from tokentrue.renderers.sandbox import Quick

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a template can take, found by rendering small conversations; the defaults are what most templates want."""

    parts: bool = False  # content parts are understood
    text: bool = True  # plain strings are understood
    no_tools: Literal["none", "empty"] = "none"  # what stands for "no tools"
    bare_tools: bool = False  # wants the function objects themselves, not {"type": "function", "function": …}
    arguments: Literal["object", "string"] = "object"
    short_ids: bool = False  # call ids must be nine letters or digits
    developer: bool = False  # knows the developer role

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Template:
    """`text` renders; failures of the template, whatever their kind, become one TemplateError."""

    def __init__(self, source: str, *, variables: Mapping[str, Any]) -> None:
        self.source = source
        self.hash = "sha256:" + sha256(source.encode()).hexdigest()
        self._variables = dict(variables)

    @cached_property
    def _compiled(self) -> Any:
        """Compiled when first rendered: what a warm load needs to know about the template is in the cache."""
        from jinja2.exceptions import TemplateError as JinjaError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        from tokentrue.renderers.sandbox import quick

        try:
            environment: Any = _compile_jinja_template(self.source).environment
            return quick(environment).from_string(self.source)
        except (JinjaError, SyntaxError) as error:
            raise TemplateError(f"chat_template: does not compile: {error}; pass a corrected one as chat_template=…") from error

    @property
    def environment(self) -> Quick:
        return self._compiled.environment

    def compiles(self) -> None:
        """Raises TemplateError where it does not."""
        _ = self._compiled

    def text(
        self,
        messages: Sequence[Plain],
        tools: Sequence[Plain] | None,
        kwargs: Mapping[str, Any],
        *,
        generate: bool = True,
        habits: Habits | None = None,
        compiled: Any = None,
    ) -> str:
        """`compiled` is the same source in another environment."""
        if not tools:
            tools = [] if habits is not None and habits.no_tools == "empty" else None
        compiled = compiled or self._compiled
        try:
            return compiled.render(
                **{**self._variables, "documents": None, **kwargs}, messages=messages, tools=tools, add_generation_prompt=generate
            )
        except RecursionError as error:
            raise TemplateError("chat_template: recursion without end while rendering") from error
        except Exception as error:  # jinja's own errors, raise_exception, and Python errors out of filters and methods
            raise TemplateError(f"chat_template: {type(error).__name__}: {str(error)[:300]}") from error


def habits_of(template: Template, kwargs: Mapping[str, Any]) -> Habits:
    """Each habit is decided by whether marked words survive a render, never by the template's name. Raises if it does not compile."""
    template.compiles()
    habits = Habits(developer="developer" in template.source)
    habits = _content_habits(template, kwargs, habits)
    return _call_habits(template, kwargs, habits)


def _content_habits(template: Template, kwargs: Mapping[str, Any], habits: Habits) -> Habits:
    def shows(content: Any, *words: str, trial: Habits = habits) -> bool:
        try:
            text = template.text([{"role": "user", "content": content}], None, kwargs, habits=trial)
        except TemplateError:
            return False
        quoted = any(quote + word in text for word in words for quote in ("'", '"'))  # a list that was printed, not understood
        return all(text.count(word) == 1 for word in words) and not quoted

    empty = replace(habits, no_tools="empty")
    if not shows("qzwordqz", "qzwordqz") and shows("qzwordqz", "qzwordqz", trial=empty):
        habits = empty
    text = shows("qzwordqz", "qzwordqz", trial=habits)
    parts = [{"type": "text", "text": "qzfirstqz"}, {"type": "text", "text": "qzsecondqz"}]
    return replace(habits, text=text, parts=shows(parts, "qzfirstqz", "qzsecondqz", trial=habits))


def _call_habits(template: Template, kwargs: Mapping[str, Any], habits: Habits) -> Habits:
    tool = {"type": "function", "function": {"name": "qzlook", "description": "d", "parameters": {"type": "object", "properties": {}}}}

    def shows(trial: Habits, call_id: str) -> bool:
        arguments: Any = {"q": "qzwordqz"} if trial.arguments == "object" else '{"q": "qzwordqz"}'
        content = (lambda word: word) if trial.text else (lambda word: [{"type": "text", "text": word}] if word else [])
        call = {"id": call_id, "type": "function", "function": {"name": "qzlook", "arguments": arguments}}
        messages = [
            {"role": "user", "content": content("hello")},
            {"role": "assistant", "content": content(""), "tool_calls": [call]},
            {"role": "tool", "content": content("qzresultqz"), "tool_call_id": call_id, "name": "qzlook"},
        ]
        tools = [tool["function"] if trial.bare_tools else tool]
        try:
            return "qzresultqz" in template.text(messages, tools, kwargs, habits=trial)
        except TemplateError:
            return False

    if shows(habits, "call_0123456789"):
        return habits
    trials = [(replace(habits, short_ids=True), "abcdefghi"), (replace(habits, bare_tools=True), "call_0123456789")]
    trials += [(replace(habits, arguments="string"), "call_0123456789")]
    return next((trial for trial, call_id in trials if shows(trial, call_id)), habits)
