"""From the journal back to a tree: what `Session.open` and the exporters read."""

from __future__ import annotations

from tokentrue.ids import TokenIds
from tokentrue.sessions.journal.journal import Journal
from tokentrue.sessions.journal.records import SessionRecord
from tokentrue.sessions.journal.rows import Row, node_from_row
from tokentrue.sessions.tree import Tree


def tree_from_rows(record: SessionRecord, rows: list[Row]) -> Tree:
    """Every node is checked as if it were committed now: ids, log-probabilities, prompt digest and certificate must
    fit."""
    tree = Tree(template=record.template, tokenizer=record.tokenizer)
    for row in rows:
        parent = None if row.parent is None else tree.get(row.parent)
        tree.add(node_from_row(row, parent, tree.prompt_digest(parent, TokenIds.from_bytes(row.given_ids))))
    for request_key, node_ids in record.late_keys.items():
        tree.add_key(request_key, node_ids)
    return tree


def load_tree(journal: Journal, session_id: str) -> tuple[SessionRecord, Tree]:
    record = journal.get(session_id)
    return record, tree_from_rows(record, journal.rows(session_id))
