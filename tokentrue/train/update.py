"""What one optimiser update needs beside scores: the correction of its minibatch, and master weights.

Some rules look at the minibatch as a whole. So every rank gathers the log-probabilities of all rows (four bytes a
token, 0.2% of a step), corrects the whole minibatch, and takes its own rows from it.

A bfloat16 weight of 0.05 moves in steps of 2.4e-4, and an update of 1e-6 is lost in it. So a 16-bit model gets a
float32 copy of every parameter, which collects the gradients and takes the updates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokentrue.mismatch import Corrected, LossConfig, Metrics, correct
from tokentrue.records import record
from tokentrue.train.ranks import Ranks
from tokentrue.train.rows import Minibatch, Row, list_sessions

START_SCALE = 2.0**15
GROW_AFTER = 200  # updates without overflow


@record(eq=False)
class StepBatch:
    """By row number, this rank's log-probabilities before any weight moves."""

    rows: Sequence[Row]
    parts: list[Minibatch]
    recomputed: Mapping[int, Tensor]
    reference: Mapping[int, Tensor]
    advantages: Sequence[float]

    def columns(self, numbers: Sequence[int], device: torch.device) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        chosen = [self.rows[i] for i in numbers]
        advantages = [torch.full((self.rows[i].length,), self.advantages[i], dtype=torch.float64) for i in numbers]
        return (
            [row.rollout.to(device) for row in chosen],
            [values.to(device) for values in advantages],
            [row.mask.to(device) for row in chosen],
        )


@record(eq=False)
class MinibatchCorrection:
    corrected: Corrected | None
    places: Mapping[int, int]  # of row numbers in `corrected`
    metrics: Metrics
    num_tokens: float
    num_sessions: float
    session_tokens: Mapping[int, float]  # of each row's whole session

    def of(self, numbers: Sequence[int], device: torch.device) -> Corrected | None:
        if self.corrected is None:
            return None
        weights, kept = (
            [values[self.places[i]].to(device) for i in numbers]
            for values in (self.corrected.weights, self.corrected.mask)
        )
        return Corrected(weights=weights, mask=kept, metrics=Metrics({}))


def correct_minibatch(
    batch: StepBatch, part: Minibatch, loss: LossConfig, *, current: Mapping[int, Tensor], version: int, ranks: Ranks
) -> MinibatchCorrection:
    chosen = [batch.rows[i] for i in part.rows]
    rollout, advantages, masks = batch.columns(part.rows, torch.device("cpu"))
    counted, made = masks, None
    if loss.correction.is_active or loss.correction.non_finite != "raise":
        old = gather_rows(batch.recomputed, part, ranks)
        made = correct(
            old,
            rollout,
            masks,
            loss.correction,
            logprobs=old if current is batch.recomputed else gather_rows(current, part, ranks),
            advantages=advantages,
            versions=[row.versions for row in chosen],
            version=version,
        )
        if loss.correction.loss_counts != "original":
            counted = list(made.mask)
    tokens = [int(mask.sum()) for mask in counted]
    sessions = [(places, float(sum(tokens[k] for k in places))) for places in list_sessions(chosen)]
    return MinibatchCorrection(
        corrected=made,
        places={i: place for place, i in enumerate(part.rows)},
        metrics=Metrics({}) if made is None else made.metrics,
        num_tokens=float(sum(tokens)),
        num_sessions=float(sum(total > 0 for _, total in sessions)),
        session_tokens={part.rows[k]: total for places, total in sessions for k in places},
    )


def gather_rows(values: Mapping[int, Tensor], part: Minibatch, ranks: Ranks) -> list[Tensor]:
    found = ranks.merge({i: values[i].detach().cpu() for i in part.mine})
    return [found[i] for i in part.rows]


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scaling for float16; a constant 1 for every other dtype."""

    value: float = 1.0
    good: int = 0
    is_fixed: bool = True

    @staticmethod
    def of(dtype: torch.dtype) -> "LossScale":
        return LossScale(value=START_SCALE, is_fixed=False) if dtype == torch.float16 else LossScale()

    def adjust(self, *, overflow: bool) -> None:
        if self.is_fixed:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good >= GROW_AFTER:
            self.value, self.good = self.value * 2, 0


class MasterWeights:
    """Float32 parameters by name. A float32 model is its own master; `copies` are those of other models, by name."""

    def __init__(self, model: nn.Module) -> None:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.copies = {
            name: nn.Parameter(own.detach().float()) for name, own in trained.items() if own.dtype != torch.float32
        }
        self.named = {name: self.copies.get(name, own) for name, own in trained.items()}
        self.parameters = list(self.named.values())
        self._pairs = [(trained[name], master) for name, master in self.copies.items()]

    @torch.no_grad()
    def collect(self, *, unscale: float = 1.0) -> None:
        for own, master in self._pairs:
            if own.grad is not None:
                found = own.grad.float() / unscale
                master.grad = found if master.grad is None else master.grad.add_(found)
                own.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        for own, master in self._pairs:
            own.copy_(master)
