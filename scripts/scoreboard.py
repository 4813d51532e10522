"""scoreboard.py: writes the scoreboard of docs/comparison.md and its first lines in README.md from examples/conformance/results/*.json, which
`tokentrue conformance TARGET --json` prints. `--check` exits 1 if a page is not what the results say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "examples" / "conformance" / "results"
MARK = {"pass": "pass", "warn": "warn", "fail": "**fail**", "not applicable": "–", "not run": ""}
HABITS = (
    "verbatim",
    "reasoning_dropped",
    "ids_renamed",
    "arguments_reordered",
    "retry",
    "compaction",
    "sub_agents",
    "tools_a_b",
)
RULES = {
    "1.1": "trains tokens that the engine did not sample there", "1.2": "other log-probabilities than the engine reported",
    "1.3": "trains tokens in a context that the engine was not given", "1.4": "another temperature than the agent asked for",
    "2.1": "trains tokens twice", "2.2": "leaves tokens out without a true reason", "2.3": "leaves out turns that the agent continued",
    "2.4": "rows of another session", "4.4": "a wrong finish reason", "9.1": "other images than the engine was given",
    "9.2": "another image than the agent sent", "0.1": "a good request is not answered", "0.2": "rows that cannot be read",
    "4.1": "shows other than it records", "4.3": "streams that break their protocol", "5.1": "hides a failure of the engine",
    "5.2": "a session does not survive a fault", "5.5": "loses turns on a kill", "7.1": "text becomes control tokens",
}  # fmt: skip


def main() -> int:
    reports = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    reports.sort(key=lambda one: (one["target"] != "tokentrue", one["target"]))
    pages = {
        ROOT / "docs" / "comparison.md": "\n".join(
            [*verdicts(reports), "", *histories(reports), "", *findings(reports), "", *commands(reports)]
        ),
        ROOT / "README.md": "\n".join(verdicts(reports)),
    }
    wrong = 0
    for page, text in pages.items():
        old = page.read_text()
        new = re.sub(
            r"(<!-- scoreboard -->\n).*?(<!-- end -->)",
            lambda m, text=text: f"{m[1]}{text}\n{m[2]}",
            old,
            flags=re.DOTALL,
        )
        if new != old and "--check" in sys.argv:
            print(
                f"{page.relative_to(ROOT)} is not what {RESULTS.relative_to(ROOT)} says: run python scripts/scoreboard.py"
            )
            wrong = 1
        elif new != old:
            page.write_text(new)
    return wrong


def verdicts(reports: list[dict[str, Any]]) -> list[str]:
    names = [f"{level['level']} {level['name']}" for level in reports[0]["levels"]]
    lines = [f"| gateway | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for one in reports:
        cells = [MARK[level["verdict"]] for level in one["levels"]]
        lines.append(f"| {one['target']} {one['version']} | {' | '.join(cells)} |")
    return lines


def histories(reports: list[dict[str, Any]]) -> list[str]:
    """Chat, one cell per gateway: tokens trained, rows, tokens to forward."""
    lines = ["| habit | " + " | ".join(one["target"] for one in reports) + " |", "|---" * (len(reports) + 1) + "|"]
    for habit in HABITS:
        cells = []
        for one in reports:
            found = [score for score in one["habits"] if (score["habit"], score["dialect"]) == (habit, "chat")]
            cells.append(f"{found[0]['coverage']:.0%} · {found[0]['rows']} · {found[0]['tokens']:,}" if found else "–")
        lines.append(f"| {habit.replace('_', ' ')} | {' | '.join(cells)} |")
    return lines


def findings(reports: list[dict[str, Any]]) -> list[str]:
    lines = ["| gateway | rule | what | dialects | cases | repeat the smallest |", "|---|---|---|---|---|---|"]
    for one in reports:
        fatal = [finding for finding in one["findings"] if finding["severity"] == "fatal"]
        for rule in sorted({finding["rule"] for finding in fatal}):
            found = [finding for finding in fatal if finding["rule"] == rule]
            dialects = ", ".join(dict.fromkeys(finding["case"].split(".")[2] for finding in found))
            first = next((finding for finding in found if finding["conversation"]), found[0])
            what = RULES.get(rule) or first["detail"].split(":")[0]
            lines.append(f"| {one['target']} | {rule} | {what} | {dialects} | {len(found)} | `{first['replay']}` |")
    return lines if len(lines) > 2 else ["No fatal finding."]


def commands(reports: list[dict[str, Any]]) -> list[str]:
    lines = ["| gateway | version | engine route | command | not applicable |", "|---|---|---|---|---|"]
    for one in reports:
        reasons: dict[str, list[str]] = {}
        for name, text in one["not_promised"].items():
            reasons.setdefault(text, []).append(name)
        why = "; ".join(f"{', '.join(names)}: {text}" for text, names in reasons.items())
        lines.append(f"| {one['target']} | {one['version']} | `{one['engine']}` | `{one['command']}` | {why} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
