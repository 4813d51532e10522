"""tokentrue sessions STORE_OR_URL [list | show ID | delete ID]: the sessions of a journal or of a running gateway."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, cast

import typer

from tokentrue.cli.options import AsJson, JournalOrUrl, connect, is_url, open_recorded, require_store, require_utf8
from tokentrue.cli.output import pluralise
from tokentrue.errors import ConfigError, SessionNotFound
from tokentrue.json_types import JsonObject

if TYPE_CHECKING:
    from tokentrue.sessions.journal import SessionRecord
    from tokentrue.sessions.tree import Tree

ACTIONS = ("list", "show", "delete")
MOST_ROWS = 2**63 - 1  # of a statement, in SQLite and PostgreSQL


def command(
    source: JournalOrUrl,
    action: Annotated[str, typer.Argument(help="list, show or delete")] = "list",
    session_id: Annotated[str | None, typer.Argument(help="the session to show or delete")] = None,
    limit: Annotated[int, typer.Option(help="list at most this many, newest first")] = 100,
    as_json: AsJson = False,
) -> int:
    """List, show or delete recorded sessions."""
    if action not in ACTIONS:
        raise ConfigError(f"no action {action!r}; choose one of {', '.join(ACTIONS)}")
    if action != "list" and session_id is None:
        raise ConfigError(f"`{action}` needs a session id; `tokentrue sessions {source}` lists them")
    if limit < 0:
        raise ConfigError(f"--limit: {limit} must be at least 0")
    require_utf8("the session id", session_id or "")
    opened = connect(source) if is_url(source) else JournalSource(source)
    try:
        if action == "list":
            show_list(opened.sessions(limit=limit), as_json=as_json)
        elif action == "show":
            show_one(opened.session_state(str(session_id)), as_json=as_json)
        else:
            opened.delete_session(str(session_id))
            print(
                json.dumps({"deleted": session_id}) if as_json else f"session {session_id} and its tokens are deleted"
            )
    finally:
        opened.close()
    return 0


class JournalSource:
    """A store with the methods of `Client`. Refuses to delete while a server uses the file, or a gateway on PostgreSQL
    owns the session.
    """

    def __init__(self, store: str) -> None:
        self._store = require_store(store)
        self._journal = open_recorded(store)

    def sessions(self, *, limit: int) -> list[JsonObject]:
        from tokentrue.sessions.description import summarise_session

        found: list[JsonObject] = []
        for record in self._journal.sessions(limit=min(limit, MOST_ROWS)):
            with suppress(SessionNotFound):  # purged since it was listed
                found.append(summarise_session(*self._load(record.id)))
        return found

    def session_state(self, session_id: str) -> JsonObject:
        from tokentrue.sessions.description import describe_session

        return describe_session(*self._load(session_id))

    def _load(self, session_id: str) -> tuple[SessionRecord, Tree, JsonObject]:
        from tokentrue.samples import coverage_of, coverage_to_json
        from tokentrue.sessions.journal.journal import load_tree

        record, tree = load_tree(self._journal, session_id)
        return record, tree, coverage_to_json(coverage_of(tree, record))

    def delete_session(self, session_id: str) -> None:
        from tokentrue.sessions.journal import open_journal

        journal = open_journal(self._store)
        try:
            journal.acquire(session_id)
            asyncio.run(journal.delete(session_id))
        finally:
            journal.close()

    def close(self) -> None:
        self._journal.close()


def show_list(sessions: list[JsonObject], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"sessions": sessions}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    columns = ("session_id", "group", "state", "turns", "coverage", "reward")
    shown = [
        name for name in columns if any(name in entry for entry in sessions)
    ]  # a gateway reads no trees for a list
    longest = max((len(entry["session_id"]) for entry in sessions), default=0)
    for name in shown:
        # An id must be whole to be used.
        table.add_column(name.removesuffix("_id"), min_width=longest if name == "session_id" else None)
    for entry in sessions:
        ratio = cast("JsonObject", entry.get("coverage") or {}).get("ratio")
        cells: JsonObject = {**entry, "coverage": None if ratio is None else f"{ratio:.2%}"}
        table.add_row(*("" if cells.get(name) is None else str(cells[name]) for name in shown))
    Console().print(table)
    print(pluralise(len(sessions), "session"))


def show_one(session: JsonObject, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(session, indent=1))
        return
    coverage = cast("JsonObject", session.get("coverage") or {})
    print(f"session {session['session_id']}, {session.get('state')}, group {session.get('group') or '-'}")
    print(f"coverage {coverage.get('ratio', 1.0):.2%} of {pluralise(coverage.get('sampled', 0), 'sampled token')}")
    for node in session.get("nodes", ()):
        reason = f"{node.get('why') or ''} {node.get('outcome') or ''}"
        told = f"{pluralise(node['sampled_tokens'], 'sampled token')}  {reason}"
        print(f"  {node['id']}  after {node.get('parent') or '-'}  {told}".rstrip())
