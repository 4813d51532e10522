"""The page of a command-line agent starts it as `tokentrue rollout` does: both come from its preset."""

from __future__ import annotations

import pytest

from scripts.harness_pages import page_path, render_page
from tokentrue.environments.agents.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_has_its_presets_set_up(name: str) -> None:
    preset = PRESETS[name]
    assert page_path(preset).read_text(encoding="utf-8") == render_page(preset), "run python scripts/harness_pages.py"
