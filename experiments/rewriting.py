"""What a trainer learns from that gets text or messages instead of the sampled ids: the same rollouts with other ids.

`RewrittenRounds` changes each sample after the rollout. The log-probabilities of the changed ids are those that the
rollout engine itself gives them, asked for as prompt log-probabilities: the sampler reported none, because nobody
sampled these ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from tokentrue.environments import OpenSession, Plan, Sessions
from tokentrue.environments.word_problems import CALCULATOR
from tokentrue.errors import ConfigError
from tokentrue.protocols import Scoring
from tokentrue.train import Groups, Rounds
from tokentrue.types import Sample, Span

Rewriting: TypeAlias = Literal["none", "reencode", "rerender", "stringify"]


class RewrittenRounds:
    """Rounds whose samples are rewritten in the way that `kind` names."""

    def __init__(self, rounds: Rounds, kind: Rewriting, *, renderer: Any, provider: Scoring) -> None:
        self._rounds = rounds
        self._change = change_of(kind, renderer)
        self._provider = provider

    async def play(self, number: int) -> Groups:
        groups = await self._rounds.play(number)
        changed = [[self._change(sample) for sample in group] for group in groups]
        return [list(await asyncio.gather(*(self._scored(sample) for sample in group))) for group in changed]

    async def _scored(self, sample: Sample) -> Sample:
        """The sample with the engine's log-probability of every trained id."""
        found = await self._provider.score(sample.token_ids)
        values = [value if mask else None for value, mask in zip((0.0, *found), sample.loss_mask, strict=True)]
        return replace(sample, rollout_logprobs=values)


def change_of(kind: Rewriting, renderer: Any) -> Callable[[Sample], Sample]:
    changes: dict[str, Callable[[Sample], Sample]] = {
        "reencode": lambda sample: reencode(sample, renderer),
        "rerender": lambda sample: rerender(sample, renderer, lambda message: message),
        "stringify": lambda sample: rerender(sample, renderer, stringify),
    }
    if kind not in changes:
        raise ConfigError(f"no rewriting {kind!r}; choose one of {', '.join(changes)}")
    return changes[kind]


def reencode(sample: Sample, renderer: Any) -> Sample:
    """Each sampled turn decoded to text and encoded again: splits are re-encoded, everything else is kept."""
    ids: list[int] = []
    spans: list[Span] = []
    for span in sample.spans:
        piece = list(sample.token_ids[span.start : span.end])
        if span.kind == "sampled":
            piece = list(renderer.encode_sampled(renderer.decode(piece)))
        spans.append(replace(span, start=len(ids), end=len(ids) + len(piece)))
        ids += piece
    return replace_ids(sample, ids, spans)


def rerender(sample: Sample, renderer: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Sample:
    """The conversation rendered again from the messages that a harness kept: what a trainer sees that gets messages."""
    messages = [
        change(message) if message["role"] == "assistant" else message for message in sample.metadata["messages"]
    ]
    version = next(span.policy_version for span in sample.spans if span.kind == "sampled")
    ids: list[int] = []
    spans: list[Span] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = len(renderer.render(messages[:number], tools=[CALCULATOR]).token_ids)
        after = list(renderer.render(messages[: number + 1], tools=[CALCULATOR]).token_ids)
        end = max((i for i, token in enumerate(after) if token in renderer.stop_token_ids), default=len(after) - 1) + 1
        spans += [given_span(len(ids), start, number), sampled_span(start, end, number, version)]
        ids = after[:end]
    return replace_ids(sample, ids, [span for span in spans if span.end > span.start])


def replace_ids(sample: Sample, ids: list[int], spans: Sequence[Span]) -> Sample:
    """Other ids in the sample's place, not yet scored: no log-probability, so that nothing can train on it unscored.
    The record of the
    sampled turns is dropped: it counts other tokens."""
    mask = [int(span.kind == "sampled") for span in spans for _ in range(span.start, span.end)]
    metadata = {name: value for name, value in sample.metadata.items() if name != "tokentrue"}
    return replace(
        sample, token_ids=ids, loss_mask=mask, rollout_logprobs=[None] * len(ids), spans=tuple(spans), metadata=metadata
    )


def given_span(start: int, end: int, turn: int) -> Span:
    return Span(
        start=start, end=end, kind="given", role="user", turn=turn, policy_version=None, trainable=False, why="prompt"
    )


def sampled_span(start: int, end: int, turn: int, version: int | None) -> Span:
    return Span(
        start=start,
        end=end,
        kind="sampled",
        role="assistant",
        turn=turn,
        policy_version=version,
        trainable=True,
        why="sampled",
    )


def stringify(message: dict[str, Any]) -> dict[str, Any]:
    """A JavaScript harness: reasoning dropped, arguments parsed and written again without spaces."""
    calls = list(message.get("tool_calls") or ())
    calls = [
        {**call, "function": {**call["function"], "arguments": compact(call["function"]["arguments"])}}
        for call in calls
    ]
    kept = {key: value for key, value in message.items() if key not in {"reasoning_content", "tool_calls"}}
    return {**kept, "tool_calls": calls} if calls else kept


def compact(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), separators=(",", ":"))
    except ValueError:
        return arguments


# ---- the messages that a harness would have kept
# -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Transcript:
    """An in-process client that also keeps the conversation, the model's turns as they were served."""

    inner: Any
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def chat(self) -> _Transcript:
        return self

    @property
    def completions(self) -> _Transcript:
        return self

    async def create(self, **body: Any) -> Any:
        self.messages += body["messages"][len(self.messages) :]
        answer = await self.inner.chat.completions.create(**body)
        self.messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        return answer


@dataclass(slots=True)
class _TranscribedSession:
    inner: OpenSession
    client: _Transcript

    @property
    def session_id(self) -> str:
        return self.inner.session_id

    async def finish(self, reward: float) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Samples with their conversation in `metadata.messages`."""
        samples, coverage = await self.inner.finish(reward)
        return [{**one, "metadata": {**one["metadata"], "messages": self.client.messages}} for one in samples], coverage


class TranscribedSessions:
    """Sessions whose samples carry their messages."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @contextlib.asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[_TranscribedSession]:
        async with self._sessions.open(plan) as session:
            yield _TranscribedSession(session, _Transcript(session.client))
