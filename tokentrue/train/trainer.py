"""One training step: recompute → check exactness → measure → update.

Micro-batching and sharding do not change the loss, and gradients only by rounding: what a loss needs of the whole
minibatch is known on every rank before a backward pass.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor, nn

from tokentrue.errors import ConfigError, TrainingError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.mismatch import LossConfig, Metrics, diagnose, policy_loss
from tokentrue.numerics import on_device, shares_prefixes
from tokentrue.pixels import PixelReader, ReadImage
from tokentrue.records import record
from tokentrue.train.config import OptimConfig, TrainConfig, default_learning_rate, learning_rate
from tokentrue.train.exactness import Agreement, agreement, require_exact, require_near, require_own_versions
from tokentrue.train.ranks import Ranks, named_weights, whole
from tokentrue.train.reporting import TURNS, StepReport, batch_metrics, clock, step_mismatch, turn_numbers
from tokentrue.train.rows import (
    Minibatch,
    Packing,
    Row,
    ScoredRow,
    mask_truncated,
    plan_minibatches,
    rows_from_groups,
    session_advantages,
    with_head_ids,
)
from tokentrue.train.scoring import ExactScorer, PlainScorer, Scorer, evaluation_mode, lay_out, replay_experts
from tokentrue.train.update import LossScale, MasterWeights, MinibatchCorrection, StepBatch, correct_minibatch
from tokentrue.types import Sample

LOG = logging.getLogger("tokentrue.train")
# of a rank without a row, in a forward pass that all ranks must join
NO_ROW = ScoredRow(ids=torch.zeros(2, dtype=torch.int64), temperatures=torch.ones(2))


@record(eq=False)
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
        images: ReadImage | None = None,
    ) -> None:
        if loss.penalty is not None and loss.penalty.against == "reference" and reference is None:
            raise ConfigError("loss.penalty: against='reference' needs a reference model")
        if loss.correction.centering is not None and config.baseline == "grpo":
            raise ConfigError(
                "train.baseline: score centering needs advantages that are not divided by a group's deviation; choose "
                "dr_grpo or rloo"
            )
        if optim.lr is None:
            optim = replace(optim, lr=default_learning_rate(sum(each.numel() for each in model.parameters())))
        self.model = model
        self.config = config
        self.optim = optim
        self.loss = loss
        self.ranks = ranks or Ranks()
        self.reference = None if reference is None else reference.eval()
        self.images = images
        reader = PixelReader(getattr(model.config, "name_or_path", ""))
        self.scorer: Scorer = scorer or (ExactScorer(reader, tree=config.tree) if config.exact else PlainScorer(reader))
        self.is_tree_proven = False
        self.version = 0
        self.updates = 0
        self.skipped = 0  # updates in a row
        self.delta_limit: float | None = None  # of a row's mean |δ|, where engines are probed
        self.masters = MasterWeights(model)
        self.scale = LossScale.of(next(model.parameters()).dtype)
        self.optimizer = torch.optim.AdamW(
            self.masters.parameters,
            lr=optim.lr or 0.0,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        model.train()

    def step(self, groups: Sequence[Sequence[Sample]]) -> StepReport:
        seconds: dict[str, float] = {}
        rows = self.rows(groups)
        if not rows:
            raise ConfigError("a training step got no rows: every rollout of the batch failed, or none was asked for")
        if not self.config.offline:  # versions of a file count another run's steps
            require_own_versions(rows, self.version)
        with self.scoring():
            with clock(seconds, "recompute"):
                batch = self.recompute(rows)
            found = self.compare(batch)
            with clock(seconds, "measure"):
                measured = self.measure(batch)
            with clock(seconds, "update"):
                parts = enumerate(batch.parts * self.config.epochs)
                done = [self.update(batch, part, is_first=not number) for number, part in parts]
        self.version += 1
        return self.report(batch, found, measured, done, seconds)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """On this trainer's device, whatever thread calls it."""
        with on_device(next(self.model.parameters()).device), self.scorer.active(self.model):
            yield

    def rows(self, groups: Sequence[Sequence[Sample]]) -> list[Row]:
        rows = rows_from_groups(groups, self.config.temperature, self.images)
        if self.loss.correction.centering is not None:
            for row in rows:  # refuses samples without them before any weight moves
                with_head_ids([row])
        return mask_truncated(rows) if self.config.overlong.mask else rows

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in named_weights(self.model):
            yield name, whole(value.detach())

    def counters(self) -> JsonObject:
        return {"version": self.version, "updates": self.updates, "loss_scale": [self.scale.value, self.scale.good]}

    def set_counters(self, counters: JsonMapping) -> None:
        self.version, self.updates = int(counters["version"]), int(counters["updates"])
        self.scale.value, self.scale.good = counters.get("loss_scale", [1.0, 0])

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> Tensor:
        """Log-probability of each id under the current weights; entry 0 is 0. Every rank calls it."""
        row = ScoredRow(
            ids=torch.tensor(ids, dtype=torch.int64), temperatures=torch.full((len(ids),), self.config.temperature)
        )
        with self.scoring(), evaluation_mode(self.model):
            return self.scorer(self.model, [row]).logprobs[0]

    def find_trained(self, rows: Sequence[Row], advantages: Sequence[float]) -> list[bool]:
        always = self.loss.penalty is not None or self.loss.entropy_coefficient != 0 or not self.config.drop_idle_rows
        return [bool(row.mask.any()) and (always or a != 0.0) for row, a in zip(rows, advantages, strict=True)]

    def plan(self, rows: Sequence[Row], advantages: Sequence[float]) -> list[Minibatch]:
        self.prove_tree()
        return plan_minibatches(
            rows,
            self.find_trained(rows, advantages),
            Packing(
                budget=self.config.micro_tokens,
                padded=self.scorer.is_padded,
                rank=self.ranks.rank,
                world=self.ranks.world,
                tree=self.scorer.tree,
            ),
            parts=self.config.minibatches,
            shuffle_seed=(self.config.seed, self.version) if self.config.shuffle else None,
        )

    @torch.no_grad()
    def prove_tree(self) -> None:
        """Once: rows are apart where a tree has other bits."""
        for model in (self.model, self.reference):
            if model is not None and self.scorer.tree and not self.is_tree_proven:
                with evaluation_mode(model):
                    if not shares_prefixes(model):
                        LOG.warning("%s: a tree of prefixes has no exact form, rows are apart", type(model).__name__)
                        self.scorer.tree = False
        self.is_tree_proven = True

    def recompute(self, rows: Sequence[Row]) -> StepBatch:
        config = self.config
        advantages = session_advantages(rows, config.baseline, config.advantages)
        parts = self.plan(rows, advantages)
        mine = self.score_parts(self.model, rows, parts)
        reference = {} if self.reference is None else self.score_parts(self.reference, rows, parts)
        return StepBatch(rows=rows, parts=parts, recomputed=mine, reference=reference, advantages=advantages)

    @torch.no_grad()
    def score_parts(self, model: nn.Module, rows: Sequence[Row], parts: Sequence[Minibatch]) -> dict[int, Tensor]:
        """This rank's rows; only the policy itself replays the rollout's experts."""
        found: dict[int, Tensor] = {}
        with evaluation_mode(model):
            for bin_ in (bin_ for part in parts for bin_ in part.bins):
                with self.replaying(rows, bin_) if model is self.model else nullcontext():
                    found |= zip(bin_, self.scorer(model, [rows[i] for i in bin_] or [NO_ROW]).logprobs, strict=False)
        return found

    def replaying(self, rows: Sequence[Row], numbers: Sequence[int]) -> AbstractContextManager[None]:
        chosen = [rows[i] for i in numbers]
        return replay_experts(self.model, chosen, scorer=self.scorer, mode=self.config.routing_replay)

    def compare(self, batch: StepBatch) -> Agreement:
        numbers = sorted(batch.recomputed)
        if self.config.offline and self.version:
            numbers = []  # these weights sampled nothing of the file
        chosen, recomputed = [batch.rows[i] for i in numbers], [batch.recomputed[i] for i in numbers]
        mine = agreement(chosen, recomputed, version=self.version)
        found = reduce(Agreement.merge, self.ranks.all_gather_object(mine))  # all ranks stop together, or none
        if self.config.exact:
            require_exact(found, version=self.version)
        require_near(chosen, recomputed, self.delta_limit, version=self.version, ranks=self.ranks)
        return found

    def measure(self, batch: StepBatch) -> dict[str, float]:
        mine: Metrics | None = None
        if numbers := sorted(batch.recomputed):
            recomputed = [batch.recomputed[i] for i in numbers]
            rollout, advantages, masks = batch.columns(numbers, recomputed[0].device)
            turns = [turn_numbers(batch.rows[i]).to(recomputed[0].device) for i in numbers]
            mine = diagnose(
                recomputed, rollout, masks, advantages=advantages, worst=0, kinds=turns, kind_names=TURNS
            ).metrics
        everyone = [found for found in self.ranks.all_gather_object(mine) if found is not None]
        return step_mismatch(everyone[0].merge(*everyone[1:]))

    def update(self, batch: StepBatch, part: Minibatch, *, is_first: bool) -> UpdateResult:
        """One optimiser update. A gradient that is not finite changes no weight."""
        total = self.config.steps * self.config.minibatches * self.config.epochs
        rate = learning_rate(self.optim, self.updates, total)
        self.updates += 1
        merged, loss = self.accumulate(batch, part, is_first=is_first)
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.masters.parameters, self.optim.clip_norm)))
        is_skipped = not (math.isfinite(norm) and math.isfinite(loss))
        self.scale.adjust(overflow=is_skipped)
        self.skipped = self.skipped + 1 if is_skipped else 0
        if self.skipped > self.config.max_skipped_updates and self.scale.value <= 1.0:
            raise TrainingError(
                f"step {self.version}: gradient norm {norm}, loss {loss}: not finite in {self.skipped} updates in a "
                "row, all skipped; look at rewards and log-probabilities of this step, lower optim.lr, or train in "
                "float32"
            )
        if not is_skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.masters.write_back()
        return UpdateResult(statistics=merged, loss=loss, norm=norm, rate=rate, is_skipped=is_skipped)

    def accumulate(self, batch: StepBatch, part: Minibatch, *, is_first: bool) -> tuple[Metrics, float]:
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.masters.parameters:  # a minibatch without gradient is an update with gradient 0, not none
            parameter.grad = torch.zeros_like(parameter)
        current = batch.recomputed
        if not is_first and self.loss.correction.needs_current:  # a rule looks at weights that have moved
            current = self.score_parts(self.model, batch.rows, [part])
        correction = correct_minibatch(batch, part, self.loss, current=current, version=self.version, ranks=self.ranks)
        statistics, total = Metrics({}), 0.0
        for bin_ in part.active:
            with self.replaying(batch.rows, bin_):
                loss, found = self.pass_loss(batch, bin_, correction)
                # The ranks' gradients are averaged, and each rank holds a share of the sum.
                (loss * (self.ranks.world * self.scale.value)).backward()
            self.masters.collect(unscale=self.scale.value)
            total += float(loss.detach())
            statistics = statistics.merge(found)
        everyone = self.ranks.all_gather_object((statistics, total))
        return correction.metrics.merge(*(found for found, _ in everyone)), sum(share for _, share in everyone)

    def pass_loss(
        self, batch: StepBatch, numbers: Sequence[int], correction: MinibatchCorrection
    ) -> tuple[Tensor, Metrics]:
        chosen, sampler = [batch.rows[i] for i in numbers], list[Tensor]()
        if self.loss.correction.centering is not None and chosen:
            chosen, sampler = with_head_ids(chosen)
        scores = self.scorer(self.model, chosen or [NO_ROW], entropy=self.loss.entropy_coefficient != 0)
        if not numbers:
            return scores.logprobs[0].sum() * 0.0, Metrics({})
        device = scores.logprobs[0].device
        rollout, advantages, masks = batch.columns(numbers, device)
        return policy_loss(
            scores.logprobs,
            [batch.recomputed[i] for i in numbers],
            rollout,
            advantages,
            masks,
            self.loss,
            corrected=correction.of(numbers, device),
            reference_logprobs=[batch.reference[i] for i in numbers] if batch.reference else None,
            entropy=scores.entropy,
            num_tokens=correction.num_tokens,
            num_rows=correction.num_sessions,
            row_tokens=[correction.session_tokens[i] for i in numbers],
            versions=[row.versions.to(device) for row in chosen],
            version=self.version,
            head_logprobs=scores.head,
            rollout_head_logprobs=[values.to(device) for values in sampler] or None,
        )

    def report(
        self,
        batch: StepBatch,
        found: Agreement,
        measured: Mapping[str, float],
        done: Sequence[UpdateResult],
        seconds: Mapping[str, float],
    ) -> StepReport:
        merged = done[0].statistics.merge(*(update.statistics for update in done[1:]))
        rows, advantages = batch.rows, batch.advantages
        trained = self.find_trained(rows, advantages)
        bins = ([rows[i] for i in bin_] for part in batch.parts for bin_ in part.bins if bin_)
        computed = sum(len(lay_out(bin_, tree=self.scorer.tree).source) for bin_ in bins)
        metrics: dict[str, float] = {
            **batch_metrics(rows, advantages, version=self.version - 1),
            "tokens_computed": sum(self.ranks.all_gather_object(computed)),
            "rows_trained": sum(trained),
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
        if self.loss.penalty is not None:
            metrics["kl/mean"] = merged["loss/kl"]
        return StepReport(
            step=self.version - 1, version=self.version, metrics=metrics, agreement=found, seconds=seconds
        )
