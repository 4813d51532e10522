"""Sealed reasoning as a `thoughtSignature`, which the protocol types as bytes: base64, in either alphabet on the way
back."""

from __future__ import annotations

import base64
import binascii

from tokentrue.gateway.dialects.signing import ReasoningSigner


def sign_reasoning(signer: ReasoningSigner, reasoning: str) -> str:
    return base64.b64encode(signer.wrap(reasoning).encode()).decode()


def read_signature(signer: ReasoningSigner, signature: str) -> str | None:
    """The reasoning of `sign_reasoning`; None for a foreign signature, which cannot be read."""
    try:
        padded = signature + "=" * (-len(signature) % 4)
        blob = base64.b64decode(padded.translate({ord("-"): "+", ord("_"): "/"}), validate=True).decode("ascii")
    except (binascii.Error, UnicodeError, ValueError):
        return None
    return signer.unwrap(blob)
