"""What a request asks for: pinned sampling values, what a training session may sample with, and the exact identity of a
request."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from tokentrue.conversation import Conversation
from tokentrue.errors import SamplingError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import digest, dumps, freeze
from tokentrue.protocols import Provider, Renderer
from tokentrue.sessions.journal.rows import sampling_from_json, sampling_to_json
from tokentrue.types import PENALTIES, Sampling, TurnRequest

_FIELDS = frozenset(f.name for f in fields(Sampling))
_CURE = "switch it off, or use a session with training=False"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSampling:
    """Sampling values that hold whatever the client asks for. A whole `Sampling` pins every field, a mapping those it
    names."""

    values: JsonMapping = field(default_factory=JsonObject)

    @classmethod
    def of(cls, sampling: Sampling | JsonMapping | None) -> PinnedSampling:
        if isinstance(sampling, Sampling):
            return cls(values={name: getattr(sampling, name) for name in _FIELDS})
        values = dict(sampling or {})
        if unknown := sorted(set(values) - _FIELDS):
            raise SamplingError(f"no sampling setting named {', '.join(unknown)}; known: {', '.join(sorted(_FIELDS))}")
        sampling_from_json(values)  # refuses bad values now, not at the first turn
        return cls(values=values)

    def apply(self, sampling: Sampling) -> Sampling:
        if not self.values:
            return sampling
        pinned = sampling_from_json(self.values)
        return replace(sampling, **{name: getattr(pinned, name) for name in self.values})


def resolve_sampling(requested: Sampling, pinned: PinnedSampling, *, renderer: Renderer, training: bool) -> Sampling:
    """Pinned values over the client's, the renderer's stop tokens added. Penalties are refused where a trainer is to
    score the tokens."""
    sampling = pinned.apply(requested)
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *sampling.stop_token_ids)))
    sampling = replace(sampling, stop_token_ids=stops, extra=freeze(sampling.extra, "sampling.extra"))
    if training and (penalties := [name for name in sampling.filters if name in PENALTIES]):
        raise SamplingError(f"no trainer can score tokens sampled under {', '.join(penalties)}; {_CURE}")
    return sampling


async def check_truthful(sampling: Sampling, provider: Provider) -> None:
    """Refuses filters under which the engine does not report the log-probabilities that it sampled from. An engine that
    has not yet said what it can do is asked."""
    if not sampling.filters:
        return
    if provider.truthful_filters is None:
        await provider.health()
    truthful = provider.truthful_filters or frozenset()
    if blind := [name for name in sampling.filters if name not in truthful]:
        raise SamplingError(f"{provider.name} cannot report true log-probabilities under {', '.join(blind)}; {_CURE}")


def identify_request(request: TurnRequest, conversation: Conversation, sampling: Sampling) -> bytes:
    """Equal for equal requests only: messages, tools, sampling, template settings, n, dialect and the named node,
    exactly."""
    try:
        settings = dumps([sampling_to_json(sampling), request.template_kwargs])
    except (TypeError, ValueError) as error:
        raise SamplingError(f"sampling.extra and template_kwargs must be plain JSON values: {error}") from error
    named = () if request.continues is None else (request.continues.encode(),)
    return digest(conversation.digest, settings, b"%d" % request.n, request.dialect.encode(), *named)


def format_identity(identity: bytes) -> str:
    """As a node keeps it. Records without the prefix are older and name a request by looser keys."""
    return f"exact:{identity.hex()}"


def is_same_request(recorded: str | None, identity: bytes) -> bool:
    return recorded is None or not recorded.startswith("exact:") or recorded == format_identity(identity)
