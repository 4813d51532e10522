"""Data for the viewer's tests: a store with groups, forks, retries, splits that no tokenizer would make, and a long
session."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokentrue as tt
from tests.gateway.world import renderer
from tests.parts import whole_chunks
from tokentrue.providers.scripted import invent_logprob
from tokentrue.sessions import Journal
from tokentrue.types import Certificate, Chunk, Completion, Finish, Ids, Sample, Sampling, Span, VersionSpan

ADD = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": ADD}}]
SYSTEM = {"role": "system", "content": "You repair builds. Read before you answer."}
TASKS = ("Why does `make test` fail?", "Which file holds the parser?")
STEPS = (
    "<think>\nThe error names the parser. I read them both.\n</think>\n\nI look at the parser first.\n"
    '<tool_call>\n{"name": "read", "arguments": {"path":"src/parser.py",  "line": 12}}\n</tool_call>',
    "<think>\nLine 12 imports what is not there anymore.\n</think>\n\n"
    '<tool_call>\n{"name": "read", "arguments": {"line": 3, "path": "src/caf\u00e9.py"}}\n</tool_call>',
    "<think>\nSo the import has to go. 🙂\n</think>\n\nThe import on line 12 names a module that was removed. Delete it.",
)
RESULTS = ("12: from lexer import Lexer\n", "3: # moved to tokens.py\n")


class Told:
    """An engine that says what it is told, with alternatives for the first tokens of each turn."""

    name = "told"
    bans_tokens = False
    truthful_filters = frozenset[str]()

    def __init__(self) -> None:
        self.version = 3
        self.answers: list[Sequence[int]] = []

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        ids = tuple(self.answers.pop(0))
        logprobs = tuple(invent_logprob(i + len(prompt_ids), token) for i, token in enumerate(ids))
        middle = len(ids) // 2
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            finish=Finish.STOP,
            versions=(
                VersionSpan(start=0, end=middle, version=self.version),
                VersionSpan(start=middle, end=len(ids), version=self.version + 1),
            ),
            prompt_tokens=len(prompt_ids),
            top_logprobs=tuple(
                {token: value, token + 1: -2.0 + value / 9} for token, value in zip(ids, logprobs, strict=True)
            ),
        )

    async def stream(self, prompt_ids: Ids, sampling: Sampling, **_: Any) -> AsyncIterator[Chunk]:
        for chunk in whole_chunks(await self.generate(prompt_ids, sampling)):
            yield chunk

    async def health(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


def split(text: str, seed: int) -> list[int]:
    """Sampled ids with splits: some words come in two tokens where the tokenizer has one."""
    draw = random.Random(seed)
    made = renderer()
    found: list[int] = []
    for token in made.encode_sampled(text):
        word = made.decode([token])
        if word.strip().isalpha() and len(word.strip()) > 3 and draw.random() < 0.18:
            cut = len(word) // 2
            found += [*made.encode_sampled(word[:cut]), *made.encode_sampled(word[cut:])]
        else:
            found.append(token)
    return [*found, made.stop_token_ids[0]]


async def play(session: tt.Session, engine: Told, task: str, *, seed: int, turns: int = 3, retry: bool = False) -> None:
    """An agent that drops reasoning from its history; with `retry` it asks the second turn twice."""
    history: list[Any] = [SYSTEM, {"role": "user", "content": task}]
    for turn in range(turns):
        step = STEPS[-1] if turn == turns - 1 else STEPS[turn % 2]
        tries = 2 if retry and turn == 1 else 1
        for attempt in range(tries):
            text = step.replace("first", f"first, try {attempt + 1}") if attempt else step
            engine.answers.append(split(text, seed * 100 + turn * 10 + attempt))
            reply = await session.chat(history, TOOLS)
        message = {key: value for key, value in reply.message.items() if key != "reasoning_content"}
        history.append(message)
        calls = message.get("tool_calls") or ()
        history += [{"role": "tool", "tool_call_id": call["id"], "content": RESULTS[turn % 2]} for call in calls]
        if not calls:
            history.append({"role": "user", "content": "Are you sure?"})


async def fill(path: Path) -> None:
    """Two groups of four rollouts, one of them with an abandoned attempt, and an open session of one turn."""
    journal, engine = Journal(f"sqlite:{path}"), Told()
    for group, task in enumerate(TASKS):
        for number in range(4):
            session = tt.Session(
                renderer=renderer(), provider=engine, journal=journal, session_id=f"task{group}-rollout{number}", group=f"task-{group}",
                metadata={"task": task},
            )  # fmt: skip
            await session.wait_created()
            await play(
                session, engine, task, seed=group * 10 + number, turns=2 + (number + group) % 3, retry=number == 1
            )
            await session.reward((number * 3 + group) % 4 / 3)
            if group == 0:
                await session.end()
    journal.close()


def run_apart(coroutine: Coroutine[Any, Any, None]) -> None:
    """On a thread of its own: Playwright's synchronous interface keeps a running loop on this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, coroutine).result()


def build_store(path: Path) -> Path:
    run_apart(fill(path))
    return path


def store_samples(path: Path) -> list[Sample]:
    from tokentrue.samples import assemble
    from tokentrue.sessions.journal.journal import load_tree

    journal = Journal(f"sqlite:{path}", read_only=True)
    try:
        found: list[Sample] = []
        for record in journal.all_sessions():
            loaded, tree = load_tree(journal, record.id)
            found += assemble(tree, loaded).samples
        return found
    finally:
        journal.close()


def write_trainer_file(path: Path, samples: Sequence[Sample], *, exact: bool = False, seed: int = 1) -> Path:
    """The rollout's own numbers, moved a little, more so late in the sequence; `exact` leaves them as they are."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            values = [
                None if value is None else value if exact else min(0.0, value + draw.gauss(0, 0.004 + 0.00008 * i))
                for i, value in enumerate(sample.rollout_logprobs)
            ]
            file.write(json.dumps({"sample_id": sample.sample_id, "logprobs": values}) + "\n")
    return path


def long_sample(tokens: int = 100_000) -> Sample:
    """A session of `tokens` tokens: many turns of given text and sampled text, ids of ordinary words."""
    made = renderer()
    text = " The quick brown fox reads src/parser.py and counts 1234 lines.\nThen it stops, 東京 🙂."
    words = made.encode_sampled(text)
    ids, spans, logprobs, mask = array("i"), [], [], []
    draw = random.Random(5)
    turn = 0
    while len(ids) < tokens:
        for kind, size in (("given", 300), ("sampled", 700)):
            start = len(ids)
            ids.extend(words[(start + i) % len(words)] for i in range(size))
            sampled = kind == "sampled"
            role, version, why = ("assistant", turn // 20, "sampled") if sampled else ("tool", None, "prompt")
            place: Any = {"start": start, "end": len(ids), "kind": kind, "turn": turn}
            spans.append(Span(**place, role=role, policy_version=version, trainable=sampled, why=why))
            logprobs += [-draw.expovariate(1.2) if sampled else None for _ in range(size)]
            mask += [int(sampled)] * size
        turn += 1
    return Sample(
        sample_id="long-0", session_id="long", group=None, token_ids=ids, loss_mask=mask, rollout_logprobs=logprobs, spans=tuple(spans),
        reward=1.0, finish_reason="stop", metadata={}, certificate=Certificate(chain="sha256:0", template="sha256:0", tokenizer="sha256:0"),
    )  # fmt: skip
