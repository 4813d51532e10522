"""Builds a prompt: the recorded ids, untouched, and what the renderer adds; or a new root if it refuses. Of turns
sampled elsewhere it adds the recorded ids."""

from dataclasses import replace
from typing import cast

from tokentrue.errors import TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.protocols import Renderer
from tokentrue.records import record
from tokentrue.sessions.matching import Matcher, Resolution
from tokentrue.sessions.requests import SessionLimits, count_chars, run_by_size
from tokentrue.sessions.tree import Node, ServedRef, Tree
from tokentrue.tracing import traced
from tokentrue.types import ImageRun, PastMessages, PromptSpan, Refusal, Rendered, TemplateKwargs, Tools, shift_images


@record
class Prompt:
    """`ids == full_ids(resolution.parent) + given_ids`."""

    ids: TokenIds
    given_ids: TokenIds
    spans: tuple[PromptSpan, ...]  # which of the given ids come from which message
    resolution: Resolution
    images: tuple[ImageRun, ...] = ()  # of the given ids, counted from their start


@traced("prompt")
async def build_prompt(
    resolution: Resolution,
    tools: Tools | None,
    template_kwargs: TemplateKwargs,
    matcher: Matcher,
    limits: SessionLimits,
) -> Prompt:
    tree, renderer = matcher.tree, matcher.renderer
    if (parent := resolution.parent) is not None:
        chars = count_chars(tree.expand(resolution.given))
        limits.check_text(chars)
        extended = await _extend(resolution, parent, chars, renderer, tree, tools, template_kwargs)
        if isinstance(extended, Prompt):
            return extended
        edge = extended.why, extended.detail
        root = matcher.root_after(parent, resolution.given, tools, edge, resolution.started)
        resolution = replace(root, origin=resolution.origin or parent)
    messages = tree.expand(resolution.given)
    chars = count_chars(messages) + count_chars(tools or ())
    limits.check_text(chars)

    def render() -> Rendered:
        rendered = renderer.render(messages, tools, template_kwargs=template_kwargs)
        rendered.token_ids.sha256()  # the provider will request it
        return rendered

    with matcher.hold(resolution.turn_key):  # the caller holds it from the prompt on
        rendered = await run_by_size(render, chars)
    ids = rendered.token_ids
    return Prompt(ids=ids, given_ids=ids, spans=rendered.spans, resolution=resolution, images=rendered.images)


def prompt_from_ids(resolution: Resolution, ids: TokenIds) -> Prompt:
    start = 0 if resolution.parent is None else resolution.parent.length
    return Prompt(ids=ids, given_ids=ids[start:], spans=(), resolution=resolution)


async def _extend(
    resolution: Resolution,
    node: Node,
    chars: int,
    renderer: Renderer,
    tree: Tree,
    tools: Tools | None,
    template_kwargs: TemplateKwargs,
) -> Prompt | Refusal:
    copied = [tree.nodes[item.node] for item in resolution.given if isinstance(item, ServedRef)]
    for settings in (template_kwargs, *(copy.template_kwargs for copy in copied)):
        if settings != node.template_kwargs and not await _has_same_context(renderer, tree, node, tools, settings):
            return Refusal(
                why="template_kwargs_changed",
                detail=f"template settings that shape the prompt differ from those of node {node.id}",
            )
    ids, messages = tree.full_ids(node), tree.messages(node)  # not in the thread: they renew the tree's cached path
    return await run_by_size(_extend_by_parts, chars, ids, messages, resolution, node, renderer, tree, template_kwargs)


def _extend_by_parts(
    ids: TokenIds,
    messages: PastMessages,
    resolution: Resolution,
    node: Node,
    renderer: Renderer,
    tree: Tree,
    template_kwargs: TemplateKwargs,
) -> Prompt | Refusal:
    """Each part of the given messages ends with a turn that was sampled elsewhere, or with the last message."""
    given, spans, start, first = resolution.given, list[PromptSpan](), len(ids), 0
    images: list[ImageRun] = []
    ends = [at for at, item in enumerate(given) if isinstance(item, ServedRef)]
    for end in (*ends, len(given)):
        copied = tree.nodes[cast("ServedRef", given[end]).node] if end < len(given) else None
        new = tree.expand(given[first:end])
        settings = template_kwargs if copied is None else copied.template_kwargs
        extension = renderer.extend(ids, messages, new, node.tools, template_kwargs=settings)
        if isinstance(extension, Refusal):
            return extension
        if len(extension.prefix_ids) != len(ids):
            raise TokenContractError(
                f"the renderer changed the prefix of node {node.id}: {len(ids)} ids became {len(extension.prefix_ids)}"
            )
        by = len(ids) - start
        for span in extension.spans:
            message = None if span.message is None else span.message + first
            spans.append(replace(span, start=span.start + by, end=span.end + by, message=message))
        images += shift_images(extension.images, by)
        ids += extension.added_ids
        if copied is not None:
            # The opening decides what a turn means: text after an open think tag is reasoning.
            is_opened = extension.spans and extension.spans[-1].message is None
            opener = extension.added_ids[extension.spans[-1].start if is_opened else 0 :]
            if copied.given_ids[-len(opener) :] != opener:
                return Refusal(why="opening_changed", detail=f"the turn of node {copied.id} is opened otherwise here")
            at = len(ids) - start
            ids += copied.sampled_ids
            spans.append(PromptSpan(start=at, end=len(ids) - start, role="assistant", message=end))
            messages = messages.followed_by((*new, copied.served))
        first = end + 1
    return Prompt(ids=ids, given_ids=ids[start:], spans=tuple(spans), resolution=resolution, images=tuple(images))


async def _has_same_context(
    renderer: Renderer, tree: Tree, node: Node, tools: Tools | None, template_kwargs: TemplateKwargs
) -> bool:
    root = tree.path(node)[0]
    messages = tree.given_messages(root)

    def compare() -> bool:
        renders = [
            renderer.render(messages, tools, template_kwargs=settings).token_ids
            for settings in (root.template_kwargs, template_kwargs)
        ]
        short, long = sorted(renders, key=len)
        # One continues where the other ends, or they differ only in the last token.
        return long[: len(short) - 1] == short[:-1]

    return await run_by_size(compare, count_chars(messages))
