"""What one rendering of a chat template may cost: processor time, length of strings, number of items.

Templates come with models, and models from anywhere. Every operation of a template whose result can be larger than its
operands asks the `RenderBudget` of its rendering first, and every loop iteration, macro call and block is a step that
checks the time. Between two steps a template can only run operations whose operands are bounded, so that a limit
interrupts any template.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, cast

from tokentrue.errors import TemplateLimitError

LARGE_CHARS = 64 << 10  # strings above this count towards `total_chars`
NODE_CHARS = 64  # what a value in a list or a dictionary counts towards `total_chars`
STEPS_PER_CHECK = 64
STEP_CHARS = 4096  # that many characters count as a step
LARGEST_INTEGER_BITS = 4096
ONLY_TEXT = frozenset({str})
_WIDE = re.compile(r"\d{7}")
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*\d{7}")
_VALUE_WIDTH = re.compile(r"%[^a-zA-Z%]*\*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Of one rendering. `total_chars` is the sum over all large strings and all literals that a template makes."""

    cpu_s: float = 10.0
    string_chars: int = 128 << 20
    total_chars: int = 1 << 30
    items: int = 1_000_000


class RenderBudget:
    """What is left of the limits during one rendering. It belongs to one thread."""

    __slots__ = ("_deadline", "_limits", "_steps", "_total")

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._steps = 0
        self._total = 0
        self._deadline = time.thread_time() + limits.cpu_s

    def step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps >= STEPS_PER_CHECK:
            self._steps = 0
            if time.thread_time() > self._deadline:
                raise limit_error(f"{self._limits.cpu_s:g} s of processor time")

    def charge(self, chars: int) -> None:
        """Before a string of this length is made."""
        if chars > LARGE_CHARS:
            if chars > self._limits.string_chars:
                raise limit_error(f"{self._limits.string_chars} characters in one string")
            self._charge_total(chars)
            self.step(chars // STEP_CHARS)

    def _charge_total(self, chars: int) -> None:
        self._total += chars
        if self._total > self._limits.total_chars:
            raise limit_error(f"{self._limits.total_chars} characters in all")

    def check_items(self, count: int) -> None:
        if count > self._limits.items:
            raise limit_error(f"{self._limits.items} items")

    def check_number(self, value: Any) -> None:
        """A width, an indentation or a number of copies."""
        if isinstance(value, int) and value > self._limits.items:
            raise limit_error(f"a width or count of {self._limits.items}")

    def hold(self, container: Any) -> Any:
        """Charges a new list, tuple or dictionary for everything that is reached through it, as often as it is
        reached."""
        waiting: list[Any] = [container]
        nodes, chars, most = 0, 0, self._limits.items
        while waiting:
            value: Any = waiting.pop()
            kind = cast("type[Any]", type(value))
            if kind is str:
                chars += len(value)
            elif kind is dict:
                waiting.extend(value.values())
                waiting.extend(value)
            elif kind is list or kind is tuple:
                waiting.extend(value)
            nodes += 1
            if nodes > most or len(waiting) > most:
                raise limit_error(f"{most} values reached through one list or dictionary")
            if chars > self._limits.string_chars:
                raise limit_error(f"{self._limits.string_chars} characters in one list or dictionary")
        self._charge_total(nodes * NODE_CHARS + chars)
        self.step(1 + nodes // STEPS_PER_CHECK)
        return container

    # Operators.
    def add(self, operands: Sequence[Any]) -> Any:
        """`a + b + …`, from left to right."""
        if ONLY_TEXT.issuperset(map(type, operands)):
            if (chars := sum(map(len, operands))) > LARGE_CHARS:
                self.charge(chars)
            return "".join(operands)
        result = operands[0]
        for right in operands[1:]:
            self._check_sum(result, right)
            result = result + right
        return result

    def _check_sum(self, left: Any, right: Any) -> None:
        if isinstance(left, str) and isinstance(right, str):
            self.charge(len(left) + len(right))
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            self.check_items(len(cast("list[Any]", left)) + len(cast("list[Any]", right)))

    def multiply(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() + right.bit_length())
            return left * right
        if isinstance(left, int):
            left, right = right, left
        if isinstance(right, int) and isinstance(left, (str, bytes)):
            self.charge(len(left) * max(right, 0))
        elif isinstance(right, int) and isinstance(left, (list, tuple)):
            copied = cast("list[Any]", left)
            self.check_items(len(copied) * max(right, 0))
            return self.hold(copied * right)
        return left * right

    def power(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * abs(right))
        return left**right

    def join(self, separator: str, pieces: Iterable[str]) -> str:
        """`separator.join(pieces)`, given up as soon as the result would be too long."""
        kept: list[str] = []
        chars, limit = 0, self._limits.string_chars
        for piece in pieces:
            kept.append(piece)
            chars += len(piece) + len(separator)
            if chars > limit:
                self.charge(chars)
        self.charge(chars)
        return separator.join(kept)

    def collect(self, values: Iterable[Any]) -> list[Any]:
        if isinstance(values, (str, list, tuple)):
            self.check_items(len(cast("list[Any]", values)))
            return list(cast("Iterable[Any]", values))
        kept: list[Any] = []
        for value in values:
            kept.append(value)
            if not len(kept) % STEPS_PER_CHECK:
                self.check_items(len(kept))
                self.step(STEPS_PER_CHECK)
        return kept

    def check_result(self, result: Any) -> Any:
        """A result whose size is at most a small multiple of its inputs'."""
        if type(result) is str and len(result) > LARGE_CHARS:
            self.charge(len(result))
        return result


def check_bits(bits: int) -> None:
    if bits > LARGEST_INTEGER_BITS:
        raise limit_error(f"{LARGEST_INTEGER_BITS} bits in a whole number")


def limit_error(limit: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"chat_template: rendering it takes more than {limit}; correct the template, or shorten the conversation"
    )


# What must be known before a filter or a method of strings is called; everything else is checked by its result.
SizeCheck = Callable[..., None]


def check_numbers(budget: RenderBudget, value: Any, *args: Any, **kwargs: Any) -> None:
    for number in (*args, *kwargs.values()):
        budget.check_number(number)


def check_padding(budget: RenderBudget, value: Any, *args: Any, **kwargs: Any) -> None:
    """An indentation or a tabulator is repeated: per line, per tab, per level."""
    check_numbers(budget, value, *args, **kwargs)
    widths = [number for number in (*args, *kwargs.values()) if isinstance(number, int)]
    texts = [len(text) for text in (*args, *kwargs.values()) if isinstance(text, str)]
    if widest := max([0, *widths, *texts]):
        budget.charge((str(value).count("\n") + str(value).count("\t") + 1) * widest)


def check_replace(budget: RenderBudget, value: Any, old: Any = "", new: Any = "", *_: Any, **named: Any) -> None:
    old, new, text = str(named.get("old", old)), str(named.get("new", new)), str(value)
    found = text.count(old) if len(new) > len(old) else 0
    budget.charge(len(text) + found * (len(new) - len(old)))


def check_percent(budget: RenderBudget, value: Any, *args: Any, **kwargs: Any) -> None:
    """`text % values` and the filter `format`."""
    text, given = str(value), flatten_arguments(args, kwargs)
    if _WIDE_PERCENT.search(text):
        raise limit_error("six digits of width in a format")
    if _VALUE_WIDTH.search(text):
        check_numbers(budget, text, *given)
    charge_texts(budget, text, text.count("%"), given)


def check_format(budget: RenderBudget, value: Any, *args: Any, **kwargs: Any) -> None:
    """`text.format(…)`."""
    text, given = str(value), flatten_arguments(args, kwargs)
    for _, _, specification, _ in Formatter().parse(text):
        if specification and _WIDE.search(specification):
            raise limit_error("six digits of width in a format")
        if specification and "{" in specification:
            check_numbers(budget, text, *given)
    charge_texts(budget, text, text.count("{"), given)


def charge_texts(budget: RenderBudget, text: str, places: int, given: Sequence[Any]) -> None:
    """The longest value may stand in every place."""
    longest = max((len(str(item)) for item in given), default=0)
    budget.charge(len(text) + longest * places)


def flatten_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    given: list[Any] = []
    for arg in (*args, kwargs):
        if isinstance(arg, Mapping):
            given.extend(cast("Mapping[Any, Any]", arg).values())
        elif isinstance(arg, tuple):
            given.extend(cast("tuple[Any, ...]", arg))
        else:
            given.append(arg)
    return given


FILTER_CHECKS: Mapping[str, SizeCheck] = {
    "batch": check_numbers,
    "center": check_numbers,
    "format": check_percent,
    "indent": check_padding,
    "replace": check_replace,
    "slice": check_numbers,
    "tojson": check_numbers,
    "truncate": check_numbers,
    "wordwrap": check_padding,
}
METHOD_CHECKS: Mapping[str, SizeCheck] = {
    "center": check_numbers,
    "expandtabs": check_padding,
    "ljust": check_numbers,
    "replace": check_replace,
    "rjust": check_numbers,
    "zfill": check_numbers,
}
