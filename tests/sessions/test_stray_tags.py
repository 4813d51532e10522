"""A model that writes a stray think tag into its visible text is still matched, and still never confused with its
sibling."""

from __future__ import annotations

import pytest

from tokentrue.conversation.match_keys import find_changes

SERVED = {"role": "assistant", "content": "take 23\n</think>\nadd 2 coins.", "reasoning_content": "take 3"}


@pytest.mark.parametrize(
    ("replayed", "losses"),
    [
        ({"role": "assistant", "content": SERVED["content"]}, ("reasoning_dropped",)),
        ({"role": "assistant", "content": " " + SERVED["content"] + "\n"}, ("reasoning_dropped", "whitespace")),
        (dict(SERVED), ()),
        ({"role": "assistant", "content": "take 24\n</think>\nadd 2 coins."}, None),
        ({"role": "assistant", "content": "take 23\n</think>\nadd 3 coins."}, None),
    ],
)
def test_text_with_a_stray_tag(replayed: dict[str, str], losses: tuple[str, ...] | None) -> None:
    assert find_changes(SERVED, replayed) == losses


def test_inlining_is_still_seen() -> None:
    served = {"role": "assistant", "content": "4", "reasoning_content": "add"}
    assert find_changes(served, {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"}) == (
        "reasoning_inlined",
    )
    assert find_changes(served, {"role": "assistant", "content": "<think>\nsub\n</think>\n\n4"}) is None
