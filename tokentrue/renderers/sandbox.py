"""The sandbox in which chat templates run: transformers' own, with a `RenderBudget` for every rendering.

Compiled templates differ from jinja's in four places: each loop iteration, macro call and block begins with a step;
`+`, `*`, `**`, `%` and `~` ask the budget; literals with variables in them are charged; buffers are joined by the
budget. Filters and methods of strings are checked where they are called. What a template renders is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, update_wrapper
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.filters import do_join, do_sum
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils as chat_templates

from tokentrue.renderers.budget import (
    FILTER_CHECKS,
    METHOD_CHECKS,
    ONLY_TEXT,
    RenderBudget,
    TemplateLimits,
    check_format,
    check_percent,
    limit_error,
)

UNUSED = RenderBudget(TemplateLimits(cpu_s=0.0))
JINJA_ARGUMENTS = frozenset({"_loop_vars", "_block_vars"})  # of every call inside a loop or a block
CONTAINERS = frozenset({list, tuple, dict})
GROWING = frozenset({*FILTER_CHECKS, "e", "escape", "forceescape", "pprint", "urlencode", "urlize", "xmlattr"})
PLAIN_VALUES = frozenset({bool, dict, float, int, list, str, type(None)})
DICT_ATTRIBUTES = frozenset(dir(dict))
MOST_KNOWN_ATTRIBUTES = 4096
MOST_SOURCE_CHARS = 4 << 20
_STEP = "count_step"  # no attribute of the environment: BoundedCodeGenerator writes a call in its place


class BoundedContext(Context):
    """The variables of one rendering, and its budget (`use`) under the names that compiled templates use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use(UNUSED)

    def use(self, budget: RenderBudget) -> None:
        self.budget = budget
        self.step, self.add_all, self.hold = budget.step, budget.add, budget.hold

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        derived = cast("BoundedContext", super().derived(locals))
        derived.use(self.budget)
        return derived

    def concat_all(self, join: Callable[[Any], str], operands: Sequence[Any]) -> str:
        """`a ~ b ~ …`"""
        if join is not str_join:  # escaped markup
            return self.budget.check_result(join(operands))
        if not ONLY_TEXT.issuperset(map(type, operands)):
            operands = [self.as_text(operand) for operand in operands]
        return self.add_all(operands)

    def as_text(self, value: Any) -> str:
        """What `{{ value }}` writes."""
        if type(value) is str:
            return value
        if type(value) in CONTAINERS:
            self.hold(value)
        return self.budget.check_result(str(value))

    def join_buffer(self, pieces: Iterable[str]) -> str:
        """Pieces that are large were charged when they were made; the same one may stand here many times."""
        return self.add_all(list(pieces))


class BoundedCodeGenerator(CodeGenerator):
    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("concat = context.join_buffer")

    def visit_EnvironmentAttribute(self, node: nodes.EnvironmentAttribute, frame: Frame) -> None:
        if node.name == _STEP:
            self.write("context.step()")
        else:
            super().visit_EnvironmentAttribute(node, frame)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape or finalize.src is not None:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("context.as_text(")

    @optimizeconst
    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:
        operands: list[nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        self._write_call("context.add_all((", [left, *reversed(operands)], "))", frame)

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        join = "markup_join" if frame.eval_ctx.autoescape or frame.eval_ctx.volatile else "str_join"
        self._write_call(f"context.concat_all({join}, (", node.nodes, "))", frame)

    def _write_call(self, opening: str, operands: Sequence[nodes.Expr], closing: str, frame: Frame) -> None:
        self.write(opening)
        for operand in operands:
            self.visit(operand, frame)
            self.write(", ")
        self.write(closing)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._hold(node, super().visit_List, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._hold(node, super().visit_Dict, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._hold(node, super().visit_Tuple, frame)
        else:
            super().visit_Tuple(node, frame)

    def _hold(self, node: Any, visit: Callable[[Any, Frame], None], frame: Frame) -> None:
        if all(isinstance(item, (nodes.Const, nodes.Pair)) and is_constant(item) for item in node.items):
            visit(node, frame)
            return
        self.write("context.hold(")
        visit(node, frame)
        self.write(")")


def is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Pair):
        return isinstance(node.key, nodes.Const) and isinstance(node.value, nodes.Const)
    return isinstance(node, nodes.Const)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    context_class = BoundedContext
    code_generator_class = BoundedCodeGenerator
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role`: jinja looks for an attribute first and for an item when that fails. No method of dicts has
        such a name."""
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES and attribute in obj:
            return cast("dict[str, Any]", obj)[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """jinja's answer depends only on the type and the name, and costs half of a rendering: it is asked once for
        each."""
        kind = cast("type[Any]", type(obj))
        safe = self._safe.get((kind, attr))
        if safe is None:
            safe = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < MOST_KNOWN_ATTRIBUTES:
                self._safe[kind, attr] = safe
        return safe

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
            step = nodes.ExprStmt(nodes.EnvironmentAttribute(_STEP)).set_lineno(node.lineno).set_environment(self)
            cast("Any", node).body.insert(0, step)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = cast("BoundedContext", context).budget
        if operator == "*":
            return budget.multiply(left, right)
        if operator == "**":
            return budget.power(left, right)
        if isinstance(left, str):
            check_percent(budget, left, right)
        return budget.check_result(left % right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str:
            return __self.call_method(cast("BoundedContext", __context).budget, __obj, owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return cast("BoundedContext", __context).hold(result) if type(result) is dict else result

    def call_method(
        self, budget: RenderBudget, method: Any, owner: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """A method of strings."""
        kwargs = {name: value for name, value in kwargs.items() if name not in JINJA_ARGUMENTS} if kwargs else kwargs
        name = method.__name__
        if name == "join" and args:
            return budget.join(owner, budget.collect(args[0]))
        if check := METHOD_CHECKS.get(name):
            check(budget, owner, *args, **kwargs)
        return budget.check_result(method(*args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if type(value) in PLAIN_VALUES:
            return None
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None

        @pass_context
        def wrapper(context: BoundedContext, *args: Any, **kwargs: Any) -> str:
            check_format(context.budget, value.__self__, *args, **kwargs)
            return context.budget.check_result(format_text(*args, **kwargs))

        return update_wrapper(wrapper, value)

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Context | None = None,
        eval_ctx: Any = None,
    ) -> Any:
        if context is not None:  # `map` calls a filter for each item
            cast("BoundedContext", context).step()
        return super().call_filter(name, value, args, kwargs, context, eval_ctx)


def guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same filter, checked before it runs where its result can be large, and charged afterwards."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "nothing")
    check = FILTER_CHECKS.get(name)

    @pass_context
    def guarded(context: BoundedContext, *args: Any, **kwargs: Any) -> Any:
        if check is not None:
            check(context.budget, *args, **kwargs)
        if passed == "nothing":
            result = function(*args, **kwargs)
        else:
            first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[passed]
            result = function(first, *args, **kwargs)
        return context.budget.check_result(result)

    return guarded


@pass_context
def bounded_join(context: BoundedContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    pieces = context.budget.collect(value)
    if attribute is None and not context.eval_ctx.autoescape:
        return context.budget.join(str(d), [context.as_text(piece) for piece in pieces])
    return context.budget.check_result(do_join(context.eval_ctx, pieces, d, attribute))


@pass_context
def bounded_list(context: BoundedContext, value: Any) -> list[Any]:
    return context.budget.collect(value)


@pass_context
def bounded_sum(context: BoundedContext, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if isinstance(start, (int, float)):
        return do_sum(cast("Any", context.environment), iterable, attribute, start)
    values = context.budget.collect(iterable)
    if attribute is not None:
        values = [context.environment.getitem(value, attribute) for value in values]
    return context.budget.add([start, *values])


@pass_context
def bounded_string(context: BoundedContext, value: Any) -> str:
    return context.as_text(value)


@cache
def bounded_environment() -> BoundedEnvironment:
    """Everything that transformers gives to templates, and nothing that makes text out of nothing (`lipsum`)."""
    theirs: Any = chat_templates._compile_jinja_template("").environment  # pyright: ignore[reportPrivateUsage]
    environment: Any = BoundedEnvironment(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(extension) for extension in theirs.extensions.values()],
    )
    environment.globals.update(theirs.globals)
    del environment.globals["lipsum"]
    environment.globals["namespace"] = name_only(theirs.globals["namespace"])
    environment.filters.update(theirs.filters)
    environment.filters.update(
        {name: guard_filter(name, function) for name, function in theirs.filters.items() if name in GROWING}
    )
    environment.filters.update(join=bounded_join, list=bounded_list, string=bounded_string, sum=bounded_sum)
    return environment


def name_only(namespace: type[Any]) -> type[Any]:
    """Prints as a name: namespaces that hold each other would print without end."""

    def print_name(_: object) -> str:
        return "<Namespace>"

    return type("TemplateNamespace", (namespace,), {"__repr__": print_name})


def compile_template(source: str) -> Any:
    if len(source) > MOST_SOURCE_CHARS:
        raise limit_error(f"{MOST_SOURCE_CHARS} characters of source")
    return bounded_environment().from_string(source)
