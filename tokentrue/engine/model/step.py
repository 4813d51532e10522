"""One step as plain numbers: what the stages of a pipeline are sent, and what a forward pass in the same process
reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """For each sequence of the step its newest `counts[i]` tokens from position `starts[i]` on; `ids` are back to
    back."""

    ids: list[int]
    starts: list[int]
    counts: list[int]
    blocks: list[list[int]]  # of each sequence's cache
    adapters: list[str | None]
    state_slots: list[int]  # of a hybrid model's recurrent states; else empty
    state_copies: list[tuple[int, int]]  # between state slots, in order, before the step

    @property
    def rows(self) -> int:
        """Tokens of the step."""
        return len(self.ids)
