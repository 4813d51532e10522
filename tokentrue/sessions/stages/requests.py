"""A request's sampling, with pinned values over the client's, and its identity."""

from __future__ import annotations

from dataclasses import fields, replace

from tokentrue.conversation import Conversation
from tokentrue.errors import SamplingError
from tokentrue.json_types import JsonMapping
from tokentrue.plain_json import digest, dumps, freeze
from tokentrue.protocols import Provider, Renderer
from tokentrue.sessions.journal.rows import sampling_to_json
from tokentrue.types import PENALTIES, Sampling, TurnRequest

_FIELDS = frozenset(field.name for field in fields(Sampling))
_CURE = "switch it off, or use a session with training=False"


def check_pinned(sampling: Sampling | JsonMapping | None) -> JsonMapping:
    """Sampling values that override the client's: of a `Sampling` every field, of a mapping those it names."""
    if isinstance(sampling, Sampling):
        return {name: getattr(sampling, name) for name in _FIELDS}
    values = dict(sampling or {})
    if unknown := sorted(set(values) - _FIELDS):
        raise SamplingError(f"no sampling setting named {', '.join(unknown)}; known: {', '.join(sorted(_FIELDS))}")
    Sampling(**values)  # refuses bad values now, not at the first turn
    return values


def resolve_sampling(sampling: Sampling, pinned: JsonMapping, *, renderer: Renderer, training: bool) -> Sampling:
    """Pinned values over the client's, plus the renderer's stop tokens. Refuses penalties if a trainer will score
    the tokens."""
    if pinned:
        values = Sampling(**pinned)
        sampling = replace(sampling, **{name: getattr(values, name) for name in pinned})
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *sampling.stop_token_ids)))
    sampling = replace(sampling, stop_token_ids=stops, extra=freeze(sampling.extra, "sampling.extra"))
    if training and (penalties := [name for name in sampling.filters if name in PENALTIES]):
        raise SamplingError(f"no trainer can score tokens sampled under {', '.join(penalties)}; {_CURE}")
    return sampling


async def check_truthful(sampling: Sampling, provider: Provider) -> None:
    """Refuses filters under which the engine does not report the log-probabilities that it sampled from."""
    if not sampling.filters:
        return
    if provider.truthful_filters is None:
        await provider.health()
    truthful = provider.truthful_filters or frozenset()
    if blind := [name for name in sampling.filters if name not in truthful]:
        raise SamplingError(f"{provider.name} cannot report true log-probabilities under {', '.join(blind)}; {_CURE}")


def identify_request(request: TurnRequest, conversation: Conversation, sampling: Sampling) -> bytes:
    settings = dumps([sampling_to_json(sampling), request.template_kwargs])
    named = () if request.continues is None else (request.continues.encode(),)
    if request.prompt_ids is not None:
        named = (*named, request.prompt_ids.tobytes())
    return digest(conversation.digest, settings, b"%d" % request.n, request.dialect.encode(), *named)


def format_identity(identity: bytes) -> str:
    """As a node stores it. Records without the prefix identify a request by looser keys."""
    return f"exact:{identity.hex()}"


def is_same_request(recorded: str | None, identity: bytes) -> bool:
    return recorded is None or not recorded.startswith("exact:") or recorded == format_identity(identity)
