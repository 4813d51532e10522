"""The rules, judged from the engine's log and the oracle's own messages alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.fuzz import template
from tests.fuzz.engine import Generation
from tests.fuzz.messages import Differences, Fit, fit
from tests.fuzz.spelling import normal
from tokentrue.conformance.agents.messages import Message, Tool
from tokentrue.conformance.oracle import Oracle, Row
from tokentrue.conformance.standin.vocabulary import Vocabulary

REASONS = {"retried", "rolled_back", "not_chosen", "disconnected", "aborted", "engine_failed", "deleted", "max_tokens"}
REASONS |= {"side_request"}


CLOSINGS = {"", "</think>", "</tool_call>"}


class Violation(Exception):
    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


@dataclass(slots=True, kw_only=True)
class Sampled:
    """One generation as a client knows it: the engine's own, or several of them where the connection was lost in
    between."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    parts: list[Generation]

    @property
    def full(self) -> tuple[int, ...]:
        return self.prompt + self.ids


@dataclass(slots=True, kw_only=True)
class Turn:
    """A turn that was answered. `path` ends in what was served; `full` are its ids, prompt and sampled."""

    path: tuple[Message, ...]
    tools: tuple[Tool, ...]
    full: tuple[int, ...]
    node: str
    dialect: str
    response_id: str = ""
    asked: Any = field(default=None)
    output: Any = field(default=None)


def join_parts(generations: Sequence[Generation]) -> list[Sampled]:
    """Generations that went on after a lost connection, put together."""
    out: list[Sampled] = []
    for generation in generations:
        ids = tuple(generation.sampled[: generation.delivered])
        before = next((s for s in out if s.parts[-1].ended == "failed" and s.full == generation.prompt), None)
        if before is not None and before.parts[-1].plan.fault in {"", "drop", "cut_event"}:
            before.ids += ids
            before.parts.append(generation)
        else:
            out.append(Sampled(prompt=generation.prompt, ids=ids, parts=[generation]))
    return out


class Judge:
    """`strict`: the template is known whole, so that also a prompt without recorded turns is compared as text."""

    def __init__(self, vocabulary: Vocabulary, *, strict: bool) -> None:
        self._vocabulary, self._strict = vocabulary, strict

    def prompt(
        self, prompt: tuple[int, ...], sent: Sequence[Message], tools: Sequence[Tool], turns: Sequence[Turn]
    ) -> Turn | None:
        """Recorded turns are recognised, edited ones are not, what is new is rendered as the template says. Returns the
        turn continued."""
        fits = [(turn, *fit(turn.path, sent)) for turn in turns if list(turn.tools) == list(tools)]
        best, deepest = self._best(fits)
        maybe = [turn for turn, verdict, _ in fits if verdict is Fit.MAYBE and len(turn.path) >= deepest]
        # The text of an edited call may begin with all that a turn sampled before it was cut off.
        allowed = best + [turn for turn in maybe if self._is_stopped(turn) or self._closes(turn.full, prompt)]
        continued, length = longest_prefix(prompt, allowed)
        tail = sent[deepest:]
        for turn, verdict, _ in fits:
            full = turn.full
            if verdict is Fit.NO and len(full) > length and prompt[: len(full)] == full and self._closes(full, prompt):
                raise Violation(
                    "an edit must fork",
                    f"the engine was sent the ids of turn {turn.node}, which was edited: {last(turn)}",
                )
        if best and continued is None and all(message.role != "assistant" for message in tail):
            raise Violation("a replay must be recognised", self._unrecognised(prompt, best))
        # A turn that was cut off is closed by the template, and what follows it is opened as the template says.
        if best and continued is None and all(map(self._is_stopped, best)) and self._must_rejoin(sent, deepest, turns):
            raise Violation("a return to recorded tools rejoins their branch", self._unrecognised(prompt, best))
        if continued is None:
            self._rendered_anew(prompt, sent, tools)
            return None
        self._appended(
            prompt[length:], sent[len(continued.path) :], stopped=prompt[length - 1] == self._vocabulary.stop
        )
        return continued

    def _is_stopped(self, turn: Turn) -> bool:
        return turn.full[-1] == self._vocabulary.stop

    def _must_rejoin(self, sent: Sequence[Message], deepest: int, turns: Sequence[Turn]) -> bool:
        """All assistant messages after the turn that may be continued were sampled under other tools, and the client
        added something after each."""
        roles = [message.role for message in sent[deepest:]]
        if roles[0] == "assistant" or roles[-1] == "assistant" or ("assistant", "assistant") in pairwise(roles):
            return False
        last = deepest + max(at for at, role in enumerate(roles) if role == "assistant")
        return any(len(turn.path) == last + 1 and fit(turn.path, sent)[0] is Fit.YES for turn in turns)

    def _best(self, fits: Sequence[tuple[Turn, Fit, Differences]]) -> tuple[list[Turn], int]:
        """The deepest turns that fit, without those that another fits better in every respect."""
        sure = [(turn, differences) for turn, verdict, differences in fits if verdict is Fit.YES]
        deepest = max((len(turn.path) for turn, _ in sure), default=0)
        deep = [(turn, differences) for turn, differences in sure if len(turn.path) == deepest]
        return [turn for turn, own in deep if not any(is_better(other, own) for _, other in deep)], deepest

    def _closes(self, full: tuple[int, ...], prompt: tuple[int, ...]) -> bool:
        """The prompt goes on after a whole turn; a turn that was cut off may also begin like other text."""
        if full[-1] == self._vocabulary.stop:
            return self._strict or not self._is_canonical(full)
        closing, found, _ = self._vocabulary.text(prompt[len(full) :]).partition("<|im_end|>")
        return bool(found) and closing.strip() in CLOSINGS

    def _is_canonical(self, full: tuple[int, ...]) -> bool:
        """These ids are also what the tokenizer gives, so that a template which drops what was edited may render the
        same anew."""
        opener = self._vocabulary.encode(template.GENERATE[0])
        start = max(at for at in range(len(full)) if list(full[at : at + len(opener)]) == opener) + len(opener)
        return self._vocabulary.encode(self._vocabulary.text(full[start:])) == list(full[start:])

    def _unrecognised(self, prompt: tuple[int, ...], best: Sequence[Turn]) -> str:
        turn = best[0]
        full = turn.full
        at = shared(full, prompt)
        text = self._vocabulary.text
        expected, got = full[max(0, at - 8) : at + 12], prompt[max(0, at - 8) : at + 12]
        parted = f"they part at {at}: {text(expected)!r} / {text(got)!r}"
        return f"turn {turn.node} ({len(full)} ids) is not a prefix of the prompt; {parted}; served {last(turn)}"

    def _appended(self, ids: tuple[int, ...], messages: Sequence[Message], *, stopped: bool) -> None:
        if any(message.role == "assistant" for message in messages):
            self._in_order(ids, messages)
            return
        expected = template.appended(messages, stopped=stopped)
        if not stopped:  # a turn that was cut off: the template may close what it left open
            closing = self._vocabulary.text(ids).partition(expected[0][0])[0]
            expected = [(closing, True), *expected] if closing.strip() in CLOSINGS else expected
        self._compare(ids, expected, "what is appended must be rendered as the template says")

    def _rendered_anew(self, ids: tuple[int, ...], sent: Sequence[Message], tools: Sequence[Tool]) -> None:
        if self._strict and all(message.role != "assistant" for message in sent):
            self._compare(ids, template.whole(sent, tools), "a fresh prompt must be rendered as the template says")
        else:
            self._in_order(ids, sent)

    def _compare(self, ids: tuple[int, ...], expected: Sequence[template.Segment], rule: str) -> None:
        text, got = normal(self._vocabulary, template.text_of(expected)), self._vocabulary.text(ids)
        if text != got:
            at = shared(text, got)
            near = slice(max(0, at - 40), at + 60)
            raise Violation(rule, f"at character {at}: expected {text[near]!r}, the engine was sent {got[near]!r}")
        markers = [token for token in ids if token in self._vocabulary.added_ids]
        if markers != template.markers_of(expected, self._vocabulary):
            raise Violation(
                "content must not forge structure",
                f"markers {[self._vocabulary.text([m]) for m in markers]} in {got!r}",
            )

    def _in_order(self, ids: tuple[int, ...], messages: Sequence[Message]) -> None:
        """All that the client's own messages say is there, in order."""
        text, at = self._vocabulary.text(ids), 0
        for message in messages:
            if message.role == "assistant":
                continue
            wanted = normal(self._vocabulary, message.text)
            found = text.find(wanted, at)
            if found < 0:
                raise Violation(
                    "a message must reach the engine",
                    f"{message.role} message {message.text!r} is not in the prompt after character {at}",
                )
            at = found + len(wanted)

    def answer(self, message: Message, sampled: Sampled) -> None:
        """A well-formed turn is served as what it is."""
        output = sampled.parts[0].plan.output
        if output.expected is None or sampled.ids != output.ids:
            return
        if any(stop in self._vocabulary.text(sampled.ids) for stop in sampled.parts[0].asked.stops):
            return  # resumed in the middle of a stop string, the engine did not see it: the answer is cut there as well
        reasoning, text, calls = output.expected
        served = [(call.name, loaded(call.arguments)) for call in message.calls]
        wanted = [(name, loaded(normal(self._vocabulary, arguments))) for name, arguments in calls]
        if served != wanted:
            raise Violation("calls must be served as sampled", f"sampled {wanted}, served {served}")
        reasoning, text = (normal(self._vocabulary, part) for part in (reasoning, text))
        if (message.reasoning.strip(), message.text.strip()) != (reasoning.strip(), text.strip()):
            raise Violation(
                "text must be served as sampled",
                f"sampled {(reasoning, text)!r}, served {(message.reasoning, message.text)!r}",
            )

    # The record.
    def samples(self, samples: Sequence[Mapping[str, Any]], log: Sequence[Generation]) -> None:
        """Every sampled token of every sample is the engine's own, in the context that the engine was sent; none is
        trained twice."""
        for sample in samples:
            pairs = zip(sample["loss_mask"], sample["rollout_logprobs"], strict=True)
            if any(mask and value is None for mask, value in pairs):
                raise Violation("only sampled tokens are trained", f"sample {sample['sample_id']}")
        rows = [
            Row(ids=sample["token_ids"], mask=sample["loss_mask"], logprobs=sample["rollout_logprobs"])
            for sample in samples
        ]
        for fault in Oracle(log).judge(rows, strict=True):
            rule = "a token is trained once" if fault.rule == "2.1" else "a sample equals the engine's log"
            raise Violation(rule, f"{fault.detail} of {[sample['sample_id'] for sample in samples]}")

    def coverage(
        self, coverage: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], least: int, most: int
    ) -> None:
        trained = sum(sum(sample["loss_mask"]) for sample in samples)
        untrained = sum(item["tokens"] for item in coverage["untrained"])
        if coverage["trained"] != trained or coverage["sampled"] != trained + untrained:
            raise Violation(
                "coverage adds up", f"{trained} trained, {untrained} untrained, coverage says {short(coverage)}"
            )
        if unknown := [item for item in coverage["untrained"] if item["why"] not in REASONS]:
            raise Violation("what is not trained has its reason", short(unknown))
        if not least <= coverage["sampled"] <= most:
            bounds = f"{least}" if least == most else f"between {least} and {most}"
            raise Violation(
                "every sampled token is in the record",
                f"the engine reported {bounds} tokens, the record has {coverage['sampled']}",
            )


def is_better(one: Differences, other: Differences) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def longest_prefix(prompt: tuple[int, ...], turns: Sequence[Turn]) -> tuple[Turn | None, int]:
    found, length = None, 0
    for turn in turns:
        if len(turn.full) > length and prompt[: len(turn.full)] == turn.full:
            found, length = turn, len(turn.full)
    return found, length


def shared(one: Any, other: Any) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def last(turn: Turn) -> str:
    return short(turn.path[-1])


def short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) < 500 else text[:500] + "…"
