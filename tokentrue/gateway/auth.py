"""A session's API key contains its id, so that any worker finds its owner, and a secret whose hash is stored."""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress

from tokentrue.errors import InputError, SessionNotFound
from tokentrue.gateway.asgi import HttpError, read_header
from tokentrue.records import record

SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
SHORTEST_KEY = 16
KEY_HEADERS = (b"x-api-key", b"x-goog-api-key")
SESSION_HEADER = b"x-session-id"
Headers = Iterable[tuple[bytes, bytes]]


def check_session_id(value: str) -> str:
    if not SESSION_ID.fullmatch(value):
        allowed = "1 to 128 of the characters A-Z a-z 0-9 . _ : -, starting with a letter or a digit"
        raise InputError(f"session_id: use {allowed}")
    return value


def new_session_key(session_id: str) -> str:
    return f"tt-{session_id}-{secrets.token_hex(20)}"


def new_admin_key() -> str:
    return f"tta-{secrets.token_hex(20)}"


def is_weak_key(key: str) -> bool:
    return len(key) < SHORTEST_KEY or len(set(key)) < 8


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


@record
class SessionAccess:
    """`key_hash`: what the presented key must match; None for the admin key."""

    session_id: str
    key_hash: str | None
    may_create: bool = False

    def check(self, key_hash: str | None) -> None:
        if self.key_hash is not None and (key_hash is None or not hmac.compare_digest(self.key_hash, key_hash)):
            raise invalid_key()

    @contextmanager
    def hide_session(self) -> Generator[None]:
        """A wrong key does not reveal whether the session exists."""
        try:
            yield
        except SessionNotFound:
            if self.key_hash is not None:
                raise invalid_key() from None
            raise


def invalid_key() -> HttpError:
    return HttpError(401, "invalid_key", "invalid API key; POST /sessions returns one")


class ApiKeys:
    def __init__(self, *, admin_key: str) -> None:
        self._admin = admin_key.encode()

    def is_admin(self, presented: str) -> bool:
        return hmac.compare_digest(presented.encode(), self._admin)

    def authenticate(self, headers: Headers, named: str | None, in_url: str | None = None) -> SessionAccess:
        """The session is `named` in the path, or in the key, or, with the admin key, in a header. `in_url`: a key from
        the query (Google)."""
        presented = read_key(headers) or in_url
        if presented is None:
            raise HttpError(
                401, "missing_key", "send the session's api_key as Authorization: Bearer, x-api-key or x-goog-api-key"
            )
        if self.is_admin(presented):
            if named is not None:
                return SessionAccess(session_id=named, key_hash=None)
            if (in_header := read_header(headers, SESSION_HEADER)) is None:
                cure = "use /sessions/{id}/v1/…, the session's api_key, or the header X-Session-ID"
                raise HttpError(400, "no_session", f"the admin key names no session; {cure}")
            return SessionAccess(session_id=check_session_id(in_header), key_hash=None, may_create=True)
        if (owner := session_from_key(presented)) is None:
            raise invalid_key()
        if named not in (None, owner):
            raise HttpError(403, "wrong_session", "this key belongs to another session")
        return SessionAccess(session_id=owner, key_hash=hash_key(presented))

    def require_admin(self, headers: Headers, *, basic: bool = False) -> None:
        presented = read_key(headers, basic=basic)
        if presented is None:
            raise HttpError(401, "missing_key", "no key was sent; send the admin key as Authorization: Bearer")
        if self.is_admin(presented):
            return
        if session_from_key(presented) is None:
            raise HttpError(401, "invalid_key", "the key that was sent is not this gateway's admin key")
        raise HttpError(403, "not_admin", "the key that was sent is a session's; this needs the admin key")


def session_from_key(presented: str) -> str | None:
    mark, _, rest = presented.partition("-")
    session_id, _, secret = rest.rpartition("-")
    return session_id if mark == "tt" and len(secret) == 40 and SESSION_ID.fullmatch(session_id) else None


def read_key(headers: Headers, *, basic: bool = False) -> str | None:
    bearer = None
    for name, value in headers:
        kind, _, credentials = value.partition(b" ")
        if name in KEY_HEADERS and value:
            return value.strip().decode("latin-1")
        if name == b"authorization" and kind.lower() == b"bearer":
            bearer = credentials.strip()
        elif name == b"authorization" and kind.lower() == b"basic" and basic:
            with suppress(ValueError):
                bearer = base64.b64decode(credentials, validate=True).partition(b":")[2]
    return bearer.decode("latin-1") if bearer else None
