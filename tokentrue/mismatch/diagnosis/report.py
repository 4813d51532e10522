"""A diagnosis as one HTML page that needs nothing beside it: tables and plots, light or dark, wide or narrow."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokentrue.mismatch.diagnosis.charts import bar_chart, line_chart
from tokentrue.mismatch.diagnosis.diagnose import Diagnosis, WorstRow
from tokentrue.mismatch.diagnosis.sums import SIGNS, TAILS
from tokentrue.mismatch.metrics import Histogram, Mean

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#59636e;--line:#d1d9e0;--page:#fff;--card:#f6f8fa;--a:#0969da;--b:#cf222e;
--good:#1a7f37;--up:9,105,218;--down:207,34,46}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;--page:#0d1117;--card:#151b23;--a:#4493f8;--b:#f47067;
--good:#3fb950;--up:68,147,248;--down:244,112,103}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:var(--ink);background:var(--page)}
h1{font-size:1.6rem;margin:0 0 .8rem}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--line)}
.scroll,.plot{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
td,th{padding:.22rem .8rem .22rem 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:500}
td:first-child,th:first-child{text-align:left}
.verdict{padding:.7rem 1rem;background:var(--card);border-left:4px solid var(--good);border-radius:4px}
.verdict.alarm{border-color:var(--b)}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(16rem,1fr));gap:.15rem 2rem;margin:0}
dl div{display:flex;justify-content:space-between;gap:1rem;border-bottom:1px solid var(--line);padding:.2rem 0}
dt{color:var(--soft)}
dd{margin:0;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
dl.facts{grid-template-columns:1fr;max-width:44rem}
dl.facts dd{white-space:normal;overflow-wrap:anywhere}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(22rem,100%),1fr));gap:1rem 2rem;align-items:start}
.pair>*{min-width:0}
svg{width:100%;height:auto;display:block}
.a{fill:var(--a)}.b{fill:var(--b)}
.line{fill:none;stroke-width:2}.line.a{stroke:var(--a)}.line.b{stroke:var(--b)}
.grid{stroke:var(--line)}.base{stroke:var(--soft)}
text{fill:var(--soft);font-size:11px}.caption{fill:var(--ink);font-size:13px}
.tokens{font:13px/1.9 ui-monospace,monospace;overflow-wrap:anywhere;white-space:pre-wrap;margin:.4rem 0 1rem}
.tokens span{padding:.12rem .05rem;border-radius:3px}
.tokens .worst{outline:2px solid var(--ink)}
summary{cursor:pointer}
.soft{color:var(--soft);font-size:14px}
"""
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style><h1>{title}</h1><p class="{verdict_class}">{verdict}</p>{body}</html>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of an excerpt: what to print for it, and its two log-probabilities."""

    text: str
    trainer: float
    rollout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A worst row with its tokens; `first` is the number of the first one shown."""

    row: WorstRow
    first: int
    tokens: Sequence[Token]


def report_html(
    diagnosis: Diagnosis,
    *,
    title: str = "Training-inference mismatch",
    verdict: str = "",
    alarm: bool = False,
    facts: Mapping[str, str] | None = None,
    steps: Sequence[tuple[str, Diagnosis]] = (),
    excerpts: Sequence[Excerpt] = (),
) -> str:
    """The page. `steps` are the parts over time, each with a label, in order."""
    parts = [
        section("What was compared", listing(list((facts or {}).items()), kind="facts")) if facts else "",
        section("In numbers", _numbers(diagnosis)),
        section("|δ| per token", _delta_histogram(diagnosis)),
        section("Ratio tails, raw and as applied", _tails(diagnosis)),
        section("K1 and K3 over steps", _over_steps(steps)),
        section("Contribution C(r) = -(r - 1)·A by the sign of the advantage", _contribution(diagnosis)),
        section("Where |δ| is", _where(diagnosis)),
        section("Worst sequences", _worst(diagnosis, excerpts)),
    ]
    kind = "verdict alarm" if alarm else "verdict"
    return PAGE.format(title=html.escape(title), style=STYLE, verdict=html.escape(verdict), verdict_class=kind, body="".join(parts))


def section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>{body}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(_text(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{top}</tr>{body}</table></div>"


def listing(items: Sequence[tuple[str, object]], *, kind: str = "numbers") -> str:
    rows = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(_text(value))}</dd></div>" for name, value in items)
    return f"<dl class='{kind}'>{rows}</dl>"


def _pair(*parts: str) -> str:
    """Side by side where the page is wide enough."""
    return f"<div class='pair'>{''.join(f'<div>{part}</div>' for part in parts)}</div>"


def _text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else str(cell)


def _numbers(d: Diagnosis) -> str:
    names = {
        "tokens": "tokens", "rows": "sequences", "delta/mean": "mean δ", "delta/abs_mean": "mean |δ|", "delta/min": "smallest δ",
        "delta/max": "largest δ", "delta/quantile/abs_p50": "median |δ|", "delta/quantile/abs_p99": "99% of |δ| below",
        "delta/quantile/abs_p99.9": "99.9% of |δ| below", "corr/k1": "K1", "corr/k2": "K2", "corr/k3": "K3",
        "ppo_train/k3": "K3 of current ÷ trainer",
        "ppo_rollout/k3": "K3 of current ÷ rollout", "ppl/trainer": "perplexity, trainer", "ppl/rollout": "perplexity, rollout",
        "ppl/ratio": "their ratio", "chi2/token": "χ² per token", "chi2/sequence": "χ² per sequence",
        "ratio/raw/ess": "effective sample share, tokens",
        "ratio/sequence/ess": "effective sample share, sequences", "flips": "argmax flips",
        "fraction/rejected": "tokens rejected by the correction",
    }  # fmt: skip
    whole = ("tokens", "rows")
    return listing([(label, int(d[key]) if key in whole else d[key]) for key, label in names.items() if key in d.metrics])


def _delta_histogram(d: Diagnosis) -> str:
    """Octaves of |δ| against counts, both on log scales; exact agreement is the first bar."""
    found = d.metrics.statistics.get("delta/quantile")
    if not isinstance(found, Histogram) or not found.total:
        return "<p>No token was compared.</p>"
    octaves: dict[int, int] = {}
    equal = 0
    for low, high, count in found.bins(magnitude=True):
        if high <= 1e-30:
            equal += count
        else:
            octaves[math.floor(math.log2((low + high) / 2))] = octaves.get(math.floor(math.log2((low + high) / 2)), 0) + count
    bars = [("0", equal)] if equal else []
    if octaves:
        bars += [(f"{2.0**power:.1e}", octaves.get(power, 0)) for power in range(min(octaves), max(octaves) + 1)]
    return bar_chart(bars, label="tokens (log scale) by |δ|, one bar an octave", log=True)


def _tails(d: Diagnosis) -> str:
    rows: list[tuple[object, ...]] = []
    applied = d["ratio/applied/count"] > 0
    for bound in TAILS:
        for way, label in ((f"above_{bound:g}", f"r > {bound:g}"), (f"below_1/{bound:g}", f"r < 1/{bound:g}")):
            rows.append((label, d[f"tail/raw/{way}"], d[f"tail/applied/{way}"] if applied else "–"))
    rows.append(("mean", d["ratio/raw/mean"], d["ratio/applied/mean"] if applied else "–"))
    rows.append(("smallest", math.exp(min(d["delta/min"], 700)), d["ratio/applied_range/min"] if applied else "–"))
    rows.append(("largest", math.exp(min(d["delta/max"], 700)), d["ratio/applied_range/max"] if applied else "–"))
    rows.append(("effective sample share", d["ratio/raw/ess"], d["ratio/applied/ess"] if applied else "–"))
    found = d.metrics.statistics.get("delta/quantile")
    plot = ""
    if isinstance(found, Histogram) and found.total:
        shares = (0.5, 0.9, 0.99, 0.999, 0.9999)
        lines = {
            "above: r - 1": [math.expm1(min(found.quantile(s), 80)) for s in shares],
            "below: 1 - r": [-math.expm1(found.quantile(1 - s)) for s in shares],
        }
        label = "distance of r from 1 that this share of tokens stays within (log scale)"
        plot = line_chart([f"{100 * s:g}%" for s in shares], lines, label=label, log=True, width=520)
    return _pair(table(("share of tokens", "raw", "as applied"), rows), plot)


def _over_steps(steps: Sequence[tuple[str, Diagnosis]]) -> str:
    if len(steps) < 2:
        return "<p>One step only: nothing to plot.</p>"
    lines = {"|K1|": [abs(d["corr/k1"]) for _, d in steps], "K3": [d["corr/k3"] for _, d in steps]}
    return line_chart([label for label, _ in steps], lines, label="per token (log scale)", log=True)


def _contribution(d: Diagnosis) -> str:
    if not any(d[f"contribution/rollout/{sign}/count"] for sign in SIGNS):
        return "<p>No advantages were given.</p>"
    head = ("denominator", "advantage", "tokens", "mean", "deviation", "skew")
    rows = [
        (name, sign, int(d[at := f"contribution/{name}/{sign}/count"]), *(d[at.replace("count", key)] for key in ("mean", "std", "skew")))
        for name in ("trainer", "rollout")
        for sign in SIGNS
    ]
    bars = [(f"{name}, A {'>' if sign == 'positive' else '<'} 0", d[f"contribution/{name}/{sign}/mean"]) for name, sign, *_ in rows]
    return _pair(table(head, rows), bar_chart(bars, label="mean of C(r); 0 when on policy", width=520))


def _where(d: Diagnosis) -> str:
    charts: list[str] = []
    titles = {"by_probability": "probability of the token under the rollout", "by_position": "sampled tokens before it", "by_kind": "kind"}
    for prefix, title in titles.items():
        found = {name: stat for name, stat in d.metrics.statistics.items() if name.startswith(f"{prefix}/") and isinstance(stat, Mean)}
        bars = [(name.partition("/")[2], stat.value) for name, stat in found.items() if stat.count]
        if any(value for _, value in bars):
            charts.append(bar_chart(bars, label=f"mean |δ| by {title}", width=520))
    return _pair(*charts) if charts else "<p>No difference anywhere.</p>"


def _worst(d: Diagnosis, excerpts: Sequence[Excerpt]) -> str:
    if not d.worst:
        return "<p>No sequence differs.</p>"
    head = ("sequence", "tokens", "mean K3", "ΣK3", "mean δ", "max |δ|", "at token", "log of the ratios' product")
    rows = [(w.row, w.tokens, w.score, w.sum_k3, w.mean_delta, w.max_abs_delta, w.position, w.log_product) for w in d.worst]
    note = "Blue: the trainer finds the token likelier than the rollout did; red: less likely. Full colour is the excerpt's largest |δ|, "
    note += "which is framed; none is a hundredth of it or less."
    shown = f"<p class='soft'>{note}</p>" if excerpts else ""
    return table(head, rows) + shown + "".join(_excerpt(excerpt) for excerpt in excerpts)


def _excerpt(excerpt: Excerpt) -> str:
    most = max((abs(token.trainer - token.rollout) for token in excerpt.tokens), default=0.0)
    spans = "".join(_token(excerpt.first + index, token, most) for index, token in enumerate(excerpt.tokens))
    name = html.escape(excerpt.row.row)
    return f"<details open><summary>{name}, tokens from {excerpt.first}</summary><p class='tokens'>{spans}</p></details>"


def _token(number: int, token: Token, most: float) -> str:
    delta = token.trainer - token.rollout
    strength = min(1.0, max(0.0, (math.log10(abs(delta) / most) + 2) / 2)) if delta and most else 0.0
    kind = " class='worst'" if most and abs(delta) == most else ""
    colour = f" style='background:rgba(var(--{'up' if delta > 0 else 'down'}),{0.65 * strength:.2f})'" if strength else ""
    tip = f"token {number}: δ {delta:+.4g}, trainer {token.trainer:.4f}, rollout {token.rollout:.4f}"
    return f"<span{kind}{colour} title='{tip}'>{html.escape(_visible(token.text))}</span>"


def _visible(text: str) -> str:
    """Line ends and other controls that would vanish on the page."""
    return "".join({"\n": "⏎\n", "\t": "⇥", "\r": "␍"}.get(c, c if c.isprintable() else "�") for c in text)
