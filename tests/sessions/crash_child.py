"""The victim of the crash test: many sessions at once on one journal, each acknowledged turn printed after it was
acknowledged.

`python -m tests.sessions.crash_child JOURNAL SEED [LINES]`; with LINES it kills itself in the instant after that many
acknowledgements.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import sys
from typing import Any

import tokentrue as tt
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.sessions import Journal
from tokentrue.types import TurnRequest

SESSIONS = 12
PARENT = os.getppid()
lines_left = 0


def fingerprint(node: Any, prompt: Any) -> str:
    """Ids, log-probabilities and words of a turn, to the last bit."""
    state = hashlib.sha256(prompt.tobytes() + node.sampled_ids.tobytes() + node.logprobs.tobytes())
    state.update(repr((node.parent, node.finish, node.served, node.edge_reason, node.seq, node.choice)).encode())
    return state.hexdigest()


def acknowledge(line: str) -> None:
    global lines_left
    if os.getppid() != PARENT:  # the test was interrupted
        os._exit(1)
    os.write(1, line.encode() + b"\n")
    lines_left -= 1
    if lines_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


async def live(session: tt.Session, engine: Engine, rng: random.Random) -> None:
    leaf = max(session.tree.in_order(), key=lambda node: node.seq, default=None)
    history: list[Any] = [{"role": "user", "content": session.id}]
    if leaf is not None:
        history = [*session.tree.messages(leaf), {"role": "user", "content": "back"}]
    while True:
        count = 1 + (rng.random() < 0.2)
        engine.answers += [
            sampled(f"r{rng.random()}", f"c{rng.random()}" + "x" * rng.randrange(400)) for _ in range(count)
        ]
        replies = await session.turn(TurnRequest(messages=history, n=count))
        for reply in replies:
            node = session.tree.get(reply.node)
            acknowledge(f"turn {session.id} {node.id} {fingerprint(node, session.tree.prompt_ids(node))}")
        if rng.random() < 0.1:
            await session.reward(rng.random(), leaf=replies[0].node)
            acknowledge(f"reward {session.id} {replies[0].node} {session.record.rewards.leaves[replies[0].node].hex()}")
        if rng.random() < 0.8:
            history = [*history, replies[-1].message, {"role": "user", "content": str(rng.random())}]


def open_store(store: str) -> Journal:
    if store.startswith("postgresql:"):
        from tokentrue.sessions.journal.postgres import PostgresJournal

        return PostgresJournal(store, name="victim")
    return Journal(store)


async def main(path: str, seed: int) -> None:
    rng, renderer, journal = random.Random(seed), Letters(), open_store(path)
    engines = [Engine([]) for _ in range(SESSIONS)]
    sessions: list[tt.Session] = []
    known = [record.id for record in journal.sessions(limit=SESSIONS)]
    for index, engine in enumerate(engines):
        if index < len(known):
            sessions.append(await tt.Session.open(journal, known[index], renderer=renderer, provider=engine))
        else:
            sessions.append(tt.Session(renderer=renderer, provider=engine, journal=journal))
            await sessions[-1].wait_created()
            acknowledge(f"session {sessions[-1].id}")
    await asyncio.gather(
        *(live(session, engine, random.Random(rng.random())) for session, engine in zip(sessions, engines, strict=True))
    )


if __name__ == "__main__":
    lines_left = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
