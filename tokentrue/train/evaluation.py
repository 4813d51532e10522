"""Evaluation between steps: held-out reward and pass@k, the best version so far, and when to stop early."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from tokentrue.train.config import EvaluationConfig
from tokentrue.train.ranks import Ranks

Rewards = Sequence[Sequence[float]]  # by task, one for each attempt


class Evaluator:
    """Called after every step. `run` runs this rank's tasks; all ranks get the result of all."""

    def __init__(
        self, config: EvaluationConfig, run: Callable[[], Awaitable[Rewards]], ranks: Ranks | None = None
    ) -> None:
        self.config = config
        self._run = run
        self._ranks = ranks or Ranks()
        self.best = -math.inf
        self.best_version: int | None = None
        self._without_gain = 0

    async def __call__(self, version: int) -> Mapping[str, float]:
        if not self.config.every or version % self.config.every:
            return {}
        mine = await self._run()
        await self._ranks.meet()
        rewards = [attempts for part in self._ranks.all_gather_object(mine) for attempts in part]
        means = [sum(attempts) / len(attempts) for attempts in rewards]
        mean = sum(means) / len(means)
        self._without_gain = 0 if mean > self.best else self._without_gain + 1
        if mean > self.best:
            self.best, self.best_version = mean, version
        found = {"eval/reward": mean, "eval/best": self.best}
        for k in powers_of_two(self.config.attempts):
            solved = [sum(reward >= self.config.solved for reward in attempts) for attempts in rewards]
            found[f"eval/pass@{k}"] = sum(pass_at_k(len(a), s, k) for a, s in zip(rewards, solved, strict=True)) / len(
                rewards
            )
        return found

    def state(self) -> dict[str, float | int]:
        """What a resumed run must know."""
        if self.best_version is None:
            return {}
        return {"best": self.best, "best_version": self.best_version, "without_gain": self._without_gain}

    def restore(self, state: Mapping[str, float | int]) -> None:
        if state:
            self.best, self.best_version = float(state["best"]), int(state["best_version"])
            self._without_gain = int(state["without_gain"])

    @property
    def is_over(self) -> bool:
        return bool(self.config.patience) and self._without_gain >= self.config.patience


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """The probability that k of the attempts hold a solved one: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def powers_of_two(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]
