"""Builds a prompt from a resolution: the recorded ids, untouched, and what the renderer adds; or a new root if it
refuses.

Turns that were sampled elsewhere (under other tools, for example) are appended as if they had been sampled here: the
renderer adds the messages before each of them, then come their recorded sampled ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tokentrue.errors import TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Renderer
from tokentrue.sessions.limits import SessionLimits, count_chars, run_by_size
from tokentrue.sessions.matching.matcher import Continue, Resolution, Root, root_after
from tokentrue.sessions.tree import Given, Node, ServedRef, Tree, TurnKey
from tokentrue.tracing import traced
from tokentrue.types import Extension, Message, PromptSpan, Refusal, Rendered, TemplateKwargs, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`ids == full_ids(parent) + given_ids`."""

    ids: TokenIds
    given_ids: TokenIds
    spans: tuple[PromptSpan, ...]  # which of the given ids come from which message
    parent: Node | None
    given: tuple[Given, ...]
    projection: str
    edge_reason: str | None
    detail: str
    origin: Node | None = None


@traced("prompt")
async def build_prompt(
    resolution: Resolution,
    tools: Tools | None,
    template_kwargs: TemplateKwargs,
    *,
    renderer: Renderer,
    tree: Tree,
    limits: SessionLimits,
    in_flight: Mapping[TurnKey, int],
) -> Prompt:
    """`in_flight` counts the turns being generated."""
    if isinstance(resolution, Continue):
        chars = count_chars(tree.resolve(resolution.tail))
        limits.check_text(chars)
        extended = await _extend(resolution, chars, renderer, tree, tools, template_kwargs)
        if isinstance(extended, Prompt):
            return extended
        node, tail, origin = resolution.node, resolution.tail, resolution.origin
        resolution = root_after(
            tree, node, tail, tools, in_flight, edge_reason=extended.why, detail=extended.detail, origin=origin
        )
    chars = count_chars(resolution.messages) + count_chars(tools or ())
    limits.check_text(chars)
    return await _render(resolution, chars, renderer, tools, template_kwargs)


async def _extend(
    resolution: Continue,
    chars: int,
    renderer: Renderer,
    tree: Tree,
    tools: Tools | None,
    template_kwargs: TemplateKwargs,
) -> Prompt | Refusal:
    node, kwargs = resolution.node, dict(template_kwargs)
    copied = [tree.nodes[item.node] for item in resolution.tail if isinstance(item, ServedRef)]
    for settings in (kwargs, *(dict(copy.template_kwargs) for copy in copied)):
        if settings != dict(node.template_kwargs) and not await _has_same_context(
            renderer, tree, node, tools, settings
        ):
            return Refusal(
                why="template_kwargs_changed",
                detail=f"template settings that shape the prompt differ from those of node {node.id}",
            )
    prefix, history = tree.full_ids(node), tree.messages(node)
    extended = await run_by_size(
        _extend_by_parts, chars, prefix, history, resolution.tail, renderer, tree, node, kwargs
    )
    if isinstance(extended, Refusal):
        return extended
    ids, spans = extended
    return Prompt(
        ids=ids,
        given_ids=ids[len(prefix) :],
        spans=spans,
        parent=node,
        given=resolution.tail,
        projection=resolution.projection,
        edge_reason=resolution.edge_reason,
        detail=resolution.detail,
        origin=resolution.origin,
    )


def _extend_by_parts(
    ids: TokenIds,
    history: Sequence[Message],
    tail: Sequence[Given],
    renderer: Renderer,
    tree: Tree,
    node: Node,
    kwargs: TemplateKwargs,
) -> tuple[TokenIds, tuple[PromptSpan, ...]] | Refusal:
    """`ids` of `node` extended by `tail`, with the spans of what was added. Each part of the tail ends with a turn
    that was sampled elsewhere, or with the tail."""
    messages, spans, start = list(history), list[PromptSpan](), len(ids)
    first = 0
    ends = [at for at, item in enumerate(tail) if isinstance(item, ServedRef)]
    for end in (*ends, len(tail)):
        copied = tree.nodes[cast("ServedRef", tail[end]).node] if end < len(tail) else None
        new = tree.resolve(tail[first:end])
        settings = kwargs if copied is None else copied.template_kwargs
        extension = renderer.extend(ids, messages, new, node.tools, template_kwargs=dict(settings) or None)
        if isinstance(extension, Refusal):
            return extension
        if len(extension.prefix_ids) != len(ids):
            raise TokenContractError(
                f"the renderer changed the prefix of node {node.id}: {len(ids)} ids became {len(extension.prefix_ids)}"
            )
        spans += _move_spans(extension.spans, by=len(ids) - start, first_message=first)
        ids += extension.added_ids
        if copied is not None:
            if not _opens_alike(extension, copied):
                return Refusal(why="opening_changed", detail=f"the turn of node {copied.id} is opened otherwise here")
            at = len(ids) - start
            ids += copied.sampled_ids
            spans.append(PromptSpan(start=at, end=len(ids) - start, role="assistant", message=end))
            messages += (*new, copied.served)
        first = end + 1
    return ids, tuple(spans)


def _move_spans(spans: Sequence[PromptSpan], *, by: int, first_message: int) -> list[PromptSpan]:
    return [
        replace(
            span,
            start=span.start + by,
            end=span.end + by,
            message=None if span.message is None else span.message + first_message,
        )
        for span in spans
    ]


def _opens_alike(extension: Extension, copied: Node) -> bool:
    # The opening decides what a turn means: text after an open think tag is reasoning.
    # The opening decides what a turn means: text after an open think tag is reasoning.
    opened_at = extension.spans[-1].start if extension.spans and extension.spans[-1].message is None else 0
    opener = extension.added_ids[opened_at:]
    return copied.given_ids[-len(opener) :] == opener


async def _render(
    resolution: Root, chars: int, renderer: Renderer, tools: Tools | None, template_kwargs: TemplateKwargs
) -> Prompt:
    def render() -> Rendered:
        rendered = renderer.render(resolution.messages, tools, template_kwargs=dict(template_kwargs) or None)
        rendered.token_ids.sha256()  # the provider will request it
        return rendered

    rendered = await run_by_size(render, chars)
    return Prompt(
        ids=rendered.token_ids,
        given_ids=rendered.token_ids,
        spans=rendered.spans,
        parent=None,
        given=resolution.given,
        projection="root",
        edge_reason=resolution.edge_reason,
        detail=resolution.detail,
        origin=resolution.origin,
    )


async def _has_same_context(
    renderer: Renderer, tree: Tree, node: Node, tools: Tools | None, kwargs: JsonMapping
) -> bool:
    """True if these template settings change only the end of the generation prompt. Compared on the root's messages."""
    root = tree.path(node)[0]
    messages = tree.given_messages(root)

    def compare() -> bool:
        renders = [
            renderer.render(messages, tools, template_kwargs=dict(s) or None).token_ids
            for s in (root.template_kwargs, kwargs)
        ]
        short, long = sorted(renders, key=len)
        # One continues where the other ends, or they differ only in the last token.
        return long[: len(short) - 1] == short[:-1]

    return await run_by_size(compare, count_chars(messages))
