"""The coverage table, row by row, on the real Qwen3 tokenizer; and the page that shows it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.turn.coverage_table import BEHAVIOURS, COLUMNS, PROJECTIONS, row
from tokentrue.samples import audit, read_samples, write_samples

PAGE = Path(__file__).parent.parent.parent / "docs" / "coverage.md"

# behaviour -> (sampled, trained, samples, reasons in tokens)
EXPECTED = {
    "retries the last turn": (2100, 2000, 1, {"retried": 100}),
    "retries a turn in the middle": (2100, 2000, 1, {"retried": 100}),
    "goes back three turns and asks again": (2400, 2000, 1, {"rolled_back": 400}),
    "retries the first turn": (2100, 2000, 1, {"retried": 100}),
    "sends every request twice, in flight": (2000, 2000, 1, {}),
    "runs five requests on one prefix at once": (2000, 2000, 5, {}),
    "asks for n = 4 and continues one": (8000, 2300, 4, {"not_chosen": 5700}),
    "runs sub-agents in the session": (2000, 2000, 5, {}),
    "compacts its history to a summary": (2000, 2000, 2, {}),
    "writes a reminder into an old message": (2000, 2000, 2, {}),
    "changes its tools": (2000, 2000, 2, {}),
    "changes its tools for 7 turns, then back": (2000, 2000, 2, {}),
    "has other tools at every turn (plan and act)": (2000, 2000, 2, {}),
    "has another system prompt at every turn": (2000, 2000, 2, {}),
    "has both at every turn": (2000, 2000, 2, {}),
    "puts a clock into its system prompt": (2000, 2000, 20, {}),
    'the same, pinned (`pin = ["system"]`)': (2000, 2000, 1, {}),
    "hangs up in mid-stream, then asks again": (2040, 2000, 1, {"disconnected": 40}),
    "comes back after the gateway restarted": (2000, 2000, 1, {}),
    "is cut off by max_tokens every fifth turn": (2000, 2000, 1, {}),
    "meets an engine failure, then asks again": (2000, 2000, 1, {}),
}


@pytest.mark.parametrize("name", [*PROJECTIONS, *BEHAVIOURS])
async def test_row(name: str, tmp_path: Path) -> None:
    found = await row(name)
    sampled, trained, samples, reasons = (2000, 2000, 1, {}) if name in PROJECTIONS else EXPECTED[name]
    assert (found.coverage.sampled, found.coverage.trained, len(found.samples)) == (sampled, trained, samples)
    assert Counter({item.why: 0 for item in found.coverage.untrained}).keys() == reasons.keys()
    for why, tokens in reasons.items():
        assert sum(item.tokens for item in found.coverage.untrained if item.why == why) == tokens
    assert sum(sum(sample.loss_mask) for sample in found.samples) == trained
    # What the trainer gets is what the engine was given and what it sampled, and an outsider can check it.
    engine_saw = set(found.session.provider.prompts)
    for sample in found.samples:
        for span in sample.spans:
            if span.kind == "sampled":
                assert tuple(sample.token_ids[: span.start]) in engine_saw
    write_samples(found.samples, tmp_path / "samples.jsonl")
    assert audit(read_samples(tmp_path / "samples.jsonl")).findings == []


async def test_the_page_shows_what_is_measured() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert "| " + " | ".join(COLUMNS) + " |" in page
    for name in ("drops the reasoning", "asks for n = 4 and continues one", "changes its tools"):
        assert "| " + " | ".join((await row(name)).cells) + " |" in page
