"""Rollouts of the calculator against an engine in this process, in ids: no HTTP, so that hundreds of steps fit into minutes.

Token-in, token-out by construction: a conversation is one growing list of ids, to which the engine's samples and the renderer's
extensions are appended; nothing is encoded twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokentrue.engine import ExactEngine
from tokentrue.environments import Plan, Task, plan_groups, seed_of
from tokentrue.environments.calculator import Calculator
from tokentrue.environments.tools import CALCULATOR, calculate, last_number
from tokentrue.errors import RenderError
from tokentrue.types import Certificate, Extension, Sample, Sampling, Span

NO_CERTIFICATE = Certificate(chain="", template="", tokenizer="")  # nothing here leaves the process


@dataclass(slots=True)
class Talk:
    """One conversation: its ids, what was sampled where, and the messages that a harness would hold."""

    ids: list[int]
    logprobs: list[float | None]
    spans: list[Span]
    messages: list[dict[str, Any]] = field(default_factory=list)


class Player:
    """Plays rounds with an exact engine. The suffix after a tool call depends on the result alone and is kept."""

    def __init__(
        self,
        engine: ExactEngine,
        renderer: Any,
        *,
        groups: int,
        size: int,
        seed: int,
        horizon: int | None = None,
        max_tokens: int = 56,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.groups = groups
        self.size = size
        self.seed = seed
        self.max_turns = (horizon or 2) + 2
        self.max_tokens = max_tokens
        self.environment = Calculator(steps=horizon)
        self._suffixes: dict[str, tuple[int, ...]] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}

    async def play(self, number: int) -> list[list[Sample]]:
        tasks = self.environment.tasks(self.groups, seed=seed_of(self.seed, number))
        plans = plan_groups(tasks, n=self.size, seed=self.seed, tag=f"round-{number:05d}")
        talks = await asyncio.gather(*(self.talk(plan, temperature=1.0) for plan in plans))
        samples = [sample_of(plan, talk) for plan, talk in zip(plans, talks, strict=True)]
        return [samples[i : i + self.size] for i in range(0, len(samples), self.size)]

    async def judged(self, count: int) -> float:
        """Mean reward over fixed held-out tasks, greedy."""
        plans = plan_groups(self.environment.tasks(count, split="heldout"), n=1, seed=0)
        talks = await asyncio.gather(*(self.talk(plan, temperature=0.0) for plan in plans))
        return sum(reward_of(plan.task, talk) for plan, talk in zip(plans, talks, strict=True)) / count

    async def talk(self, plan: Plan, *, temperature: float) -> Talk:
        prompt = self.prompt(plan.task)
        talk = Talk(ids=list(prompt), logprobs=[None] * len(prompt), spans=[given(0, len(prompt), 0)], messages=[question(plan.task)])
        for turn in range(self.max_turns):
            sampling = Sampling(temperature=temperature, max_tokens=self.max_tokens, seed=plan.seed)
            completion = await self.engine.generate(talk.ids, sampling)
            start = len(talk.ids)
            talk.ids += completion.token_ids
            talk.logprobs += completion.logprobs
            talk.spans.append(sampled(start, len(talk.ids), turn, completion.policy_version))
            parsed = self.renderer.parse(completion.token_ids, prompt_ids=prompt, tools=[CALCULATOR])
            talk.messages.append(dict(parsed.message))
            calls = parsed.message.get("tool_calls")
            if not calls or completion.finish_reason != "stop":
                return talk
            results = [calculate(call["function"]["arguments"]) for call in calls]
            answers = [{"role": "tool", "tool_call_id": c["id"], "content": r} for c, r in zip(calls, results, strict=True)]
            suffix = self.suffix(talk, answers)
            talk.messages += answers
            talk.spans.append(given(len(talk.ids), len(talk.ids) + len(suffix), turn + 1))
            talk.ids += suffix
            talk.logprobs += [None] * len(suffix)
        return talk

    def prompt(self, task: Task) -> tuple[int, ...]:
        if task.task_id not in self._prompts:
            self._prompts[task.task_id] = tuple(self.renderer.render([question(task)], tools=[CALCULATOR]).token_ids)
        return self._prompts[task.task_id]

    def suffix(self, talk: Talk, answers: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        key = "\0".join(answer["content"] for answer in answers)
        if key not in self._suffixes:
            extended = self.renderer.extend(talk.ids, talk.messages, list(answers), tools=[CALCULATOR])
            if not isinstance(extended, Extension):
                raise RenderError(f"the template cannot be extended by a tool result: {extended.why}")
            self._suffixes[key] = extended.added_ids
        return self._suffixes[key]


def question(task: Task) -> dict[str, Any]:
    return {"role": "user", "content": task.prompt}


def given(start: int, end: int, turn: int) -> Span:
    return Span(start=start, end=end, kind="given", role="user", turn=turn, policy_version=None, trainable=False, why="prompt")


def sampled(start: int, end: int, turn: int, version: int) -> Span:
    return Span(start=start, end=end, kind="sampled", role="assistant", turn=turn, policy_version=version, trainable=True, why="sampled")


def reward_of(task: Task, talk: Talk) -> float:
    last = talk.messages[-1]
    answered = last["role"] == "assistant" and not last.get("tool_calls")
    return float(answered and last_number(last.get("content") or "") == task.answer)


def sample_of(plan: Plan, talk: Talk) -> Sample:
    return Sample(
        sample_id=plan.key,
        session_id=plan.key,
        group=plan.group,
        token_ids=talk.ids,
        loss_mask=[int(value is not None) for value in talk.logprobs],
        rollout_logprobs=talk.logprobs,
        spans=tuple(talk.spans),
        reward=reward_of(plan.task, talk),
        finish_reason="stop",
        metadata={"messages": talk.messages},
        certificate=NO_CERTIFICATE,
    )


# ---- what a system without token-in, token-out would train on ----------------------------------------------------------------------------
def reencoded(sample: Sample, renderer: Any) -> Sample:
    """Each sampled turn decoded to text and encoded again: heals splits, keeps everything else."""
    ids: list[int] = []
    mask: list[int] = []
    spans: list[Span] = []
    for span in sample.spans:
        piece = list(sample.token_ids[span.start : span.end])
        if span.kind == "sampled":
            piece = list(renderer.encode_sampled(renderer.decode(piece)))
        spans.append(replace(span, start=len(ids), end=len(ids) + len(piece)))
        ids += piece
        mask += [int(span.kind == "sampled")] * len(piece)
    return retold(sample, ids, mask, spans)


def rerendered(sample: Sample, renderer: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Sample:
    """The conversation rendered again from the messages that a harness kept: what a trainer sees that gets messages."""
    messages = [change(message) if message["role"] == "assistant" else message for message in sample.metadata["messages"]]
    ids: list[int] = []
    mask: list[int] = []
    spans: list[Span] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = list(renderer.render(messages[:number], tools=[CALCULATOR]).token_ids)
        after = list(renderer.render(messages[: number + 1], tools=[CALCULATOR]).token_ids)
        end = max((i for i, token in enumerate(after) if token in renderer.stop_token_ids), default=len(after) - 1) + 1
        start = len(before)
        spans += [given(len(ids), start, number), sampled(start, end, number, 0)]
        mask = mask + [0] * (start - len(mask)) + [1] * (end - start)
        ids = after[:end]
    return retold(sample, ids, mask[: len(ids)], [span for span in spans if span.end > span.start])


def retold(sample: Sample, ids: list[int], mask: list[int], spans: list[Span]) -> Sample:
    """Log-probabilities of the rollout have no place on tokens that were not sampled: zeros stand in, and nothing may read them."""
    return replace(sample, token_ids=ids, loss_mask=mask, rollout_logprobs=[0.0 if m else None for m in mask], spans=tuple(spans))


def stringified(message: dict[str, Any]) -> dict[str, Any]:
    """A JavaScript harness: reasoning dropped, arguments parsed and written again without spaces."""
    calls = list(message.get("tool_calls") or ())
    calls = [{**call, "function": {**call["function"], "arguments": compact(call["function"]["arguments"])}} for call in calls]
    kept = {key: value for key, value in message.items() if key not in {"reasoning_content", "tool_calls"}}
    return {**kept, "tool_calls": calls} if calls else kept


def compact(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), separators=(",", ":"))
    except ValueError:
        return arguments


def unchanged(message: dict[str, Any]) -> dict[str, Any]:
    return message
