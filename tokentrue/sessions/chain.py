"""The hash chain of the certificate: one SHA-256 per node over its parent's hash and everything that a trainer will compute with.

Ids are hashed as little-endian int32, log-probabilities as their float64 bits, so one flipped bit anywhere breaks every later link.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from tokentrue.types import VersionSpan

_START = b"tokentrue certificate 1"


def little_endian(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "little":
        return values.tobytes()
    swapped = array(values.typecode, values)
    swapped.byteswap()
    return swapped.tobytes()


def start(*, template: str, tokenizer: str) -> bytes:
    """The link before every root: it binds the chain to what rendered it."""
    state = sha256(_START)
    for name in (template, tokenizer):
        data = name.encode()
        state.update(len(data).to_bytes(4, "little") + data)
    return state.digest()


def link(
    previous: bytes,
    *,
    given_ids: array[int],
    sampled_ids: array[int],
    logprobs: array[float],
    versions: Sequence[VersionSpan],
) -> bytes:
    state = sha256(previous)
    state.update(len(given_ids).to_bytes(8, "little") + len(sampled_ids).to_bytes(8, "little"))
    state.update(little_endian(given_ids))
    state.update(little_endian(sampled_ids))
    state.update(little_endian(logprobs))
    for span in versions:
        state.update(b"%d,%d,%d;" % (span.start, span.end, span.version))
    return state.digest()


def printed(digest: bytes) -> str:
    return f"sha256:{digest.hex()}"
