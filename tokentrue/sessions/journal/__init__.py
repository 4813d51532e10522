"""The durable store: SQLite in WAL mode, or PostgreSQL (`postgres.py`, imported only when used). Read `journal.py`
first."""

from tokentrue.sessions.journal.database import is_postgres
from tokentrue.sessions.journal.journal import Journal, StoreSecret
from tokentrue.sessions.journal.opening import open_journal
from tokentrue.sessions.journal.rows import Rewards, Row, SessionRecord, copy_metadata, read_reward
from tokentrue.sessions.journal.sqlite import StoreLock

__all__ = [
    "Journal",
    "Rewards",
    "Row",
    "SessionRecord",
    "StoreLock",
    "StoreSecret",
    "copy_metadata",
    "is_postgres",
    "open_journal",
    "read_reward",
]
