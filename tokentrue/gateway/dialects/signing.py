"""The signature on reasoning that a client carries for the gateway: what comes back is known to be what was served."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac


class ReasoningSigner:
    """Signs text with a secret of one session."""

    MARK = "tt1"

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def _mac(self, text: str) -> str:
        digest = hmac.digest(self._secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return base64.urlsafe_b64encode(digest[:24]).decode()

    def sign(self, text: str) -> str:
        return f"{self.MARK}.{self._mac(text)}"

    def holds(self, signature: str, text: str) -> bool:
        """True for our own signature of this text and for a foreign signature, which cannot be checked."""
        if not signature.startswith(self.MARK + "."):
            return True
        return hmac.compare_digest(signature.encode(), self.sign(text).encode())

    def wrap(self, text: str) -> str:
        body = base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()
        return f"{self.MARK}.{body}.{self._mac(text)}"

    def unwrap(self, blob: str) -> str | None:
        """The text of `wrap`; None where the blob is not ours."""
        parts = blob.split(".")
        if len(parts) != 3 or parts[0] != self.MARK:
            return None
        try:
            text = base64.urlsafe_b64decode(parts[1]).decode("utf-8", "surrogatepass")
        except (binascii.Error, ValueError):
            return None
        return text if hmac.compare_digest(parts[2].encode(), self._mac(text).encode()) else None
