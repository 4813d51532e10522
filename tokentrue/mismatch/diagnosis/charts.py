"""Bars and lines as plain SVG, with ticks and tooltips. Colours come from the page's style and follow its light or dark scheme."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEFT, RIGHT, TOP, BOTTOM = 62, 12, 26, 46
TICKS = 4
LETTER = 6.2  # width of a small letter


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The vertical axis: from value to height, linear or logarithmic."""

    low: float
    high: float
    log: bool
    height: int

    def y(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, max(value, self.low)))
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * (value - low) / ((high - low) or 1.0)

    def ticks(self) -> list[float]:
        if not self.log:
            return _round_steps(self.low, self.high)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = max(1, round((last - first) / TICKS))
        return [10.0**power for power in range(first, last + 1, every) if self.low <= 10.0**power <= self.high * 1.001]


def bar_chart(bars: Sequence[tuple[str, float]], *, label: str, log: bool = False, width: int = 760, height: int = 250) -> str:
    """Bars from zero, or on a logarithmic scale from one."""
    values = [value for _, value in bars] or [0.0]
    low, high = (1.0, max(10.0, *values)) if log else (min(0.0, *values), max(0.0, *values))
    axis = Axis(low=low * 0.5 if log else low, high=high if high > low else 1.0, log=log, height=height)
    step = (width - LEFT - RIGHT) / max(1, len(bars))
    zero = axis.y(axis.low if log else 0.0)
    shown = max(1, math.ceil(len(bars) * LETTER * max((len(name) + 1 for name, _ in bars), default=1) / (width - LEFT - RIGHT)))
    marks = ""
    for index, (name, value) in enumerate(bars):
        x, y = LEFT + step * index, axis.y(value)
        top, size = min(y, zero), abs(y - zero) if value or not log else 0.0
        side = "a" if value >= 0 else "b"
        box = f"x='{x + step * 0.08:.1f}' y='{top:.1f}' width='{max(step * 0.84, 1):.1f}' height='{size:.1f}'"
        marks += f"<rect class='{side}' {box}><title>{html.escape(name)}: {value:.6g}</title></rect>"
        if index % shown == 0:
            marks += _text(x + step / 2, height - BOTTOM + 16, name, anchor="middle")
    return _frame(axis, marks + _rule(zero, width, "base"), label, width)


def line_chart(
    labels: Sequence[str], lines: Mapping[str, Sequence[float | None]], *, label: str, log: bool = False, width: int = 760
) -> str:
    """One line per name; None is a gap, and so is what a logarithmic scale cannot show."""
    height = 250
    kept = {name: [v if v is not None and (v > 0 or not log) else None for v in line] for name, line in lines.items()}
    every = [value for line in kept.values() for value in line if value is not None]
    if not every:
        return "<p>Nothing above zero to plot.</p>"
    axis = Axis(low=min(every) * (0.8 if log else 1.0), high=max(every) * (1.25 if log else 1.0), log=log, height=height)
    room = width - LEFT - RIGHT
    marks = ""
    for number, (name, line) in enumerate(kept.items()):
        side = "ab"[number % 2]
        at = [LEFT + room * index / max(1, len(line) - 1) for index in range(len(line))]
        places = [(x, axis.y(value), value) for x, value in zip(at, line, strict=True) if value is not None]
        marks += f"<polyline class='line {side}' points='{' '.join(f'{x:.1f},{y:.1f}' for x, y, _ in places)}'/>"
        for x, y, value in places:
            marks += f"<circle class='{side}' cx='{x:.1f}' cy='{y:.1f}' r='3'><title>{html.escape(name)}: {value:.6g}</title></circle>"
        marks += f"<rect class='{side}' x='{LEFT + 170 * number}' y='6' width='10' height='10'/>"
        marks += _text(LEFT + 170 * number + 15, 15, name)
    shown = max(1, math.ceil(len(labels) * 50 / room))
    for index in range(0, len(labels), shown):
        anchor = "start" if index == 0 else "end" if index == len(labels) - 1 else "middle"
        marks += _text(LEFT + room * index / max(1, len(labels) - 1), height - BOTTOM + 16, labels[index], anchor=anchor)
    return _frame(axis, marks, label, width)


def _frame(axis: Axis, marks: str, label: str, width: int) -> str:
    heights = [(axis.y(tick), _number(tick)) for tick in axis.ticks()]
    grid = "".join(_rule(y, width, "grid") + _text(LEFT - 6, y + 4, name, anchor="end") for y, name in heights)
    caption = _text(LEFT + (width - LEFT - RIGHT) / 2, axis.height - 8, label, anchor="middle", kind="caption")
    view = f"viewBox='0 0 {width} {axis.height}' style='max-width:{width}px;min-width:{0.8 * width:.0f}px'"
    return f"<div class='plot'><svg {view} role='img' aria-label='{html.escape(label)}'>{grid}{marks}{caption}</svg></div>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _rule(y: float, width: int, kind: str) -> str:
    return f"<line class='{kind}' x1='{LEFT}' x2='{width - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "tick") -> str:
    return f"<text class='{kind}' x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{html.escape(text)}</text>"


def _round_steps(low: float, high: float) -> list[float]:
    """Round numbers inside [low, high], about `TICKS` of them."""
    rough = (high - low) / TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
