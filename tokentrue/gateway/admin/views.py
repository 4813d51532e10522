"""The record as an administrator sees it, in plain JSON values."""

from __future__ import annotations

from typing import Any

from tokentrue.samples import coverage_to_json
from tokentrue.sessions.description import describe_record, describe_session
from tokentrue.turn import Session
from tokentrue.types import Coverage

record_json = describe_record


def session_json(session: Session, coverage: Coverage, *, in_flight: int) -> dict[str, Any]:
    return {**describe_session(session.record, session.tree, coverage_to_json(coverage)), "in_flight": in_flight}
