"""The record of a session: an append-only token tree, request matching and a durable journal."""

from tokentrue.sessions.journal import Journal, Rewards, SessionRecord, StoreLock
from tokentrue.sessions.journal.journal import load_tree
from tokentrue.sessions.matching import Matcher, Resolution
from tokentrue.sessions.requests import SessionLimits
from tokentrue.sessions.tree import Node, ServedRef, Tree

__all__ = [
    "Journal",
    "Matcher",
    "Node",
    "Resolution",
    "Rewards",
    "ServedRef",
    "SessionLimits",
    "SessionRecord",
    "StoreLock",
    "Tree",
    "load_tree",
]  # fmt: skip
