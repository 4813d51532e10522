"""`python -m tests.partitions.check HISTORY.jsonl DATABASE_URL TOKENIZER.json`: does the database hold what the clients
were told?

Imports nothing of tokentrue: it reads the tables and the tokens itself. Each acknowledged turn is recorded exactly once
and says what the client heard; each generation of the engine is recorded at most once; places are contiguous; every
parent is recorded before its child, and each prompt starts with its parent's prompt and sampled ids.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from tokenizers import Tokenizer

NUMBER = re.compile(r"module_(\d+)")


def check(history: Path, url: str, tokenizer_file: Path) -> tuple[dict[str, int], list[str]]:
    """Counts, and everything that is wrong."""
    told = [json.loads(line) for line in history.read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    wrong: list[str] = []
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT session, seq, id, parent, given_ids, sampled_ids, logprobs, body FROM nodes ORDER BY session, seq"
        ).fetchall()
        counts = dict(connection.execute("SELECT id, nodes FROM sessions").fetchall())
        tokens = connection.execute("SELECT sum(token - 1), max(token) FROM sessions").fetchone()
    by_session: dict[str, list[Any]] = {}
    for row in rows:
        by_session.setdefault(row[0], []).append(row)
    texts = {row[2]: tokenizer.decode(np.frombuffer(row[5], "<i4").tolist(), skip_special_tokens=False) for row in rows}
    for session, nodes in by_session.items():
        wrong += check_session(session, nodes, counts[session])
    recorded = Counter(row[2] for row in rows)
    for turn in told:
        if recorded[turn["node"]] != 1:
            wrong.append(
                f"acknowledged turn {turn['node']} of {turn['session']} is recorded {recorded[turn['node']]} times"
            )
        elif NUMBER.findall(texts[turn["node"]]) != [turn["number"]]:
            wrong.append(f"turn {turn['node']} was told as {turn['number']} and is recorded as {texts[turn['node']]!r}")
    generations = Counter(number for text in texts.values() for number in NUMBER.findall(text))
    wrong += [f"generation {number} is recorded {count} times" for number, count in generations.items() if count > 1]
    heard = Counter((turn["session"], turn["turn"]) for turn in told)
    wrong += [f"turn {place} was acknowledged {count} times" for place, count in heard.items() if count > 1]
    changed = {"acknowledged": len(told), "recorded": len(rows), "sessions": len(counts)}
    return changed | {
        "changes_of_owner": int(tokens[0] or 0),
        "largest_token": int(tokens[1] or 0),
    } if tokens else changed, wrong


def check_session(session: str, nodes: Sequence[Any], noted: int) -> list[str]:
    wrong: list[str] = []
    if [row[1] for row in nodes] != list(range(len(nodes))) or noted != len(nodes):
        wrong.append(f"session {session}: places {[row[1] for row in nodes]}, {noted} noted")
    whole: dict[str | None, bytes] = {None: b""}
    for _, _, name, parent, given, sampled, logprobs, body in nodes:
        if parent not in whole:
            wrong.append(f"session {session}: the parent of {name} is not recorded before it")
            continue
        prompt = whole[parent] + given
        if hashlib.sha256(prompt).hexdigest() != json.loads(body)["prompt_sha256"]:
            wrong.append(f"session {session}: {name} was sampled after another prompt than its parent's")
        if len(sampled) // 4 != len(logprobs) // 8:
            wrong.append(
                f"session {session}: {name} has {len(sampled) // 4} ids and {len(logprobs) // 8} log-probabilities"
            )
        whole[name] = prompt + sampled
    return wrong


if __name__ == "__main__":
    found, errors = check(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    print(json.dumps(found))
    for error in errors[:50]:
        print(error)
    raise SystemExit(1 if errors else 0)
