"""Writes the set-up of each command-line agent into its page from its preset: `python scripts/harness_pages.py`.

A page has one block between the two marks; `tests/docs/test_harness_pages.py` fails if a page differs from its preset.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from tokentrue.environments.agents.presets import KEY, OPENAI, PRESETS, ROOT, TASK, AgentPreset

PAGES = Path(__file__).resolve().parents[1] / "docs" / "harnesses"
BEGIN, END = "<!-- from the preset -->", "<!-- end of the preset -->"
NAMES = {"gemini": "gemini-cli"}  # pages with another name than their preset
URLS = {"claude-code": "anthropic_base_url", "gemini": "google_base_url"}


def page_path(preset: AgentPreset) -> Path:
    return PAGES / f"{NAMES.get(preset.name, preset.name)}.md"


def render_preset(preset: AgentPreset) -> str:
    """Files in the agent's home, then the shell's lines."""
    blocks: list[str] = []
    for name, content in preset.home_files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2)
        text = text.replace(OPENAI, "http://127.0.0.1:8000/sessions/SESSION_ID/v1").replace(KEY, "THE_SESSIONS_KEY")
        kind = Path(name).suffix.removeprefix(".")
        blocks.append(f'`~/{name}`:\n\n```{kind} title="~/{name}"\n{text.strip()}\n```\n')
    lines: list[str] = []
    if preset.env:
        lines.append(" ".join(["export", *(f"{name}={fill(preset, value)}" for name, value in preset.env.items())]))
    arguments = ['"the task"' if word == TASK else fill(preset, word) for word in preset.arguments]
    lines.append(" ".join([preset.program, *arguments]))
    console = "\n".join(f"$ {line}" for line in lines)
    return "\n".join([BEGIN, "", *blocks, f"```console harness\n{console}\n```", "", END])


def fill(preset: AgentPreset, text: str) -> str:
    known = {
        OPENAI: "<the session's base_url>",
        ROOT: f"<the session's {URLS.get(preset.name)}>",
        KEY: "<the session's api_key>",
    }
    if not any(mark in text for mark in known):
        return shlex.quote(text)
    for mark, shown in known.items():
        text = text.replace(mark, shown)
    return text


def render_page(preset: AgentPreset) -> str:
    page = page_path(preset).read_text(encoding="utf-8")
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"{page_path(preset)} has no block between {BEGIN} and {END}")
    return pattern.sub(lambda _: render_preset(preset), page)


if __name__ == "__main__":
    for each in PRESETS.values():
        page_path(each).write_text(render_page(each), encoding="utf-8")
