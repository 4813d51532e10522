"""One training step: rows in, one or more optimiser updates, a report out. No sockets, no files, no clock but for timings.

The corridor is `Trainer.step`: recompute → check exactness → correct → update. With `exact` the recomputed log-probabilities of tokens
that the current weights sampled must equal the rollout's in every bit, or the step raises before any weight moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor, nn

from tokentrue.errors import ConfigError, ExactnessError
from tokentrue.mismatch import Corrected, LossConfig, Metrics, correct, diagnose, policy_loss
from tokentrue.train.batch import Row, rows_of, session_advantages
from tokentrue.train.config import OptimConfig, TrainConfig, learning_rate
from tokentrue.train.exactness import Agreement, agreement, require_exact
from tokentrue.train.packing import pack, share, split_even
from tokentrue.train.ranks import Ranks, whole, whole_weights
from tokentrue.train.scoring import ExactScorer, PlainScorer, Scorer
from tokentrue.types import Sample

MEASURED: Mapping[str, str] = {  # what a step reports of `diagnose`
    "delta_abs_mean": "delta/abs_mean",
    "delta_min": "delta/min",
    "delta_max": "delta/max",
    "k1": "corr/k1",
    "k3": "corr/k3",
    "chi2": "chi2/token",
    "ess": "ratio/sequence/ess",
    "log_ppl_trainer": "log_ppl/trainer",
    "skew_positive": "contribution/rollout/positive/skew",
    "skew_negative": "contribution/rollout/negative/skew",
    "pull_positive": "contribution/rollout/positive/mean",
    "pull_negative": "contribution/rollout/negative/mean",
}
NOBODY = torch.zeros(2, dtype=torch.int64)  # stands in where a rank has no row for a forward pass that all ranks must join


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Micro:
    """Rows that share a forward pass, by number; `corrected` is their correction, made once per step from the recomputed values."""

    rows: tuple[int, ...]
    corrected: Corrected | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """One optimiser update: the rows that its loss is a mean over (on all ranks), and this rank's forward passes."""

    part: Sequence[int]
    micros: Sequence[Micro]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """What a step knows about its rows before any weight moves: by row number, this rank's rows only."""

    recomputed: Mapping[int, Tensor]
    reference: Mapping[int, Tensor]
    advantages: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did. `metrics` are plain numbers for a log."""

    step: int
    version: int  # of the weights that the step produced
    metrics: Mapping[str, float]
    agreement: Agreement
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])


class Trainer:
    """Owns the model's weights and the optimiser. `version` counts finished steps: the weights of version v made v steps."""

    def __init__(
        self,
        model: nn.Module,
        *,
        config: TrainConfig,
        optim: OptimConfig,
        loss: LossConfig,
        ranks: Ranks | None = None,
        reference: nn.Module | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        if loss.entropy_coefficient:
            raise ConfigError("loss.entropy_coefficient: the trainer's scores carry no entropy; set it to 0")
        if loss.penalty is not None and loss.penalty.against == "reference" and reference is None:
            raise ConfigError("loss.penalty: against='reference' needs a reference model")
        self.model = model
        self.config = config
        self.optim = optim
        self.loss = loss
        self.ranks = ranks or Ranks()
        self.reference = reference
        self.scorer: Scorer = scorer or (ExactScorer() if config.exact else PlainScorer())
        self.version = 0
        self.updates = 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
        model.train()

    # ---- the corridor -------------------------------------------------------------------------------------------------------------
    def step(self, groups: Sequence[Sequence[Sample]]) -> StepReport:
        clock = Clock()
        rows = rows_of(groups)
        if not rows:
            raise ConfigError("a training step got no rows: every rollout of the batch failed, or none was asked for")
        advantages = session_advantages(rows, self.config.baseline)
        with self.scorer.active(self.model):
            with clock("recompute"):
                values = self.recompute(rows, advantages)
            found = self.compare(rows, values.recomputed)
            with clock("correct"):
                measured = self.measured(rows, values)
                updates = self.planned(rows, values)
            with clock("update"):
                learnt = [self.update(rows, values, update) for update in updates]
        self.version += 1
        return self.report(rows, advantages, found, measured, learnt, clock)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return whole_weights(self.model)

    # ---- recompute ----------------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def recompute(self, rows: Sequence[Row], advantages: Sequence[float]) -> Values:
        """Log-probabilities of this rank's rows under the weights before the step, and under the reference model if there is one."""
        mine: dict[int, Tensor] = {}
        reference: dict[int, Tensor] = {}
        for part in self.minibatches(rows):
            for bin_ in self.bins(rows, part):
                mine |= self.scored(self.model, rows, bin_)
                if self.reference is not None:
                    reference |= self.scored(self.reference, rows, bin_)
        return Values(recomputed=mine, reference=reference, advantages=advantages)

    def scored(self, model: nn.Module, rows: Sequence[Row], numbers: Sequence[int]) -> dict[int, Tensor]:
        values = self.scorer(model, [rows[i].ids for i in numbers] or [NOBODY], temperature=self.config.temperature)
        return dict(zip(numbers, values, strict=False))

    def compare(self, rows: Sequence[Row], recomputed: Mapping[int, Tensor]) -> Agreement:
        numbers = sorted(recomputed)
        mine = [rows[i] for i in numbers], [recomputed[i] for i in numbers]
        found, trouble = agreement(*mine, version=self.version), ""
        if self.config.exact and found.differing:
            try:
                require_exact(*mine, version=self.version, step=self.version)
            except ExactnessError as error:
                trouble = str(error)
        everyone = self.ranks.everyone((found, trouble))  # all ranks stop together, or none
        for _, said in everyone:
            if said:
                raise ExactnessError(said)
        return reduce(Agreement.merge, (part for part, _ in everyone))

    def measured(self, rows: Sequence[Row], values: Values) -> dict[str, float]:
        """How far the trainer's log-probabilities are from the rollout's, over all trained tokens, stale ones too."""
        numbers = sorted(values.recomputed)
        chosen = [rows[i] for i in numbers]
        mine: Metrics | None = None
        if numbers:
            device = values.recomputed[numbers[0]].device
            mine = diagnose(
                torch.cat([values.recomputed[i] for i in numbers]),
                torch.cat([row.rollout for row in chosen]).to(device),
                torch.cat([row.mask for row in chosen]).to(device),
                cu_seqlens=bounds(chosen),
                advantages=per_token(chosen, [values.advantages[i] for i in numbers], device),
                worst=0,
            ).metrics
        everyone = [found for found in self.ranks.everyone(mine) if found is not None]
        merged = everyone[0].merge(*everyone[1:])
        return {f"mismatch/{name}": merged[key] for name, key in MEASURED.items()}

    # ---- who trains where ----------------------------------------------------------------------------------------------------------
    def minibatches(self, rows: Sequence[Row]) -> list[range]:
        return split_even(len(rows), self.config.minibatches)

    def bins(self, rows: Sequence[Row], part: Sequence[int]) -> list[list[int]]:
        """This rank's forward passes over a minibatch; every rank has as many, some perhaps empty."""
        part = list(part)
        shares = share([rows[i].length for i in part], self.ranks.world)
        packed = [pack([rows[part[k]].length for k in found], self.config.micro_tokens) for found in shares]
        most = max(len(bins) for bins in packed)
        mine = [[part[shares[self.ranks.rank][k]] for k in found] for found in packed[self.ranks.rank]]
        return mine + [[] for _ in range(most - len(mine))]

    # ---- correct ------------------------------------------------------------------------------------------------------------------
    def planned(self, rows: Sequence[Row], values: Values) -> list[Update]:
        """The updates of the step, their micro-batches with their correction unless that needs the moving policy."""
        made: list[Update] = []
        for part in self.minibatches(rows):
            active = [i for i in part if values.advantages[i] != 0.0] if self.config.drop_idle_rows else list(part)
            micros = [Micro(rows=tuple(bin_)) for bin_ in self.bins(rows, active)] if active else []
            if not self.loss.correction.needs_current:
                micros = [replace(m, corrected=self.correction(rows, values, m.rows)) if m.rows else m for m in micros]
                micros = self.normalised(micros)
            made.append(Update(part=part, micros=micros))
        return made * self.config.epochs

    def correction(self, rows: Sequence[Row], values: Values, numbers: Sequence[int]) -> Corrected:
        chosen = [rows[i] for i in numbers]
        device = values.recomputed[numbers[0]].device
        return correct(
            torch.cat([values.recomputed[i] for i in numbers]),
            torch.cat([row.rollout for row in chosen]).to(device),
            torch.cat([row.mask for row in chosen]).to(device),
            self.loss.correction,
            cu_seqlens=bounds(chosen),
            advantages=per_token(chosen, [values.advantages[i] for i in numbers], device),
            versions=torch.cat([row.versions for row in chosen]).to(device),
            version=self.version,
        )

    def normalised(self, micros: list[Micro]) -> list[Micro]:
        """Weights over the mean of the whole update, on all ranks, where the correction asks for it."""
        pending = [m.corrected for m in micros if m.corrected is not None and m.corrected.pending]
        wanted = self.loss.correction.weights
        if wanted is None or wanted.normalise is None or wanted.normalise.scope != "step":
            return micros
        everyone = self.ranks.everyone([c.totals for c in pending])
        totals = [t for found in everyone for t in found if t is not None]
        total, count = sum(t[0] for t in totals), sum(t[1] for t in totals)
        return [replace(m, corrected=m.corrected.normalised(total, count)) if m.corrected is not None else m for m in micros]

    # ---- update -------------------------------------------------------------------------------------------------------------------
    def update(self, rows: Sequence[Row], values: Values, update: Update) -> dict[str, float]:
        """One optimiser update over some micro-batches; their losses add up to the loss of all their rows."""
        rate = learning_rate(self.optim, self.updates, self.config.steps * self.config.updates_per_step)
        self.updates += 1
        if not update.micros:
            return {"lr": rate, "grad_norm": 0.0, "loss": 0.0}
        merged, total = self.accumulate(rows, values, update)
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.clip_norm)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        everyone = [found for found in self.ranks.everyone(merged) if found is not None]
        shown = dict(everyone[0].merge(*everyone[1:])) if everyone else {}
        return {**shown, "lr": rate, "grad_norm": norm, "loss": sum(self.ranks.everyone(total))}

    def accumulate(self, rows: Sequence[Row], values: Values, update: Update) -> tuple[Metrics | None, float]:
        """The gradient of one update, left on the parameters, with this rank's metrics and share of the loss."""
        num_tokens, num_rows = self.counts(rows, update)
        merged: Metrics | None = None
        total = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for micro in update.micros:
            loss, metrics = self.micro_loss(rows, values, micro, num_tokens, num_rows)
            (loss * self.ranks.world).backward()  # the ranks' gradients are averaged, and each holds a share of the sum
            total += float(loss.detach())
            if metrics is not None:
                merged = metrics if merged is None else merged.merge(metrics)
        return merged, total

    def gradient(self, groups: Sequence[Sequence[Sample]]) -> tuple[Tensor, dict[str, float]]:
        """What a step would add up, without a step: the flat gradient of the whole batch, and the mismatch it was computed under."""
        rows = rows_of(groups)
        advantages = session_advantages(rows, self.config.baseline)
        with self.scorer.active(self.model):
            values = self.recompute(rows, advantages)
            (update,) = self.planned(rows, values)
            merged, _ = self.accumulate(rows, values, update)
            found = {**self.measured(rows, values), **({} if merged is None else dict(merged))}
        pieces = [whole(p.grad).flatten() if p.grad is not None else torch.zeros_like(p).flatten() for p in self.model.parameters()]
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat(pieces), found

    def counts(self, rows: Sequence[Row], update: Update) -> tuple[float, float]:
        """Tokens and rows that the loss is a mean over: of all ranks, and those of idle rows too, whose share of the gradient is 0."""
        tokens = sum(int(rows[i].mask.sum()) for i in update.part)
        num_rows = sum(bool(rows[i].mask.any()) for i in update.part)
        if self.loss.correction.loss_counts == "kept" and not self.loss.correction.needs_current:
            rejected = sum(rejected_tokens(m.corrected, [rows[i] for i in m.rows]) for m in update.micros if m.corrected is not None)
            tokens -= sum(self.ranks.everyone(rejected))
        return float(tokens), float(num_rows)

    def micro_loss(
        self,
        rows: Sequence[Row],
        values: Values,
        micro: Micro,
        num_tokens: float,
        num_rows: float,
    ) -> tuple[Tensor, Metrics | None]:
        if not micro.rows:
            nothing = self.scorer(self.model, [NOBODY], temperature=self.config.temperature)
            return nothing[0].sum() * 0.0, None
        chosen = [rows[i] for i in micro.rows]
        current = self.scorer(self.model, [row.ids for row in chosen], temperature=self.config.temperature)
        device = current[0].device
        loss, metrics = policy_loss(
            torch.cat(current),
            torch.cat([values.recomputed[i] for i in micro.rows]),
            torch.cat([row.rollout for row in chosen]).to(device),
            per_token(chosen, [values.advantages[i] for i in micro.rows], device),
            torch.cat([row.mask for row in chosen]).to(device),
            self.loss,
            cu_seqlens=bounds(chosen),
            corrected=micro.corrected,
            reference_logprobs=torch.cat([values.reference[i] for i in micro.rows]) if values.reference else None,
            num_tokens=num_tokens,
            num_rows=num_rows,
            versions=torch.cat([row.versions for row in chosen]).to(device),
            version=self.version,
        )
        return loss, metrics

    # ---- report -------------------------------------------------------------------------------------------------------------------
    def report(
        self,
        rows: Sequence[Row],
        advantages: Sequence[float],
        found: Agreement,
        measured: Mapping[str, float],
        learnt: Sequence[Mapping[str, float]],
        clock: Clock,
    ) -> StepReport:
        sessions = {(row.group, row.sample.session_id): row.reward for row in rows}
        ages = torch.cat([self.version - 1 - row.versions[row.sampled] for row in rows]).double()
        metrics: dict[str, float] = {
            "reward": sum(sessions.values()) / len(sessions),
            "rows": len(rows),
            "rows_trained": sum(a != 0.0 for a in advantages) if self.config.drop_idle_rows else len(rows),
            "tokens": sum(row.length for row in rows),
            "tokens_trained": sum(int(row.mask.sum()) for row in rows),
            "staleness_mean": float(ages.mean()) if ages.numel() else 0.0,
            "staleness_max": float(ages.max()) if ages.numel() else 0.0,
            "exact_compared": found.compared,
            "exact_differing": found.differing,
            "exact_largest": found.largest,
            **measured,
        }
        for key in sorted({key for part in learnt for key in part}):
            values = [part[key] for part in learnt if key in part]
            metrics[f"update/{key}"] = sum(values) / len(values)
        return StepReport(step=self.version - 1, version=self.version, metrics=metrics, agreement=found, seconds=clock.seconds)


class Clock:
    """Seconds by name. Nested names count in both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def rejected_tokens(corrected: Corrected, rows: Sequence[Row]) -> int:
    assert isinstance(corrected.mask, Tensor)
    return sum(int(row.mask.sum()) for row in rows) - int(corrected.mask.sum())


def bounds(rows: Sequence[Row]) -> list[int]:
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + row.length)
    return ends


def per_token(rows: Sequence[Row], values: Sequence[float], device: torch.device) -> Tensor:
    spread = [torch.full((row.length,), value, dtype=torch.float64) for row, value in zip(rows, values, strict=True)]
    return torch.cat(spread).to(device)
