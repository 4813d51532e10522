"""The coverage table with pictures: four families, four dialects, streamed and not (tests/images/habits.py)."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.images.habits import HABITS, play
from tests.vision_families import BY_NAME, OWN
from tokentrue.conformance.agents.dialects import ANTHROPIC, CHAT, GOOGLE, RESPONSES

DIALECTS = (CHAT, RESPONSES, ANTHROPIC, GOOGLE)
FAMILIES = tuple(BY_NAME)
COMBINATIONS = list(product(FAMILIES, DIALECTS, (False, True), HABITS))
# `make test` plays some habits in every dialect with our own templates; 61 divides none of the counts.
FAST = COMBINATIONS[: len(OWN) * len(COMBINATIONS) // len(FAMILIES) : 61]


@pytest.mark.parametrize(
    "family, dialect, stream, habit",
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in COMBINATIONS],
)
async def test_every_sampled_token_is_trained(
    family: str, dialect: str, stream: bool, habit: str, tmp_path: Path
) -> None:
    await play(habit, BY_NAME[family], dialect, stream=stream, folder=tmp_path)
