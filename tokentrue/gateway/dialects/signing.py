"""Signatures on reasoning that clients carry."""

import base64
import hashlib
import hmac


class ReasoningSigner:
    """Signs with a session's secret; also accepts signatures by any of `older`."""

    MARK = "tt1"

    def __init__(self, secret: bytes, *older: bytes) -> None:
        self._secrets = (secret, *older)

    def _mac(self, text: str, secret: bytes) -> str:
        return base64.urlsafe_b64encode(hmac.digest(secret, text.encode(), hashlib.sha256)[:24]).decode()

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
        mark, _, rest = blob.partition(".")
        body, _, mac = rest.partition(".")
        try:
            text = base64.urlsafe_b64decode(body).decode()
        except ValueError:
            return None
        return text if mark == self.MARK and self._is_ours(mac, text) else None

    def wrap_as_bytes(self, text: str) -> str:
        """For a field that the protocol types as bytes (Google's `thoughtSignature`)."""
        return base64.b64encode(self.wrap(text).encode()).decode()

    def unwrap_bytes(self, blob: str) -> str | None:
        try:
            padded = (blob + "=" * (-len(blob) % 4)).replace("-", "+").replace("_", "/")
            wrapped = base64.b64decode(padded, validate=True).decode("ascii")
        except ValueError:
            return None
        return self.unwrap(wrapped)
