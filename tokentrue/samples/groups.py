"""The sessions that a group's baseline compares.

A session counts once, with the reward of its first sample, even if it has several (compaction, sub-agents, forks); all
its samples share its advantage. A session without a group is a group.
"""

from collections.abc import Callable, Iterable

from tokentrue.records import record
from tokentrue.types import Sample


@record
class GroupedSessions:
    """`groups` and `rewards`: by session, in the order of first samples; `of_sample` maps each sample to its session
    number."""

    groups: list[str]
    rewards: list[float]
    of_sample: list[int]

    def advantages(self, formula: Callable[[list[float]], list[float]]) -> list[float]:
        """One per sample; `formula` gets the rewards of a group's sessions."""
        members: dict[str, list[int]] = {}
        for number, group in enumerate(self.groups):
            members.setdefault(group, []).append(number)
        found: dict[int, float] = {}
        for numbers in members.values():
            found |= zip(numbers, formula([self.rewards[number] for number in numbers]), strict=True)
        return [found[number] for number in self.of_sample]


def group_sessions(samples: Iterable[tuple[str, str, float]]) -> GroupedSessions:
    numbers: dict[tuple[str, str], int] = {}
    rewards: list[float] = []
    of_sample: list[int] = []
    for group, session, reward in samples:
        if (group, session) not in numbers:
            numbers[group, session] = len(numbers)
            rewards.append(reward)
        of_sample.append(numbers[group, session])
    return GroupedSessions(groups=[group for group, _ in numbers], rewards=rewards, of_sample=of_sample)


def group_of(sample: Sample) -> str:
    return sample.group or f"session {sample.session_id}"
