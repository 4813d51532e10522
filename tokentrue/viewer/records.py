"""The viewer's data types, for a samples file, a store and a gateway."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal, Protocol

from tokentrue.errors import FileFormatError, SessionNotFound
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import is_utf8
from tokentrue.protocols import Renderer
from tokentrue.records import record
from tokentrue.types import Coverage, Message, Messages, Sample, TemplateKwargs, Tools

SourceKind = Literal["file", "store", "gateway"]
ADDRESSED = ("session_id", "sample_id", "group")  # names that are parts of the page's addresses


@record
class TurnMessages:
    given: Messages
    served: Message | None


@record
class Branch:
    """One path of a session's tree. `turns`, `tools` and `template_kwargs` are set if the source has messages;
    `inserted`: token ranges that the template put between them, None if unknown."""

    sample: Sample
    leaf: str
    turns: tuple[TurnMessages, ...] | None = None
    tools: Tools | None = None
    template_kwargs: TemplateKwargs = field(default_factory=JsonObject)
    inserted: tuple[tuple[int, int], ...] | None = None
    entropy: Sequence[float | None] | None = None
    projection: str = ""  # how the client's last request replayed the history: "exact", "reasoning_dropped", …
    abandoned: str | None = None  # why no token of this branch's leaf is trained


@record
class SessionSummary:
    """`untrained`: sampled tokens by reason; `task`: how the first user message begins; `fork`: the reason of
    the first one."""

    session_id: str
    group: str | None
    state: str
    created: float | None
    reward: float | None
    turns: int = 0
    branches: int = 0
    forks: int = 0
    tokens: int = 0
    sampled: int = 0
    trained: int = 0
    untrained: Mapping[str, int] = field(default_factory=dict[str, int])
    versions: tuple[int, int] | None = None
    task: str = ""
    fork: str | None = None


@record
class SessionView:
    summary: SessionSummary
    nodes: tuple[JsonMapping, ...]
    branches: tuple[Branch, ...]
    metadata: JsonMapping = field(default_factory=JsonObject)


class RecordSource:
    """`live`: its content may grow while it is viewed."""

    kind: SourceKind
    name: str
    live = True

    def is_active(self) -> bool:
        return self.live

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        raise NotImplementedError

    def load_session(self, session_id: str) -> SessionView:
        raise NotImplementedError

    def load_group(self, group: str) -> list[SessionView]:
        raise NotImplementedError

    def load_image(self, session_id: str, sha256: str) -> bytes:
        raise SessionNotFound(f"no file of image {sha256!r} in {self.name}")

    def close(self) -> None:
        pass


class ViewRenderer(Renderer, Protocol):
    @property
    def codec(self) -> Any: ...
    @property
    def structure(self) -> Any: ...


def summarise(
    head: SessionSummary, nodes: Sequence[JsonMapping], coverage: Coverage, rewards: Sequence[float | None]
) -> SessionSummary:
    """`rewards` has one per sample; the session's is their mean, or that of `head`."""
    versions = [version for node in nodes for version in node["policy_versions"]]
    known = [reward for reward in rewards if reward is not None]
    return replace(
        head,
        reward=sum(known) / len(known) if known else head.reward,
        turns=len(nodes),
        branches=len(rewards),
        forks=sum(count - 1 for count in Counter(node["parent"] for node in nodes).values()),  # also of roots
        tokens=sum(node["given_tokens"] + node["sampled_tokens"] for node in nodes),
        sampled=coverage.sampled,
        trained=coverage.trained,
        untrained=coverage.untrained_by_reason,
        versions=(min(versions), max(versions)) if versions else None,
        fork=next((node["why"] for node in nodes if node["why"] not in (None, "first")), None),
    )


def check_names(record: Sample | SessionSummary) -> None:
    for part in ADDRESSED:
        name = getattr(record, part, None) or ""
        if not is_utf8(name):
            raise FileFormatError(f"{part} {name!r} holds a lone surrogate, which no page address can hold; rename it")
