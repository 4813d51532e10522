"""The interface between a rollout and whatever runs in it: an environment lists tasks and runs one with an OpenAI
client in hand.

An environment never sees tokens, sessions or the trainer, and sets no sampling values: the session pins them. `client`
is anything with the OpenAI client's `chat.completions.create(...)`: the real `openai.AsyncOpenAI` pointed at a gateway,
or a stand-in with the same call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from tokentrue.json_types import JsonMapping, JsonObject

Split: TypeAlias = Literal["train", "heldout"]
HELDOUT_SHARE = 1 / 16
SMALL_MODEL = Path(__file__).parent.parent / "assets" / "calculator"  # the model that ships with the package


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to do. `task_id` is stable: the same text gives the same id in every process.

    >>> Task(task_id="calculator/0f3a", prompt="Tom has 3 pens. Tom gets 4 more. How many now?", answer=7)
    """

    task_id: str
    prompt: str
    answer: int | None = None
    data: JsonMapping = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A reward, and what a reader of the results should know about how it came about."""

    reward: float
    note: str | None = None


class Environment(Protocol):
    """`run` returns the reward; if it raises, only this rollout fails."""

    name: str

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]: ...

    async def run(self, client: Any, task: Task) -> float | Outcome: ...


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def choose_split(text: str) -> Split:
    """Which split a task's text belongs to, from the text alone: no list to keep, no overlap possible."""
    return "heldout" if int(digest(text)[:8], 16) < HELDOUT_SHARE * 16**8 else "train"
