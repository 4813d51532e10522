"""A plan becomes a prompt: the recorded ids, untouched, and what the renderer adds; or a new root where it refuses.

Small inputs are rendered inline; large ones in a thread, so that one long document does not stall every other session.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from tokentrue.errors import TokenContractError
from tokentrue.protocols import Renderer
from tokentrue.sessions.matching import Continue, Matcher, Plan, Root
from tokentrue.sessions.tree import Given, Node, Tree
from tokentrue.types import Extension, JoinedIds, Messages, PromptSpan, Refusal, Rendered, TemplateKwargs, Tools, TurnRequest

P = ParamSpec("P")
T = TypeVar("T")
INLINE_CHARS = 16_000
INLINE_IDS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the engine is given, and where it comes from. `ids == full_ids(parent) + given_ids`."""

    ids: array[int] | JoinedIds
    given_ids: array[int]
    source: Extension | Rendered
    parent: Node | None
    given: tuple[Given, ...]
    projection: str
    why: str | None
    detail: str
    origin: Node | None = None

    @property
    def spans(self) -> tuple[PromptSpan, ...]:
        """Which of the given ids come from which message; worked out when first asked for."""
        return self.source.spans


async def inline_or_thread(work: Callable[P, T], small: bool, /, *args: P.args, **kwargs: P.kwargs) -> T:
    return work(*args, **kwargs) if small else await asyncio.to_thread(work, *args, **kwargs)


async def prompt_for(plan: Plan, request: TurnRequest, *, renderer: Renderer, tree: Tree, matcher: Matcher) -> Prompt:
    tools, template_kwargs = request.tools, request.template_kwargs
    if isinstance(plan, Continue):
        extended = await _extend(plan, renderer, tree, tools, template_kwargs)
        if isinstance(extended, Prompt):
            return extended
        plan = Root(
            messages=(*tree.messages(plan.node), *plan.tail),
            given=matcher.refer(plan.node, plan.tail),
            key=plan.key,
            why=extended.why,
            detail=extended.detail,
            origin=plan.node,
        )
    return await _render(plan, renderer, tools, template_kwargs)


async def _extend(plan: Continue, renderer: Renderer, tree: Tree, tools: Tools | None, template_kwargs: TemplateKwargs) -> Prompt | Refusal:
    node, kwargs = plan.node, dict(template_kwargs)
    if kwargs != dict(node.template_kwargs) and not await _same_context(renderer, tree, node, tools, kwargs):
        return Refusal(why="template_kwargs_changed", detail=f"template settings that shape the prompt differ from those of node {node.id}")
    prefix, history = tree.full_ids(node), tree.messages(node)
    small = _chars(plan.tail) < INLINE_CHARS
    extension = await inline_or_thread(renderer.extend, small, prefix, history, plan.tail, node.tools, template_kwargs=kwargs or None)
    if isinstance(extension, Refusal):
        return extension
    if len(extension.prefix_ids) != len(prefix):
        raise TokenContractError(f"the renderer changed the prefix of node {node.id}: {len(prefix)} ids became {len(extension.prefix_ids)}")
    given = extension.packed
    return Prompt(
        ids=JoinedIds(prefix, given),
        given_ids=given,
        source=extension,
        parent=node,
        given=plan.tail,
        projection=plan.projection,
        why=plan.why,
        detail=plan.detail,
    )


async def _render(plan: Root, renderer: Renderer, tools: Tools | None, template_kwargs: TemplateKwargs) -> Prompt:
    small = _chars(plan.messages) + _chars(tools or ()) < INLINE_CHARS
    rendered = await inline_or_thread(renderer.render, small, plan.messages, tools, template_kwargs=dict(template_kwargs) or None)
    ids = array("i", rendered.token_ids)
    return Prompt(
        ids=ids,
        given_ids=ids,
        source=rendered,
        parent=None,
        given=plan.given,
        projection="root",
        why=plan.why,
        detail=plan.detail,
        origin=plan.origin,
    )


async def _same_context(renderer: Renderer, tree: Tree, node: Node, tools: Tools | None, kwargs: Mapping[str, Any]) -> bool:
    """Do these template settings change only how the generation prompt ends? Asked of the root's own messages."""
    root = tree.path(node)[0]
    messages = tree.given_messages(root)

    def ids(settings: Mapping[str, Any]) -> tuple[int, ...]:
        return renderer.render(messages, tools, template_kwargs=dict(settings) or None).token_ids

    def compare() -> bool:
        short, long = sorted((ids(root.template_kwargs), ids(kwargs)), key=len)
        return long[: len(short) - 1] == short[:-1]  # one goes on where the other ends, or they part at the very last token

    return await inline_or_thread(compare, _chars(messages) < INLINE_CHARS)


def _chars(messages: Messages | Iterable[Mapping[str, Any]]) -> int:
    """About how much text there is to render."""
    chars = 0
    for message in messages:
        for value in message.values():
            chars += len(value) if isinstance(value, str) else _size(value)
    return chars


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return 8
