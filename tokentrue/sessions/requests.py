"""What a request asks for, settled: pinned sampling values, and a digest that names the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from tokentrue.errors import SamplingError
from tokentrue.sessions.rows import dumps, sampling_from_json, sampling_to_json
from tokentrue.types import Sampling, TurnRequest

_FIELDS = frozenset(f.name for f in fields(Sampling))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Sampling values that hold whatever the client asks for. A whole `Sampling` pins every field, a mapping those it names."""

    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, sampling: Sampling | Mapping[str, Any] | None) -> Pinned:
        if isinstance(sampling, Sampling):
            return cls(values={name: getattr(sampling, name) for name in _FIELDS})
        values = dict(sampling or {})
        if unknown := sorted(set(values) - _FIELDS):
            raise SamplingError(f"no sampling setting named {', '.join(unknown)}; known: {', '.join(sorted(_FIELDS))}")
        try:
            sampling_from_json(values)  # refuse bad values now, not at the first turn
        except TypeError as error:
            raise SamplingError(f"pinned sampling: {error}") from error
        return cls(values=values)

    def over(self, sampling: Sampling) -> Sampling:
        if not self.values:
            return sampling
        pinned = sampling_from_json(self.values)
        return replace(sampling, **{name: getattr(pinned, name) for name in self.values})


class Settled(NamedTuple):
    """A client's sampling with the pinned values over it, and the same as JSON: mostly the same object from turn to turn."""

    asked: Sampling
    sampling: Sampling
    written: bytes

    @classmethod
    def of(cls, asked: Sampling, sampling: Sampling) -> Settled:
        return cls(asked, sampling, _plain(sampling_to_json(sampling)))


def request_digest(request: TurnRequest, settled: Settled, place: str | None, key: bytes) -> str:
    """The same request, whatever spelling its replayed history has: same place in the record, same new messages, same settings."""
    kwargs = _plain(dict(request.template_kwargs)) if request.template_kwargs else b""
    fields = (key, (place or "").encode(), b"%d" % request.n, kwargs, settled.written)
    return blake2b(b"\0".join(fields), digest_size=16).hexdigest()


def _plain(value: Any) -> bytes:
    try:
        return dumps(value)
    except TypeError as error:
        raise SamplingError(f"sampling.extra and template_kwargs must be plain JSON values: {error}") from error
