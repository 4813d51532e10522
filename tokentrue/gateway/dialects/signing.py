"""Signatures on reasoning that clients carry."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac


class ReasoningSigner:
    """Signs with a session's secret, unknown to its client; also accepts signatures by any of `older`."""

    MARK = "tt1"

    def __init__(self, secret: bytes, *older: bytes) -> None:
        self._secrets = (secret, *older)

    def _mac(self, text: str, secret: bytes) -> str:
        digest = hmac.digest(secret, text.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest[:24]).decode()

    def _is_ours(self, mac: str, text: str) -> bool:
        return any(hmac.compare_digest(mac.encode(), self._mac(text, secret).encode()) for secret in self._secrets)

    def sign(self, text: str) -> str:
        return f"{self.MARK}.{self._mac(text, self._secrets[0])}"

    def holds(self, signature: str, text: str) -> bool:
        """True also for a foreign signature, which cannot be checked."""
        mark, dot, mac = signature.partition(".")
        return not (mark == self.MARK and dot) or self._is_ours(mac, text)

    def wrap(self, text: str) -> str:
        body = base64.urlsafe_b64encode(text.encode()).decode()
        return f"{self.MARK}.{body}.{self._mac(text, self._secrets[0])}"

    def unwrap(self, blob: str) -> str | None:
        """Inverse of `wrap`; None if the blob is not ours."""
        parts = blob.split(".")
        if len(parts) != 3 or parts[0] != self.MARK:
            return None
        try:
            text = base64.urlsafe_b64decode(parts[1]).decode()
        except (binascii.Error, ValueError):
            return None
        return text if self._is_ours(parts[2], text) else None

    def wrap_as_bytes(self, text: str) -> str:
        """`wrap` for a field that the protocol types as bytes (Google's `thoughtSignature`)."""
        return base64.b64encode(self.wrap(text).encode()).decode()

    def unwrap_bytes(self, blob: str) -> str | None:
        """Inverse of `wrap_as_bytes`; accepts both base64 alphabets."""
        try:
            padded = blob + "=" * (-len(blob) % 4)
            wrapped = base64.b64decode(padded.translate({ord("-"): "+", ord("_"): "/"}), validate=True).decode("ascii")
        except (binascii.Error, UnicodeError, ValueError):
            return None
        return self.unwrap(wrapped)
