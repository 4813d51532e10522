"""Translates exceptions to what a client is told: a status, a stable code, a field, one sentence."""

from __future__ import annotations

from tokentrue.errors import (
    EngineError,
    EngineRejected,
    EngineTimeout,
    InputError,
    JournalError,
    LimitExceeded,
    MessageError,
    PromptTooLong,
    RenderError,
    SessionConflict,
    SessionElsewhere,
    SessionNotFound,
    TokenTrueError,
)
from tokentrue.gateway.dialects.base import Problem

STATUS: tuple[tuple[type[TokenTrueError], int], ...] = (  # first match wins: children before parents
    (InputError, 400),
    (RenderError, 422),
    (SessionNotFound, 404),
    (SessionElsewhere, 503),
    (SessionConflict, 409),
    (LimitExceeded, 413),
    (JournalError, 503),
    (EngineTimeout, 504),
    (PromptTooLong, 400),
    (EngineRejected, 502),
    (EngineError, 502),
)
LONGEST = 600


class HttpError(TokenTrueError):
    """A request that the gateway itself refuses."""

    def __init__(
        self, status: int, code: str, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.problem = Problem(status=status, code=code, message=message, field=field, retry_after_s=retry_after_s)


def problem_from(error: BaseException) -> Problem:
    if isinstance(error, HttpError):
        return error.problem
    if not isinstance(error, TokenTrueError):
        return Problem(status=500, code="internal", message="the gateway failed on this request; its log has the cause")
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    if isinstance(error, JournalError):  # its words name the store, which is no business of a client
        message = "the gateway's record cannot be read or written now; send this again. The gateway's log has the cause"
        return Problem(status=status, code=error.code, message=message, retry_after_s=1.0)
    field = error.field if isinstance(error, MessageError) else None
    retry = getattr(error, "retry_after_s", None)
    if isinstance(error, LimitExceeded) and retry is not None:
        status = 429
    return Problem(status=status, code=error.code, message=str(error)[:LONGEST], field=field, retry_after_s=retry)
