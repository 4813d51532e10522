"""One training step: recompute → check exactness → measure → update.

With `exact` the recomputed log-probabilities of tokens that the current weights sampled must equal the rollout's in
every bit, or the step raises before any weight moves. Micro-batching and sharding do not change the loss, and gradients
only by rounding: what a loss needs to know of the whole minibatch is known on every rank before a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor, nn

from tokentrue.errors import ConfigError, EngineContractError, ExactnessError, TrainingError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.mismatch import LengthDecay, LossConfig, Metrics, diagnose, policy_loss
from tokentrue.numerics import on_device
from tokentrue.train.config import OptimConfig, TrainConfig, default_learning_rate, learning_rate
from tokentrue.train.data.planning import Minibatch, Packing, plan_minibatches
from tokentrue.train.data.rows import (
    Row,
    SessionRewards,
    mask_truncated,
    overlong_cost,
    rows_from_groups,
    session_advantages,
)
from tokentrue.train.exactness import Agreement, agreement, require_exact, require_near, require_own_versions
from tokentrue.train.ranks import Ranks, whole, whole_weights
from tokentrue.train.reporting import MEASURED, Clock, StepReport, batch_metrics, count_flops
from tokentrue.train.update.correcting import (
    KlCoefficient,
    MinibatchCorrection,
    correct_minibatch,
    divergence_sums,
    in_one_call,
    per_token,
)
from tokentrue.train.update.masters import LossScale, MasterWeights, Snapshot
from tokentrue.train.update.scoring import ExactScorer, PlainScorer, Scorer, Scores, evaluation_mode, replay_experts
from tokentrue.types import Sample

NO_ROW = torch.zeros(2, dtype=torch.int64)  # of a rank without a row, in a forward pass that all ranks must join


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowValues:
    """By row number, this rank's rows, before any weight moves."""

    recomputed: Mapping[int, Tensor]
    reference: Mapping[int, Tensor]
    advantages: Sequence[float]
    shaped_reward: float  # mean over sessions, after what lengths and divergence cost
    reward_kl: float  # per trained token, where it costs reward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateResult:
    statistics: Metrics
    loss: float
    norm: float
    rate: float
    is_skipped: bool


class Trainer:
    """Owns weights and optimiser. `version` counts finished steps."""

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
        if loss.penalty is not None and loss.penalty.against == "reference" and reference is None:
            raise ConfigError("loss.penalty: against='reference' needs a reference model")
        if config.kl.reward_coefficient and reference is None:
            raise ConfigError("train.kl.reward_coefficient: needs a reference model")
        self.model = model
        self.config = config
        self.optim = resolve_rate(optim, model)
        self.loss = in_one_call(loss)
        self.kl = KlCoefficient.of(config.kl, loss)
        self.ranks = ranks or Ranks()
        self.reference = None if reference is None else reference.eval()
        self.scorer: Scorer = scorer or (ExactScorer() if config.exact else PlainScorer())
        self.version = 0
        self.updates = 0
        self.skipped = 0  # updates in a row
        self.delta_limit: float | None = None  # of a row's mean |δ|, where engines are probed
        self.response_lengths: list[float] = []  # mean sampled tokens per row, step by step
        self.flops = count_flops(model)
        self.masters = MasterWeights(model)
        self.scale = LossScale.of(next(model.parameters()).dtype)
        self.optimizer = torch.optim.AdamW(
            self.masters.parameters,
            lr=self.optim.lr or 0.0,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        model.train()

    def step(self, groups: Sequence[Sequence[Sample]]) -> StepReport:
        """One training step, on this trainer's device whatever thread calls it."""
        with on_device(next(self.model.parameters()).device):
            return self.step_here(groups)

    def step_here(self, groups: Sequence[Sequence[Sample]]) -> StepReport:
        clock = Clock()
        rows = self.rows(groups)
        if not rows:
            raise ConfigError("a training step got no rows: every rollout of the batch failed, or none was asked for")
        require_own_versions(rows, self.version, is_offline=self.config.offline)
        with self.scorer.active(self.model):
            with clock("recompute"):
                values, epochs = self.recompute(rows)
            found = self.compare(rows, values.recomputed)
            self.response_lengths.append(sum(int(row.sampled.sum()) for row in rows) / len(rows))
            with clock("measure"):
                measured = self.measure(rows, values)
            with clock("update"):
                done = [
                    self.update(rows, values, part, is_first=not n)
                    for n, part in enumerate(p for parts in epochs for p in parts)
                ]
        self.version += 1
        report = self.report(rows, values, found, measured, done, clock)
        if self.config.kl.target and "kl/mean" in report.metrics:
            self.kl.adapt(report.metrics["kl/mean"], int(report.metrics["sessions"]))
            self.set_kl_coefficient(self.kl.value)
        return report

    def rows(self, groups: Sequence[Sequence[Sample]]) -> list[Row]:
        rows = rows_from_groups(groups, self.config.temperature)
        return mask_truncated(rows) if self.config.overlong.mask else rows

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return whole_weights(self.model)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.masters, self.optimizer, self.counters())

    def restore(self, before: Snapshot) -> None:
        """Undoes updates, bit for bit. Steps and updates stay counted."""
        before.restore(self.masters, self.optimizer)

    def rewind(self, before: Snapshot) -> None:
        """Undoes a step as if it had not begun."""
        self.restore(before)
        self.set_counters(before.counters)

    def counters(self) -> JsonObject:
        """What a step changes beside weights and moments, as plain JSON."""
        return {
            "version": self.version,
            "updates": self.updates,
            "loss_scale": [self.scale.value, self.scale.good],
            "kl_coefficient": self.kl.value,
            "response_lengths": list(self.response_lengths),
        }

    def set_counters(self, counters: JsonMapping) -> None:
        self.version, self.updates = int(counters["version"]), int(counters["updates"])
        self.scale.value, self.scale.good = counters.get("loss_scale", [1.0, 0])
        self.set_kl_coefficient(counters.get("kl_coefficient", self.kl.value))
        self.response_lengths = list(counters.get("response_lengths", ()))

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> Tensor:
        """Log-probability of each id under the current weights; entry 0 is 0. Every rank calls it."""
        with (
            on_device(next(self.model.parameters()).device),
            self.scorer.active(self.model),
            evaluation_mode(self.model),
        ):
            temperatures = torch.full((len(ids),), self.config.temperature)
            return self.scorer(self.model, [torch.tensor(ids, dtype=torch.int64)], [temperatures]).logprobs[0]

    def gradient(self, groups: Sequence[Sequence[Sample]]) -> tuple[Tensor, dict[str, float]]:
        """The flat gradient of the whole batch, without a step, and its metrics."""
        rows = self.rows(groups)
        with self.scorer.active(self.model):
            values, ((part,), *_) = self.recompute(rows)
            merged, loss = self.accumulate(rows, values, part, is_first=True)
            found = {**self.measure(rows, values), **dict(merged), "loss": loss}
        flat = torch.cat([whole(each).flatten() for each in self.masters.gradient()])
        self.optimizer.zero_grad(set_to_none=True)
        return flat, found

    def is_trained(self, row: Row, advantage: float) -> bool:
        """Whether a row gets a forward and a backward pass."""
        has_gradient = advantage != 0.0 or self.loss.penalty is not None or self.loss.entropy_coefficient != 0
        # With a cost of divergence, advantages are known only after the rows are scored.
        has_gradient = has_gradient or self.config.kl.reward_coefficient != 0
        return bool(row.mask.any()) and (has_gradient or not self.config.drop_idle_rows)

    def plan(self, rows: Sequence[Row], advantages: Sequence[float]) -> list[list[Minibatch]]:
        """The minibatches of every epoch; all epochs split alike, so that a row stays on its rank."""
        trained = [self.is_trained(row, advantage) for row, advantage in zip(rows, advantages, strict=True)]
        packing = Packing(
            budget=self.config.micro_tokens, padded=self.scorer.is_padded, rank=self.ranks.rank, world=self.ranks.world
        )
        seed = (self.config.seed, self.version) if self.config.shuffle else None
        parts = plan_minibatches(rows, trained, packing, parts=self.config.minibatches, shuffle_seed=seed)
        return [parts] * self.config.epochs

    @torch.no_grad()
    def recompute(self, rows: Sequence[Row]) -> tuple[RowValues, list[list[Minibatch]]]:
        """Log-probabilities of this rank's rows before the step, rewards, advantages, and the minibatches of every
        epoch."""
        sessions = SessionRewards.of(rows)
        if self.config.overlong.max_tokens:
            sessions = sessions.less(overlong_cost(sessions.sampled, self.config.overlong))
        advantages = self.advantages(sessions)
        epochs = self.plan(rows, advantages)
        mine, reference = self.score_parts(rows, epochs[0]), dict[int, Tensor]()
        if self.reference is not None:
            for bin_ in (bin_ for part in epochs[0] for bin_ in part.bins):
                reference |= zip(bin_, self.score_rows(self.reference, rows, bin_).logprobs, strict=False)
        kl = 0.0
        if self.config.kl.reward_coefficient:
            sums = divergence_sums(rows, mine, reference, self.config.kl, self.ranks)
            kl = sum(sums.values()) / max(1, sum(sessions.trained))
            sessions = sessions.less(self.kl.value * sessions.sum_rows(sums))
            advantages = self.advantages(sessions)
        values = RowValues(
            recomputed=mine,
            reference=reference,
            advantages=advantages,
            shaped_reward=float(sessions.rewards.mean()),
            reward_kl=kl,
        )
        return values, epochs

    def advantages(self, sessions: SessionRewards) -> list[float]:
        return session_advantages(sessions, self.config.baseline, self.config.advantages)

    def score_rows(
        self, model: nn.Module, rows: Sequence[Row], numbers: Sequence[int], *, entropy: bool = False
    ) -> Scores:
        ids = [rows[i].ids for i in numbers] or [NO_ROW]
        temperatures = [rows[i].temperatures for i in numbers] or [torch.ones(2)]
        return self.scorer(model, ids, temperatures, entropy=entropy, kept=[rows[i].kept for i in numbers] or None)

    @torch.no_grad()
    def score_parts(self, rows: Sequence[Row], parts: Sequence[Minibatch]) -> dict[int, Tensor]:
        """This rank's rows under the current weights."""
        found: dict[int, Tensor] = {}
        with evaluation_mode(self.model):
            for bin_ in (bin_ for part in parts for bin_ in part.bins):
                with self.replaying(rows, bin_):
                    found |= zip(bin_, self.score_rows(self.model, rows, bin_).logprobs, strict=False)
        return found

    def require_scores(self, rows: Sequence[Row], advantages: Sequence[float], scores: Sequence[Tensor]) -> None:
        """Raises on every rank where an engine scored a row with other weights than the current ones."""
        if self.delta_limit is None:
            return
        with on_device(next(self.model.parameters()).device), self.scorer.active(self.model):
            mine = self.score_parts(rows, self.plan(rows, advantages)[0])
        compared = [
            (rows[i], values[: len(scores[i])], scores[i], rows[i].mask[: len(scores[i])]) for i, values in mine.items()
        ]
        self.require_near_on_all(compared, "scored")

    def require_near_on_all(self, compared: Sequence[tuple[Row, Tensor, Tensor, Tensor]], doing: str) -> None:
        trouble: EngineContractError | None = None
        try:
            if self.delta_limit is not None:
                require_near(compared, self.delta_limit, version=self.version, doing=doing)
        except EngineContractError as error:
            trouble = error
        self.ranks.raise_together(trouble, "compare its rows with the engines'")

    def replaying(self, rows: Sequence[Row], numbers: Sequence[int]) -> AbstractContextManager[None]:
        chosen = [rows[i] for i in numbers]
        return replay_experts(self.model, chosen, padded=self.scorer.is_padded, mode=self.config.routing_replay)

    def compare(self, rows: Sequence[Row], recomputed: Mapping[int, Tensor]) -> Agreement:
        numbers = sorted(recomputed)
        if self.config.offline and self.version:
            numbers = []  # these weights sampled nothing of the file
        mine = [rows[i] for i in numbers], [recomputed[i] for i in numbers]
        found, trouble = agreement(*mine, version=self.version), ""
        if self.config.exact and found.differing:
            try:
                require_exact(*mine, version=self.version, step=self.version)
            except ExactnessError as error:
                trouble = str(error)
        everyone = self.ranks.all_gather_object((found, trouble))  # all ranks stop together, or none
        for _, said in everyone:
            if said:
                raise ExactnessError(said)
        self.require_near_on_all(
            [
                (row, recomputed[i], row.rollout, row.sampled & (row.versions == self.version))
                for i, row in zip(numbers, mine[0], strict=True)
            ],
            "sampled",
        )
        return reduce(Agreement.merge, (part for part, _ in everyone))

    def measure(self, rows: Sequence[Row], values: RowValues) -> dict[str, float]:
        """Mismatch over all trained tokens, stale ones too."""
        numbers = sorted(values.recomputed)
        chosen = [rows[i] for i in numbers]
        mine: Metrics | None = None
        if numbers:
            device = values.recomputed[numbers[0]].device
            mine = diagnose(
                [values.recomputed[i] for i in numbers],
                [row.rollout.to(device) for row in chosen],
                [row.mask.to(device) for row in chosen],
                advantages=[
                    per_token(row, values.advantages[i], device) for i, row in zip(numbers, chosen, strict=True)
                ],
                worst=0,
            ).metrics
        everyone = [found for found in self.ranks.all_gather_object(mine) if found is not None]
        merged = everyone[0].merge(*everyone[1:])
        return {f"mismatch/{name}": merged[key] for name, key in MEASURED.items()}

    def update(self, rows: Sequence[Row], values: RowValues, part: Minibatch, *, is_first: bool) -> UpdateResult:
        """One optimiser update. A gradient that is not finite changes no weight."""
        rate = learning_rate(self.optim, self.updates, self.config.steps * self.config.updates_per_step)
        if self.optim.length_surge:
            rate *= LengthDecay(surge=self.optim.length_surge).scale(self.response_lengths)
        self.updates += 1
        merged, total = self.accumulate(rows, values, part, is_first=is_first)
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.masters.parameters, self.optim.clip_norm)))
        is_skipped = not (math.isfinite(norm) and math.isfinite(total))
        self.scale.adjust(overflow=is_skipped)
        if is_skipped:
            self.count_skipped(norm, total)
        else:
            self.skipped = 0
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.masters.write_back()
        return UpdateResult(statistics=merged, loss=total, norm=norm, rate=rate, is_skipped=is_skipped)

    def count_skipped(self, norm: float, loss: float) -> None:
        self.skipped += 1
        allowed = self.config.max_skipped_updates
        if self.skipped > allowed and self.scale.value <= 1.0:
            raise TrainingError(
                f"step {self.version}: gradient norm {norm}, loss {loss}: not finite in {self.skipped} updates in a "
                "row, all skipped; "
                "look at rewards and log-probabilities of this step, lower optim.lr, or train in float32"
            )

    def accumulate(
        self, rows: Sequence[Row], values: RowValues, part: Minibatch, *, is_first: bool
    ) -> tuple[Metrics, float]:
        """The gradient of one minibatch, on the master weights; statistics and loss of all ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.masters.parameters:  # a minibatch without gradient is an update with gradient 0, not none
            parameter.grad = torch.zeros_like(parameter)
        correction = self.correction(rows, values, part, is_first=is_first)
        statistics, total = Metrics({}), 0.0
        for bin_ in part.active:
            with self.replaying(rows, bin_):
                loss, found = self.pass_loss(rows, values, bin_, correction)
                # The ranks' gradients are averaged, and each rank holds a share of the sum.
                (loss * (self.ranks.world * self.scale.value)).backward()
            self.masters.collect(unscale=self.scale.value)
            total += float(loss.detach())
            statistics = statistics.merge(found)
        everyone = self.ranks.all_gather_object((statistics, total))
        return correction.metrics.merge(*(found for found, _ in everyone)), sum(share for _, share in everyone)

    def correction(
        self, rows: Sequence[Row], values: RowValues, part: Minibatch, *, is_first: bool
    ) -> MinibatchCorrection:
        """From another forward pass where a rule looks at weights that have moved."""
        current = values.recomputed
        if not is_first and self.loss.correction.needs_current:
            current = self.score_parts(rows, [part])
        return correct_minibatch(
            rows, part, self.loss, recomputed=values.recomputed, current=current, advantages=values.advantages,
            version=self.version, ranks=self.ranks,
        )  # fmt: skip

    def pass_loss(
        self, rows: Sequence[Row], values: RowValues, numbers: Sequence[int], correction: MinibatchCorrection
    ) -> tuple[Tensor, Metrics]:
        """The share of one forward pass in the minibatch's loss."""
        wants_entropy = self.loss.entropy_coefficient != 0
        scores = self.score_rows(self.model, rows, numbers, entropy=wants_entropy)
        if not numbers:
            return scores.logprobs[0].sum() * 0.0, Metrics({})
        chosen = [rows[i] for i in numbers]
        device = scores.logprobs[0].device
        return policy_loss(
            scores.logprobs,
            [values.recomputed[i] for i in numbers],
            [row.rollout.to(device) for row in chosen],
            [per_token(row, values.advantages[i], device) for i, row in zip(numbers, chosen, strict=True)],
            [row.mask.to(device) for row in chosen],
            self.loss,
            corrected=correction.of(numbers, device),
            reference_logprobs=[values.reference[i] for i in numbers] if values.reference else None,
            entropy=scores.entropy,
            num_tokens=correction.num_tokens,
            num_rows=correction.num_sessions,
            row_tokens=[correction.session_tokens[i] for i in numbers],
        )

    def report(
        self,
        rows: Sequence[Row],
        values: RowValues,
        found: Agreement,
        measured: Mapping[str, float],
        done: Sequence[UpdateResult],
        clock: Clock,
    ) -> StepReport:
        merged = done[0].statistics.merge(*(update.statistics for update in done[1:]))
        metrics: dict[str, float] = {
            **batch_metrics(rows, values.advantages, version=self.version - 1),
            "rows_trained": sum(self.is_trained(row, a) for row, a in zip(rows, values.advantages, strict=True)),
            "entropy_estimate": measured["mismatch/log_ppl_trainer"],  # -log p of what was sampled, in the mean
            "exact_compared": found.compared,
            "exact_differing": found.differing,
            "exact_largest": found.largest,
            **measured,
            **{f"update/{key}": value for key, value in merged.items() if key != "loss/policy"},
            "update/loss": sum(update.loss for update in done) / len(done),
            "update/grad_norm": sum(update.norm for update in done) / len(done),
            "update/grad_norm_max": max(update.norm for update in done),
            "update/lr": done[-1].rate,
            "update/skipped": sum(update.is_skipped for update in done),
        }
        if not self.scale.is_fixed:
            metrics["update/loss_scale"] = self.scale.value
        if self.config.overlong.max_tokens or self.config.kl.reward_coefficient:
            metrics["reward_shaped"] = values.shaped_reward
        if self.kl.value:
            metrics["kl/coefficient"] = self.kl.value
            metrics["kl/mean"] = values.reward_kl if self.config.kl.reward_coefficient else merged["loss/kl"]
        speeds = self.utilisation(rows, values.advantages, clock)
        return StepReport(
            step=self.version - 1, version=self.version, metrics=metrics, agreement=found, advantages=values.advantages,
            seconds=clock.seconds, speeds=speeds,
        )  # fmt: skip

    def utilisation(self, rows: Sequence[Row], advantages: Sequence[float], clock: Clock) -> dict[str, float]:
        """The share of the devices' peak that scoring and updates used."""
        if self.flops is None or not self.config.peak_tflops:
            return {}
        scored = self.flops.forward([row.length for row in rows])
        trained = self.flops.forward(
            [row.length for row, a in zip(rows, advantages, strict=True) if self.is_trained(row, a)]
        )
        done = scored * (1 if self.reference is None else 2) + 3 * self.config.epochs * trained
        seconds = clock.seconds["recompute"] + clock.seconds["update"]
        return {"speed/mfu": done / (seconds * self.config.peak_tflops * 1e12 * self.ranks.world)}

    def set_kl_coefficient(self, value: float) -> None:
        self.kl.value = value
        if self.config.kl.target and self.loss.penalty is not None and not self.config.kl.reward_coefficient:
            self.loss = replace(self.loss, penalty=replace(self.loss.penalty, coefficient=value))


def resolve_rate(optim: OptimConfig, model: nn.Module) -> OptimConfig:
    if optim.lr is not None:
        return optim
    return replace(optim, lr=default_learning_rate(sum(parameter.numel() for parameter in model.parameters())))
