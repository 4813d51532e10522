"""A report as one HTML page that needs nothing beside it."""

from __future__ import annotations

import html

from tokentrue.doctor.findings import Finding, Report

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#59636e;--line:#d1d9e0;--page:#fff;--card:#f6f8fa;--ok:#1a7f37;--fault:#cf222e;
--unsure:#9a6700}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;--page:#0d1117;--card:#151b23;--ok:#3fb950;--fault:#f47067;
--unsure:#d29922}}
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:var(--ink);background:var(--page)}
h1{font-size:1.6rem;margin:0 0 .8rem}
.summary{padding:.7rem 1rem;background:var(--card);border-left:4px solid var(--ok);border-radius:4px}
.summary.fault{border-color:var(--fault)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
td,th{padding:.4rem .8rem .4rem 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{color:var(--soft);font-weight:500}
.ok{color:var(--ok)}.fault{color:var(--fault);font-weight:600}.cannot_tell{color:var(--unsure)}
.soft{color:var(--soft)}
"""


def report_page(report: Report) -> str:
    kind = "summary fault" if report.faults else "summary"
    rows = "".join(_row(finding) for finding in report.findings)
    facts = "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in report.facts.items())
    head = "".join(f"<th>{name}</th>" for name in ("probe", "verdict", "figure", "cause and cure", "confidence"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Engine check: {html.escape(report.engine)}</title><style>{STYLE}</style>"
        f"<h1>Engine check: {html.escape(report.engine)}</h1><p class='{kind}'>{html.escape(report.summary)}</p>"
        f"<div class='scroll'><table><tr>{head}</tr>{rows}</table></div>"
        "<h2>Facts</h2><div class='scroll'><table>"
        f"<tr><th>model directory</th><td>{html.escape(report.model)}</td></tr>{facts}</table></div>"
        "</html>"
    )


def _row(finding: Finding) -> str:
    what = f"{html.escape(finding.cause)}<br><span class='soft'>{html.escape(finding.cure)}</span>" if finding.fault else ""
    detail = f"<br><span class='soft'>{html.escape(finding.detail)}</span>" if finding.detail else ""
    verdict = finding.verdict.value
    return (
        f"<tr><td>{html.escape(finding.probe)}</td><td class='{verdict}'>{verdict.replace('_', ' ')}</td>"
        f"<td>{html.escape(finding.figure)}{detail}</td><td>{what}</td><td>{finding.confidence}</td></tr>"
    )
