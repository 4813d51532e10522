"""What the model samples: reasoning, text and calls, well formed or not, in ids that the tokenizer would not have
chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.fuzz.spelling import spell
from tokentrue.conformance.standin import generation as base
from tokentrue.conformance.standin.generation import Output

# Combining marks (also in another order, or with nothing to combine with), ligatures, the two normal forms of one text,
# and characters that compatibility forms replace: a tokenizer may compose, a harness must not.
UNICODE = (
    "caf\u00e9\u0301", "cafe\u0301", "caf\u00e9", "\u0301alone", "q\u0323\u0307", "q\u0307\u0323", "\ufb01n",
    "o\ufb03ce",
    "\ufb05",
    "\u212b", "\u00c5", "A\u030a", "\u1112\u1161\u11ab", "\ud55c", "\uff21\uff22", "\u00bd", "\u2460", "x\u00b2",
    "\u2126",
    "\u0344",
    "\u0958", "e\u0301\u0301\u0301", "\u1e69", "s\u0323\u0307", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u2764\ufe0f",
    "n\u0303",
    "\u00a0", "\u3000wide", "\ufeffbom", "\u1e9b\u0323", "\U0001d15e",
)  # fmt: skip
WORDS = (
    "the", "shelf", "door", "café", "東京", "слово", "🙂", "🧪", "naïve", "x=1;", '"quoted"', "\\back", "1e3",
    "a\tb", "{brace}",
    "[1, 2]", "λ", "⏎", "them", "tokenization", "...", "—", "`code`", "</p>", "100%", "e\u0301", "\u200bzero",
    "한국어", "ok",
    "nul\x00", "\r\n", "line\u2028", *UNICODE,
)  # fmt: skip
MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|im_end|>",
    "<|im_start|>",
    "<tool_response>",
    "<|endoftext|>",
)
BROKEN_CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "x"}\n</tool_call>',
    '<tool_call>\n{"name": "look"',
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    "<tool_call>\nlook(x)\n</tool_call>",
    '<tool_call>\n{"name": "look", "arguments": "text"}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {"at": "y"}}',
    '<tool_call>\n{"name": "no_such_tool", "arguments": {"at": "y"}}\n</tool_call>',
    "<tool_call>\n</tool_call>",
    '{"name": "look", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {"at": 1e400}}\n</tool_call>',
    '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
    '<tool_call>\n[{"name": "look", "arguments": {}}]\n</tool_call>',
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n',
    '<tool_call>\n{"name": "patch", "arguments": {"input": "+a \\ud83e',
    '<tool_call>\n{"name": "patch", "arguments": {"input": "+a", "and": [1]}}\n</tool_call>',
    '<tool_call>\n{"name": "patch", "arguments": {"at": "x"}}\n</tool_call>',
    '<tool_call>\n{"name": "patch", "arguments": {"input": 5}}\n</tool_call>',
)


class Writer(base.Writer):
    """Random outputs for one case."""

    WORDS = WORDS

    def output(self, tools: Sequence[str], *, calls: int | None = None) -> Output:
        """`calls` asks for a well-formed turn with that many."""
        kind = self._rng.random()
        if calls is None and kind < 0.14:
            return self._odd()
        reasoning = self.words(12) if self._rng.random() < 0.5 else ""
        count = self._rng.choice((0, 0, 0, 1, 1, 2, 2, 3)) if calls is None else calls
        made = [self._call(name) for name in self._some(tools, count)]
        text = self.words() if not made or self._rng.random() < 0.4 else ""
        return self.structured(reasoning, text, made)

    def _some(self, tools: Sequence[str], count: int) -> list[str]:
        """Mostly different ones: a call served under another's name must show."""
        if not tools or not count:
            return []
        names = self._rng.sample(list(tools), min(count, len(tools)))
        return names if self._rng.random() < 0.85 else [names[0]] * len(names)

    def _call(self, name: str) -> tuple[str, str]:
        if name.startswith("patch"):
            return name, json.dumps({"input": self.words()}, ensure_ascii=self._rng.random() < 0.5)
        arguments: dict[str, Any] = {"at": self.words(3)}
        if self._rng.random() < 0.4:
            arguments["depth"] = self._rng.choice((0, 1, 2.5, -3, 1e20, True, None))
        if self._rng.random() < 0.2:
            arguments["list"] = [self.words(1), {"k": self.words(1)}]
        if self._rng.random() < 0.1:
            arguments = {}
        separators = self._rng.choice(((", ", ": "), (",", ":"), (" , ", " :  ")))
        return name, json.dumps(arguments, ensure_ascii=self._rng.random() < 0.3, separators=separators)

    def _odd(self) -> Output:
        rng, vocabulary = self._rng, self._vocabulary
        kind = rng.randrange(8)
        if kind == 0:
            return Output(ids=(vocabulary.stop,), text="", expected=("", "", ()))
        if kind == 1:
            return self.sampled(self.words() + "\n" + rng.choice(BROKEN_CALLS))
        if kind == 2:
            return self.sampled(f"<think>\n{self.words()}\n</think>\n\n{rng.choice(BROKEN_CALLS)}")
        if kind == 3:  # a marker's literal, spelled with plain tokens
            raw = f"{self.words(3)} {rng.choice(MARKERS)} {self.words(3)}"
            return Output(ids=(*spell(vocabulary, raw), vocabulary.stop), text=raw)
        if kind == 4:  # a marker token where none belongs
            marker = rng.choice([mark for mark in MARKERS[:4] if mark in vocabulary.added])
            return self.sampled(f"{self.words(3)} {marker} {self.words(3)}")
        if kind == 5:  # cut in the middle, perhaps of a character: the length limit of the engine
            whole = self.sampled(f"<think>\n{self.words()}\n</think>\n\n{self.words()} 東京🧪")
            cut = rng.randint(1, len(whole.ids) - 1)
            return Output(ids=whole.ids[:cut], text=vocabulary.text(whole.ids[:cut]))
        if kind == 6:
            return self.sampled(f"<think>\n{self.words()}")
        return self.sampled(f"  \n{self.words()}\n\n ")

    def again(self, output: Output) -> Output:
        """The same text, sampled in other ids."""
        ids = self._vocabulary.split(self._vocabulary.encode(output.text), self._rng, 0.5)
        return replace(
            output, ids=(*ids, *([self._vocabulary.stop] if output.ids[-1:] == (self._vocabulary.stop,) else []))
        )
