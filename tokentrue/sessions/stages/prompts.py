"""A resolution becomes a prompt: the recorded ids, untouched, and what the renderer adds; or a new root where it
refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokentrue.errors import TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.protocols import Renderer
from tokentrue.sessions.limits import SessionLimits
from tokentrue.sessions.matching.matcher import Continue, Resolution, Root, root_after
from tokentrue.sessions.offload import count_chars, run_by_size
from tokentrue.sessions.tree import Given, Node, Tree, TurnKey
from tokentrue.tracing import traced
from tokentrue.types import PromptSpan, Refusal, Rendered, TemplateKwargs, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the engine is given, and where it comes from. `ids == full_ids(parent) + given_ids`."""

    ids: TokenIds
    given_ids: TokenIds
    spans: tuple[PromptSpan, ...]  # which of the given ids come from which message
    parent: Node | None
    given: tuple[Given, ...]
    projection: str
    why: str | None
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
    """`in_flight` counts the turns that are being generated."""
    if isinstance(resolution, Continue):
        chars = count_chars(resolution.tail)
        limits.check_text(chars)
        extended = await _extend(resolution, chars, renderer, tree, tools, template_kwargs)
        if isinstance(extended, Prompt):
            return extended
        node, tail = resolution.node, resolution.tail
        resolution = root_after(tree, node, tail, tools, in_flight, why=extended.why, detail=extended.detail)
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
    node, tail, kwargs = resolution.node, resolution.tail, dict(template_kwargs)
    if kwargs != dict(node.template_kwargs) and not await _has_same_context(renderer, tree, node, tools, kwargs):
        return Refusal(
            why="template_kwargs_changed",
            detail=f"template settings that shape the prompt differ from those of node {node.id}",
        )
    prefix, history = tree.full_ids(node), tree.messages(node)
    extension = await run_by_size(
        renderer.extend, chars, prefix, history, tail, node.tools, template_kwargs=kwargs or None
    )
    if isinstance(extension, Refusal):
        return extension
    if len(extension.prefix_ids) != len(prefix):
        raise TokenContractError(
            f"the renderer changed the prefix of node {node.id}: {len(prefix)} ids became {len(extension.prefix_ids)}"
        )
    given_ids = extension.added_ids
    return Prompt(
        ids=prefix + given_ids,
        given_ids=given_ids,
        spans=extension.spans,
        parent=node,
        given=tail,
        projection=resolution.projection,
        why=resolution.why,
        detail=resolution.detail,
    )


async def _render(
    resolution: Root, chars: int, renderer: Renderer, tools: Tools | None, template_kwargs: TemplateKwargs
) -> Prompt:
    def render() -> Rendered:
        rendered = renderer.render(resolution.messages, tools, template_kwargs=dict(template_kwargs) or None)
        rendered.token_ids.sha256()  # the provider will ask for it
        return rendered

    rendered = await run_by_size(render, chars)
    return Prompt(
        ids=rendered.token_ids,
        given_ids=rendered.token_ids,
        spans=rendered.spans,
        parent=None,
        given=resolution.given,
        projection="root",
        why=resolution.why,
        detail=resolution.detail,
        origin=resolution.origin,
    )


async def _has_same_context(
    renderer: Renderer, tree: Tree, node: Node, tools: Tools | None, kwargs: Mapping[str, Any]
) -> bool:
    """Do these template settings change only how the generation prompt ends? Compared on the root's own messages."""
    root = tree.path(node)[0]
    messages = tree.given_messages(root)

    def compare() -> bool:
        renders = [
            renderer.render(messages, tools, template_kwargs=dict(s) or None).token_ids
            for s in (root.template_kwargs, kwargs)
        ]
        short, long = sorted(renders, key=len)
        return (
            long[: len(short) - 1] == short[:-1]
        )  # one goes on where the other ends, or they part at the very last token

    return await run_by_size(compare, count_chars(messages))
