"""The record of a session: an append-only token tree, request matching and a durable journal."""

from tokentrue.sessions.journal import Journal, Rewards, SessionRecord, StoreLock
from tokentrue.sessions.journal.journal import load_tree
from tokentrue.sessions.limits import SessionLimits
from tokentrue.sessions.matching.matcher import Continue, Matcher, Root
from tokentrue.sessions.tree import Node, ServedRef, Tree

__all__ = [
    "Continue",
    "Journal",
    "Matcher",
    "Node",
    "Rewards",
    "Root",
    "ServedRef",
    "SessionLimits",
    "SessionRecord",
    "StoreLock",
    "Tree",
    "load_tree",
]  # fmt: skip
