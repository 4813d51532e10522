"""tokentrue sessions STORE_OR_URL [list | show ID | delete ID]: the sessions of a journal or of a running gateway."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Option

from tokentrue.cli.common import (
    AsJson,
    JournalOrUrl,
    connect,
    is_url,
    open_recorded,
    pluralise,
    print_json,
    print_table,
    require_store,
    require_utf8,
    show_coverage,
    show_share,
)
from tokentrue.errors import ConfigError, SessionNotFound
from tokentrue.json_types import JsonObject

if TYPE_CHECKING:
    from tokentrue.client import Client
    from tokentrue.samples import Assembly
    from tokentrue.sessions.journal import SessionRecord
    from tokentrue.sessions.tree import Tree

ACTIONS = ("list", "show", "delete")
COLUMNS = ("session_id", "group", "state", "turns", "coverage", "reward")
MOST_ROWS = 2**63 - 1  # of a statement, in SQLite and PostgreSQL


def command(
    source: JournalOrUrl,
    action: Annotated[str, Argument(help="list, show or delete")] = "list",
    session_id: Annotated[str | None, Argument(help="the session to show or delete")] = None,
    limit: Annotated[int, Option(help="list at most this many, newest first")] = 100,
    as_json: AsJson = False,
) -> int:
    """List, show or delete recorded sessions."""
    if action not in ACTIONS:
        raise ConfigError(f"no action {action!r}; choose one of list, show ID, delete ID")
    if (action == "list") != (session_id is None):
        needs = f"needs a session id; `tokentrue sessions {source}` lists them"
        raise ConfigError(f"`{action}` {'takes no session id; `show ID` has one' if session_id else needs}")
    if limit < 0:
        raise ConfigError(f"--limit: {limit} must be at least 0")
    require_utf8("the session id", session_id)
    name = str(session_id)
    with closing(connect(source) if is_url(source) else JournalSource(source)) as opened:
        if action == "list":
            listed = opened.sessions(limit=limit)
            if not isinstance(opened, JournalSource):  # a gateway reads no trees for a list
                listed = [summary for each in listed for summary in summarise_remote(opened, each)]
            answer: JsonObject = {"sessions": listed}
        elif action == "show":
            answer = show_session(opened, name)
        else:
            opened.delete_session(name)
            answer = {"deleted": name}
    if as_json:
        print_json(answer)
    elif action == "list":
        print_list(answer["sessions"])
    elif action == "show":
        print_session(answer)
    else:
        print(f"session {name} and its tokens are deleted")
    return 0


def show_session(opened: "Client | JournalSource", name: str) -> JsonObject:
    try:
        return opened.session_state(name)
    except SessionNotFound as error:
        found = [each for each in session_ids(opened) if each.startswith(name)]
        if len(found) == 1:
            return opened.session_state(found[0])
        if not found:
            raise
        listed = f"{', '.join(found[:3])}{', …' if len(found) > 3 else ''}"
        raise SessionNotFound(f"{error}: {len(found)} begin with it: {listed}") from error


def session_ids(opened: "Client | JournalSource", group: str | None = None) -> Iterator[str]:
    if isinstance(opened, JournalSource):
        yield from opened.session_ids(group)
        return
    last: JsonObject | None = None
    while page := opened.sessions(after=last, group=group):
        yield from (item["session_id"] for item in page)
        last = page[-1]


class JournalSource:
    """A store with the methods of `Client`. Refuses to delete while a server uses the file, or a gateway on PostgreSQL
    owns the session.
    """

    def __init__(self, store: str) -> None:
        self._store = require_store(store)
        self._journal = open_recorded(store)
        self.close = self._journal.close

    def sessions(self, *, limit: int) -> list[JsonObject]:
        from tokentrue.sessions.description import summarise_session

        found: list[JsonObject] = []
        for record in self._journal.sessions(limit=min(limit, MOST_ROWS)):
            with suppress(SessionNotFound):  # purged since it was listed
                found.append(summarise_session(*self._load(record.id)))
        return found

    def session_ids(self, group: str | None) -> Iterator[str]:
        return (record.id for record in self._journal.all_sessions(group=group))

    def session_image(self, session_id: str, sha256: str) -> bytes:
        return self._journal.read_image(session_id, sha256)[0]

    def assemble(self, session_id: str, **options: Any) -> "Assembly":
        from tokentrue.samples import assemble
        from tokentrue.sessions.journal.journal import load_tree

        record, tree = load_tree(self._journal, session_id)
        return assemble(tree, record, **options)

    def session_state(self, session_id: str) -> JsonObject:
        from tokentrue.sessions.description import describe_session

        return describe_session(*self._load(session_id))

    def _load(self, session_id: str) -> "tuple[SessionRecord, Tree, JsonObject]":
        from tokentrue.samples import coverage_of, coverage_to_json
        from tokentrue.sessions.journal.journal import load_tree

        record, tree = load_tree(self._journal, session_id)
        return record, tree, coverage_to_json(coverage_of(tree, record))

    def delete_session(self, session_id: str) -> None:
        from tokentrue.sessions.journal import open_journal

        with closing(open_journal(self._store)) as journal:
            journal.acquire(session_id)
            asyncio.run(journal.delete(session_id))


def summarise_remote(client: "Client", listed: JsonObject) -> Iterator[JsonObject]:
    with suppress(SessionNotFound):
        state = client.session_state(listed["session_id"])
        yield {**state, "turns": len(state["nodes"])}


def print_list(sessions: list[JsonObject]) -> None:
    shown = [name for name in COLUMNS if any(name in entry for entry in sessions)]
    rows: list[list[str]] = []
    for entry in sessions:
        covered = cast("JsonObject", entry.get("coverage") or {})
        cells: JsonObject = {**entry, "coverage": show_share(covered["ratio"]) if covered.get("sampled") else None}
        rows.append(["" if cells.get(name) is None else str(cells[name]) for name in shown])
    longest = max((len(entry["session_id"]) for entry in sessions), default=0)  # an id must be whole to be used
    print_table(None, [name.removesuffix("_id") for name in shown], rows, whole=longest)
    print(pluralise(len(sessions), "session"))


def print_session(session: JsonObject) -> None:
    coverage = cast("JsonObject", session.get("coverage") or {})
    print(f"session {session['session_id']}, {session.get('state')}, group {session.get('group') or '-'}")
    print(show_coverage(coverage.get("ratio", 1.0), coverage.get("sampled", 0)))
    for node in session.get("nodes", ()):
        reason = f"{node.get('why') or ''} {node.get('outcome') or ''}"
        told = f"{pluralise(node['sampled_tokens'], 'sampled token')}  {reason}"
        print(f"  {node['id']}  after {node.get('parent') or '-'}  {told}".rstrip())
