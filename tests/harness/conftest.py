"""`make test-harness` ends with a table: each harness with its version, its samples and its coverage, or why it did not
run. A test adds its row with `record_property("harness", …)`."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats, rows = terminalreporter.stats, []
    for report in (report for kind in ("passed", "failed", "skipped") for report in stats.get(kind, ())):
        seen = dict(report.user_properties)
        if "harness" in seen and report.when == "call":
            rows.append((seen["harness"], str(seen["samples"]), f"{seen['coverage']:.2%}", seen.get("note", "")))
        elif report.skipped and "tests/harness/" in report.nodeid:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            rows.append((report.nodeid.rpartition("::")[2], "-", "-", why.replace("\n", " ")[:100]))
        elif report.failed and "tests/harness/" in report.nodeid:
            rows.append((report.nodeid.rpartition("::")[2], "-", "-", "failed"))
    if rows:
        terminalreporter.section("harnesses")
        for name, samples, coverage, note in [("harness", "samples", "coverage", ""), *rows]:
            terminalreporter.line(f"{name:<44} {samples:>7} {coverage:>9}  {note}".rstrip())
