"""A child process under load is killed with SIGKILL at random moments, again and again on one journal.

After each reopening nothing acknowledged is missing, nothing is half there, and every session goes on bit for bit.
The default run kills 8 times; `make test-load` (`-m load`) kills 200 times.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import zygote
from tests.sessions.crash_child import fingerprint, open_store
from tokentrue.sessions import Journal
from tokentrue.sessions.journal.journal import load_tree


def life(journal: str, seed: int, rng: random.Random) -> list[str]:
    """Start the child and let it die: half of the times we kill it at a random moment after its first sign of life,
    half of the times it kills itself in the very instant after an acknowledgement. Before we kill it, a reader opens
    and closes its file, as `samples` and `view` do. The lines it had acknowledged."""
    lines, moment_s = rng.choice([0, rng.randrange(1, 120)]), rng.random() ** 2 * 0.25
    child = zygote.start("tests.sessions.crash_child", [journal, str(seed), str(lines)], env=os.environ)
    if not lines:
        assert select.select([child.stdout], [], [], 60)[0] and child.poll() is None, "the child ended by itself"
        if not journal.startswith("postgresql:"):
            reader = Journal(journal, read_only=True)
            assert list(reader.all_sessions())
            reader.close()
        time.sleep(moment_s)
        os.kill(child.pid, signal.SIGKILL)
    said, _ = child.communicate(60)
    return [line for line in said.splitlines(keepends=True) if line.endswith("\n")]


def check(store: str, told: dict[str, dict[str, str]], rewards: dict[tuple[str, str], str]) -> int:
    """Everything acknowledged is there, bit for bit; what else is there is whole. How many nodes there are."""
    journal = open_store(store)
    try:
        nodes = 0
        for record in journal.all_sessions():
            record, tree = load_tree(journal, record.id)  # checks ids, log-probabilities and certificate of every node
            nodes += len(tree)
            for name, print_ in told.get(record.id, {}).items():
                assert name in tree.nodes, f"an acknowledged turn is gone: {name}"
                assert fingerprint(tree.nodes[name], tree.prompt_ids(tree.nodes[name])) == print_
            for (session, leaf), value in rewards.items():
                if session == record.id:
                    assert record.rewards.leaves[leaf].hex() == value
        assert {record.id for record in journal.all_sessions()} >= set(told)
        return nodes
    finally:
        journal.close()


def kill_again_and_again(folder: Path, kills: int, store_of: Callable[[int], str] | None = None) -> tuple[int, int]:
    """`store_of` gives the store of a kill's number; a file in `folder` without it."""
    rng = random.Random(20261115)
    told: dict[str, dict[str, str]] = {}
    rewards: dict[tuple[str, str], str] = {}
    total = nodes = 0
    for number in range(kills):
        # a fresh journal now and then, so that its creation and the first commits are hit as well
        if number % 20 == 0:
            told, rewards = {}, {}
        store = store_of(number) if store_of is not None else str(folder / f"journal-{number // 20}.db")
        for line in life(store, number, rng):
            kind, session, *rest = line.split()
            told.setdefault(session, {})
            if kind == "turn":
                told[session][rest[0]] = rest[1]
                total += 1
            elif kind == "reward":
                rewards[session, rest[0]] = rest[1]
        nodes = check(store, told, rewards)
    return total, nodes


def test_killed_a_few_times(tmp_path: Path) -> None:
    acknowledged, nodes = kill_again_and_again(tmp_path, 8)
    assert acknowledged > 50 and nodes >= acknowledged * 0.9, (acknowledged, nodes)


@pytest.mark.load
@pytest.mark.timeout(3000)
def test_killed_two_hundred_times(tmp_path: Path) -> None:
    acknowledged, _ = kill_again_and_again(tmp_path, 200)
    print(f"200 kills, {acknowledged} acknowledged turns, none missing")
    assert acknowledged > 1000
