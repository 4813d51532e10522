"""Gemma-2 and Gemma-3: `<start_of_turn>model`; the template knows neither tools nor reasoning."""

from __future__ import annotations

from tokentrue.renderers.families.base import Clues, Family
from tokentrue.renderers.families.shapes import response


def recognise(clues: Clues) -> Family | None:
    if not clues.has("<start_of_turn>"):
        return None
    return Family(name="gemma-3", response_template=response({}, anchors=("<start_of_turn>model\n",), reasoning=None))
