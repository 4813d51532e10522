"""Reports of commands, made of the viewer's parts: facts, charts and tables on one page, and rollouts to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tokentrue.json_types import JsonObject
from tokentrue.samples.trainer_logprobs import TrainerLogprobs
from tokentrue.viewer.data import ViewerData
from tokentrue.viewer.page import MOST_TOKENS, write_export
from tokentrue.viewer.records import RecordSource, ViewRenderer
from tokentrue.viewer.sources import SampleList


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`series` maps a name to its values over `x`; None is a gap. `labels` name bars instead of numbers."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[float | None]]
    x: Sequence[float] = ()
    labels: Sequence[str] = ()
    kind: Literal["line", "bars"] = "line"
    log_y: bool = False
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`facts` are label and value; `verdict` is one sentence, `ok` whether it is good."""

    title: str
    verdict: str = ""
    ok: bool = True
    facts: Sequence[tuple[str, str]] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[ReportTable] = ()
    note: str = ""
    highlights: Sequence[tuple[str, str]] = field(default=())  # the few numbers to read first


def write_report(
    path: str | Path,
    report: Report,
    *,
    source: RecordSource | None = None,
    renderer: ViewRenderer | None = None,
    trainer: Mapping[str, TrainerLogprobs] | None = None,
    most_tokens: int = MOST_TOKENS,
) -> None:
    """Writes one self-contained HTML file that shows the first sessions of `source`, up to `most_tokens`, token by
    token."""
    body: JsonObject = asdict(report)
    rollouts = source if source is not None else SampleList((), name=report.title)
    write_export(ViewerData(rollouts, renderer=renderer, trainer=trainer, report=body), path, most_tokens=most_tokens)
