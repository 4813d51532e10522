"""What the viewer reads: sessions, their nodes and branches, in one shape for a samples file, a store and a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tokentrue.types import Ids, Message, Messages, Parsed, Rendered, Sample, TemplateKwargs, Tools

SourceKind = Literal["file", "store", "gateway"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMessages:
    """The messages of one turn: those given before it, and what was served (None where the record does not say)."""

    given: Messages
    served: Message | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One path of a session's tree, root to leaf, as a sample.

    `turns`, `tools` and `template_kwargs` are there where the source holds messages (a store does, a samples file does not).
    `inserted` are token ranges that the template put between messages; None where the source cannot tell.
    """

    sample: Sample
    leaf: str
    turns: tuple[TurnMessages, ...] | None = None
    tools: Tools | None = None
    template_kwargs: TemplateKwargs = field(default_factory=dict[str, Any])
    inserted: tuple[tuple[int, int], ...] | None = None
    entropy: Sequence[float | None] | None = None
    projection: str = ""  # how the client's last request replayed the history: "exact", "reasoning_dropped", …
    abandoned: str | None = None  # why no token of this branch's leaf is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """One row of the session list. `untrained` maps a reason to its number of sampled tokens."""

    session_id: str
    group: str | None
    state: str
    created: float | None
    reward: float | None
    turns: int
    branches: int
    forks: int
    tokens: int
    sampled: int
    trained: int
    untrained: Mapping[str, int]
    versions: tuple[int, int] | None
    in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    summary: SessionSummary
    nodes: tuple[Mapping[str, Any], ...]
    branches: tuple[Branch, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


class RecordSource(Protocol):
    """`live`: what it holds may grow while it is being looked at."""

    @property
    def kind(self) -> SourceKind: ...
    @property
    def name(self) -> str: ...
    @property
    def live(self) -> bool: ...

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        """Newest first, and how many there are in all."""
        ...

    def load_session(self, session_id: str) -> SessionView:
        """Raises `SessionNotFound`."""
        ...

    def load_group(self, group: str) -> list[SessionView]: ...

    def close(self) -> None: ...


class TokenSpelling(Protocol):
    def piece(self, token_id: int) -> bytes: ...


class ViewRenderer(Protocol):
    """What the viewer needs of `tokentrue.renderers.Renderer`."""

    @property
    def codec(self) -> Any: ...
    @property
    def structure(self) -> Any: ...
    def decode(self, token_ids: Ids) -> str: ...
    def encode_sampled(self, text: str) -> list[int]: ...
    def render(self, messages: Messages, tools: Tools | None = None, *, template_kwargs: TemplateKwargs | None = None) -> Rendered: ...
    def parse(self, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed: ...


def count_forks(parents: Mapping[str, str | None]) -> int:
    """Branch points: for every node with several children, and for several roots, one less than their number."""
    children: dict[str | None, int] = {}
    for parent in parents.values():
        children[parent] = children.get(parent, 0) + 1
    return sum(count - 1 for count in children.values())


def view_node(described: Mapping[str, Any], reasons: Mapping[str, str]) -> dict[str, Any]:
    """A node of `describe_node`, as the page reads it. `reasons` says by node id why its tokens are not trained."""
    return {
        **described,
        "policy_versions": [version for _, _, version in described["policy_versions"]],
        "malformed_calls": [attempt["status"] for attempt in described["attempts"]],
        "untrained": reasons.get(described["id"]),
    }
