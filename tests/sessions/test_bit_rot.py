"""A journal notices bit rot: every single-bit flip in a real file is either reported or changes nothing that is
read."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.marks import examples
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.errors import JournalError, SessionNotFound
from tokentrue.samples import assemble, sample_to_json
from tokentrue.sessions import Journal, load_tree

FLIPS = 600


async def fill(path: Path) -> None:
    """Twelve sessions of four turns."""
    journal = Journal(path)
    for number in range(12):
        engine = Engine([sampled(f"r{number}{turn}", f"c{turn}" * 20) for turn in range(4)])
        session = tt.Session(
            renderer=Letters(), provider=engine, journal=journal, session_id=f"session-{number}", group=f"g{number % 3}"
        )
        messages: list[Any] = [{"role": "user", "content": f"task {number}"}]
        for turn in range(4):
            reply = await session.chat(messages)
            messages += [reply.message, {"role": "user", "content": f"next {turn}"}]
        await session.reward(number / 8)
    journal.close()


def read_everything(path: Path) -> Any:
    journal = Journal(path, read_only=True)
    try:
        records = [journal.get(f"session-{number}") for number in range(12)]
        listed = sorted(record.id for record in journal.all_sessions())
        samples = [
            [sample_to_json(sample) for sample in assemble(*reversed(load_tree(journal, record.id))).samples]
            for record in records
        ]
        return records, listed, samples
    finally:
        journal.close()


def test_every_flipped_bit_is_noticed_or_harmless(tmp_path: Path) -> None:
    flip_bits(tmp_path, examples(FLIPS))


def flip_bits(folder: Path, flips: int) -> None:
    whole, damaged = folder / "whole.db", folder / "damaged.db"
    asyncio.run(fill(whole))
    truth, data = read_everything(whole), whole.read_bytes()
    rng = random.Random(16)
    noticed = 0
    for _ in range(flips):
        bit = rng.randrange(len(data) * 8)
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(changed)
        try:
            assert read_everything(damaged) == truth, f"bit {bit} of the file changed what is read, in silence"
        except JournalError:
            noticed += 1
        for rest in folder.glob("damaged.db-*"):
            rest.unlink()
    assert noticed > flips // 2


@pytest.mark.parametrize("table", ["nodes", "sessions"])
def test_a_lost_row_is_noticed(table: str, tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path / "whole.db"))
    shutil.copy(tmp_path / "whole.db", tmp_path / "damaged.db")
    with sqlite3.connect(tmp_path / "damaged.db") as db:
        db.execute(f"DELETE FROM {table} WHERE {'session' if table == 'nodes' else 'id'}='session-3'")
    db.close()
    with pytest.raises(JournalError, match=f"{table} of"):
        Journal(tmp_path / "damaged.db")
    unchecked = Journal(tmp_path / "damaged.db", check=False)
    with pytest.raises((JournalError, SessionNotFound)):
        load_tree(unchecked, "session-3")
    unchecked.close()
