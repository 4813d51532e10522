"""Sample assembly and memory: linear in tokens. Ratios inside one run; the sizes are those at which peers were
measured.

`assembly`: CPU seconds of one session's samples, with every certificate link computed again (one thread that never
waits, so CPU time is what an idle machine's clock would show). `memory`: what a session keeps per token, arrays,
indexes and caches included.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from array import array
from dataclasses import replace
from typing import Any

from benchmarks import Report, main

# (turns, tokens per turn) -> seconds that Miles' merge takes for it, measured on a machine like this one
PEER = {(100, 1_000): 5.6, (200, 800): 21.4}
CURVE = ((10, 1_000), (32, 1_000), (100, 1_000), (316, 1_000), (1_000, 1_000))


def run(*, quick: bool) -> list[Report]:
    curve = CURVE[:3] if quick else CURVE
    return [_assembly(), _linear(curve), _turns(quick), _memory(quick)]


def _tree(turns: int, tokens: int) -> tuple[Any, Any]:
    """A session of `turns` turns, a tenth of each turn's tokens given, the rest sampled; no engine, no tokenizer."""
    from tokentrue.ids import TokenIds
    from tokentrue.sessions import Node, SessionRecord, Tree
    from tokentrue.types import Finish, VersionSpan

    tree = Tree(template="sha256:bench", tokenizer="sha256:bench")
    parent: Node | None = None
    given_count = max(1, tokens // 10)
    for turn in range(turns):
        given = TokenIds((i * 7919 + turn) % 150_000 for i in range(given_count))
        sampled = TokenIds((i * 104_729 + turn) % 150_000 for i in range(tokens - given_count))
        logprobs = array("d", (-((i * 31 + turn) % 997) / 500 for i in range(len(sampled))))
        versions = (VersionSpan(start=0, end=len(sampled), version=turn // 10),)
        node = Node(
            id=f"{turn:032x}",
            seq=turn,
            started=turn,
            parent=None if parent is None else parent.id,
            given=({"role": "user", "content": f"question {turn}"},),
            given_ids=given,
            given_spans=(),
            sampled_ids=sampled,
            logprobs=logprobs,
            versions=versions,
            finish=Finish.STOP,
            served={"role": "assistant", "content": f"answer {turn}"},
            chain=b"",
            prompt_length=(0 if parent is None else parent.length) + len(given),
            prompt_digest=tree.hash_prompt(parent, given).digest(),
        )
        parent = replace(node, chain=tree.link(node))
        tree.add(parent)
    return tree, SessionRecord(id="bench")


def _best(work: Any, times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        gc.collect()
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best


def _assembly() -> Report:
    from tokentrue.samples import assemble

    rows: list[tuple[Any, ...]] = []
    for (turns, tokens), peer in PEER.items():
        tree, record = _tree(turns, tokens)
        seconds = _best(lambda tree=tree, record=record: assemble(tree, record))
        rows.append((f"{turns} × {tokens}", f"{seconds * 1000:.1f}", f"{peer:.1f} s", f"{peer / seconds:.0f}×"))
    note = "peer: Miles' merge_samples on a 2-core machine, August 2026; ours includes checking every certificate link"
    return Report(title="sample assembly", columns=("turns × tokens", "ms", "peer", "faster"), rows=rows, notes=(note,))


def _linear(curve: tuple[tuple[int, int], ...]) -> Report:
    from tokentrue.samples import assemble, audit

    trees = [(turns * tokens, *_tree(turns, tokens)) for turns, tokens in curve]
    best = {size: [float("inf"), float("inf")] for size, _, _ in trees}
    for _ in range(5):  # interleaved: a disturbance of the machine hits every size
        for size, tree, record in trees:
            made = assemble(tree, record).samples
            for index, work in enumerate(
                (lambda tree=tree, record=record: assemble(tree, record), lambda made=made: audit(made))
            ):
                best[size][index] = min(best[size][index], _best(work, max(1, 100_000 // size)) / size * 1e9)
    measured = [(size, *times) for size, times in best.items()]
    first = measured[0]
    rows = [(size, f"{a:.0f}", f"{a / first[1]:.2f}", f"{b:.0f}", f"{b / first[2]:.2f}") for size, a, b in measured]
    spread = [max(m[i] for m in measured) / min(m[i] for m in measured) for i in (1, 2)]
    return Report(
        title="time per token",
        columns=("tokens", "assemble ns/token", "÷ first", "audit ns/token", "÷ first"),
        rows=rows,
        notes=(f"assemble: largest ÷ smallest {spread[0]:.2f}; audit: {spread[1]:.2f} (linear work is flat)",),
    )


def _turns(quick: bool) -> Report:
    """A session without an engine or tokenizer: what a turn costs as the conversation grows."""
    from benchmarks.session import measure_turn

    rows: list[tuple[Any, ...]] = []
    lengths = (8, 32, 128) if quick else (8, 32, 128, 256)
    measured = [(turns, *asyncio.run(measure_turn(turns))) for turns in lengths]
    for turns, fresh, shared, tokens in measured:
        rows.append(
            (
                turns,
                tokens,
                f"{fresh:.0f}",
                f"{fresh / measured[0][1]:.2f}",
                f"{shared:.0f}",
                f"{shared / measured[0][2]:.2f}",
            )
        )
    return Report(
        title="one turn of a session (no engine, no tokenizer, no journal)",
        columns=("turns before it", "prompt tokens", "fresh objects, µs", "÷ first", "shared objects, µs", "÷ first"),
        rows=rows,
        notes=(
            "every request replays the whole history: as new message objects, or as the same objects with new ones appended",
        ),
    )


def _memory(quick: bool) -> Report:
    turns, tokens = (100, 400) if quick else (200, 1_000)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree, record = _tree(turns, tokens)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    per_token = held / (turns * tokens)
    del tree, record
    note = "the bound is 40 bytes per token plus the text itself; ids are 4 bytes, a log-probability 8"
    return Report(
        title="memory of a session",
        columns=("turns × tokens", "MiB", "bytes per token", "÷ 40"),
        rows=[(f"{turns} × {tokens}", f"{held / 2**20:.2f}", f"{per_token:.1f}", f"{per_token / 40:.2f}")],
        notes=(note,),
    )


if __name__ == "__main__":
    main("samples", __doc__ or "", run)
