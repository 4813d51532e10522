"""The certificate's hash chain: one SHA-256 per node over its parent's hash and everything that a trainer will compute
with.

Ids are hashed as little-endian int32, log-probabilities as their float64 bits, so one flipped bit anywhere breaks every
later link.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from tokentrue.ids import TokenIds
from tokentrue.types import VersionSpan

_START = b"tokentrue certificate 1"


def float_bytes(values: array[float]) -> bytes:
    """Little-endian float64."""
    if sys.byteorder == "little":
        return values.tobytes()
    swapped = array(values.typecode, values)
    swapped.byteswap()
    return swapped.tobytes()


def start_link(*, template: str, tokenizer: str) -> bytes:
    """The link before every root: it binds the chain to what rendered it."""
    state = sha256(_START)
    for name in (template, tokenizer):
        data = name.encode()
        state.update(len(data).to_bytes(4, "little") + data)
    return state.digest()


def next_link(
    previous: bytes,
    *,
    given_ids: TokenIds,
    sampled_ids: TokenIds,
    logprobs: array[float],
    versions: Sequence[VersionSpan],
) -> bytes:
    lengths = len(given_ids).to_bytes(8, "little") + len(sampled_ids).to_bytes(8, "little")
    parts = [previous, lengths, given_ids.tobytes(), sampled_ids.tobytes(), float_bytes(logprobs)]
    parts += [b"%d,%d,%d;" % (span.start, span.end, span.version) for span in versions]
    return sha256(b"".join(parts)).digest()


def format_digest(digest: bytes) -> str:
    return f"sha256:{digest.hex()}"
