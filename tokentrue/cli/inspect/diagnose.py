"""tokentrue diagnose SAMPLES: how far and where rollout and trainer log-probabilities differ; what a correction
does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokentrue.app.libraries import require_device, require_dtype
from tokentrue.cli.options import AsJson, ReportPage, SamplesFile, TrainerFile, name_option, renderer_from
from tokentrue.cli.output import count_items, pluralise
from tokentrue.errors import ConfigError, InputError, TokenContractError
from tokentrue.json_types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

    from tokentrue.mismatch import Correction, Diagnosis
    from tokentrue.samples.trainer_logprobs import TrainerLogprobs
    from tokentrue.types import Sample

BATCH_TOKENS = 8192
ALARM_K3 = 0.015
SHOWN = (
    "tokens", "rows", "delta/mean", "delta/abs_mean", "delta/min", "delta/max", "delta/quantile/abs_p99", "corr/k1", "corr/k3",
    "ppl/trainer", "ppl/rollout", "chi2/token", "ratio/raw/ess", "tail/raw/above_2", "tail/applied/above_2",
    "fraction/rejected", "flips",
    "contribution/rollout/positive/mean", "contribution/rollout/positive/skew", "contribution/rollout/negative/mean",
    "contribution/rollout/negative/skew",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample with the trainer's numbers. `chosen`: its trained tokens with numbers of both sides; `tops`: the
    trainer's most likely tokens, if known.
    """

    sample: Sample
    scores: TrainerLogprobs
    chosen: tuple[int, ...]
    tops: Sequence[int] | None

    @cached_property
    def rollout(self) -> list[float]:
        return [float(self.sample.rollout_logprobs[i] or 0.0) for i in self.chosen]

    @cached_property
    def trainer(self) -> list[float]:
        return [float(self.scores.logprobs[i] or 0.0) for i in self.chosen]

    @property
    def kinds(self) -> list[str]:
        turns = {i: span.turn for span in self.sample.spans for i in range(span.start, span.end)}
        names = {i: f"turn {turn}" if turn < 8 else "turn 8+" for i, turn in turns.items()}
        return [names.get(i, "sampled") for i in self.chosen]

    @property
    def step(self) -> str:
        versions = (span.policy_version for span in self.sample.spans if span.kind == "sampled")
        newest = max((version for version in versions if version is not None), default=0)
        return str(self.sample.metadata.get("step", newest))

    @property
    def flips(self) -> list[bool]:
        """A sampled token with probability above one half is the rollout's argmax: does the trainer have another?"""
        tops, ids = self.tops or (), self.sample.token_ids
        pairs = zip(self.chosen, self.rollout, strict=True)
        return [logprob > math.log(0.5) and tops[i] != ids[i] for i, logprob in pairs] if tops else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`rows` have numbers of both sides; `refused`: why the trainer cannot score a sample."""

    rows: list[Row]
    samples: list[Sample]
    refused: list[str]

    @property
    def tokens(self) -> int:
        return sum(len(row.chosen) for row in self.rows)

    @property
    def trained_tokens(self) -> int:
        return sum(sum(map(bool, sample.loss_mask)) for sample in self.samples)

    def describe(self) -> str:
        rows, samples = f"{len(self.rows):,}", f"{len(self.samples):,}"
        return f"compared {self.tokens:,} of {self.trained_tokens:,} trained tokens, {rows} of {samples} samples"

    def to_json(self) -> dict[str, int]:
        return {
            "samples": len(self.rows),
            "samples_in_file": len(self.samples),
            "trained_tokens": self.tokens,
            "trained_tokens_in_file": self.trained_tokens,
        }


def command(
    samples: SamplesFile,
    trainer: Annotated[
        str | None, typer.Option("--trainer", help="the trainer's model, a directory or a hub id, scored here")
    ] = None,
    trainer_logprobs: TrainerFile = None,
    output: ReportPage = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="with --trainer: the model's own forward pass, not the exact operators")
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="with --trainer: float32, bfloat16 or float16")] = "float32",
    device: Annotated[str, typer.Option("--device", help="with --trainer: cpu, cuda or cuda:N")] = "cpu",
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="with -o: a model's directory or hub id, to show tokens as text")
    ] = None,
    correction: Annotated[
        str, typer.Option("--correction", help="preset whose effect is shown")
    ] = "decoupled_token_is",
    max_k3: Annotated[
        float, typer.Option("--max-k3", help="exit 1 where the mean K3 per token is above this")
    ] = ALARM_K3,
    as_json: AsJson = False,
) -> int:
    """Mismatch report: δ, K1/K3, ratio tails, ESS, argmax flips, contribution skew; a table, and plots with -o."""
    from tokentrue.mismatch import PRESETS

    if correction not in PRESETS:
        raise ConfigError(f"--correction: no preset {correction!r}; choose one of {', '.join(PRESETS)}")
    if (trainer is None) == (trainer_logprobs is None):
        raise ConfigError(
            "pass either --trainer MODEL or --trainer-logprobs FILE: the trainer's side of the comparison"
        )
    if trainer is not None:
        require_device(device)
        require_dtype(dtype)
    if not max_k3 >= 0:
        raise ConfigError(f"--max-k3: {max_k3:g} must be a number >= 0")
    renderer: Any = None if output is None else renderer_from("--tokenizer", tokenizer)
    found = _read_samples(samples, for_page=output is not None)
    compared = (
        _compare_file(found, trainer_logprobs)
        if trainer is None
        else _compare_model(found, trainer, plain=plain, dtype=dtype, device=device, quiet=as_json)
    )
    if not compared.rows:
        why = "no sample has trained tokens with log-probabilities of both sides"
        if compared.refused:
            why = f"the trainer cannot score any sample as it was sampled; the first: {compared.refused[0]}"
        raise InputError(f"{samples}: {why}")
    advantages = _advantages(compared)
    is_shown = advantages is not None or "advantages" not in PRESETS[correction].needs
    whole, steps = _diagnose(compared.rows, PRESETS[correction] if is_shown else None, advantages)
    verdict, alarm = _verdict(whole, compared, max_k3)
    facts = {
        "samples": f"{len(compared.rows):,} of {len(found):,} in {samples.name}",
        "trained tokens": f"{compared.tokens:,} of {compared.trained_tokens:,}",
        "trainer": trainer or str(trainer_logprobs),
        "correction shown": correction if is_shown else f"none: {correction} needs a reward for every sample",
    }
    if trainer is not None:
        facts["scored"] = f"{'the model’s own forward pass' if plain else 'exact operators'}, {dtype}, {device}"
    if left_out := len(found) - len(compared.rows) - len(compared.refused):
        missing = "without trained tokens or without the trainer's log-probabilities"
        facts["left out"] = f"{pluralise(left_out, 'sample')} {missing}"
    if compared.refused:
        facts["not scored"] = f"{pluralise(len(compared.refused), 'sample')}; the first: {compared.refused[0]}"
    if output is not None:
        from tokentrue.cli.inspect.diagnose_report import diagnosis_report, write_diagnosis

        report = diagnosis_report(whole, steps, verdict=verdict, ok=not alarm, facts=facts)
        scores = {row.sample.sample_id: row.scores for row in compared.rows}
        write_diagnosis(output, report, whole, samples=found, trainer=scores, renderer=renderer)
    if as_json:
        head: JsonObject = {"verdict": verdict, "ok": not alarm, "facts": facts, "compared": compared.to_json()}
        worst = [asdict(row) for row in whole.worst]
        metrics = {key: value if _is_measured(whole, key) else None for key, value in whole.metrics.items()}
        print(json.dumps({**head, "metrics": metrics, "worst": worst}, indent=1))
    else:
        _show(whole, verdict, facts.get("not scored"), output)
    return 1 if alarm else 0


def _read_samples(path: Path, *, for_page: bool) -> list[Sample]:
    """`for_page`: refuses names that the report's page cannot hold now, not after minutes of scoring."""
    from tokentrue.samples import read_samples

    found = list(read_samples(path))
    if for_page:
        from tokentrue.viewer.records import check_names

        for sample in found:
            check_names(sample)
    return found


def _compare_file(found: list[Sample], path: Path | None) -> Comparison:
    from tokentrue.samples.trainer_logprobs import read_trainer_logprobs

    given = {} if path is None else read_trainer_logprobs(path)
    pairs = [(sample, given[sample.sample_id]) for sample in found if sample.sample_id in given]
    rows = [_row(sample, scores, None) for sample, scores in pairs]
    return Comparison(rows=[row for row in rows if row.chosen], samples=found, refused=[])


def _compare_model(found: list[Sample], model: str, *, plain: bool, dtype: str, device: str, quiet: bool) -> Comparison:
    from tokentrue.app.training import require_samples_of
    from tokentrue.samples.trainer_logprobs import TrainerLogprobs

    score = load_scorer(model, plain=plain, dtype=dtype, device=device)
    require_samples_of(found, model)
    rows: list[Row] = []
    refused: list[str] = []
    for sample in count_items(found, "sample", quiet=quiet):
        if any(sample.loss_mask):
            try:
                values, tops = score(sample)
            except TokenContractError as error:
                refused.append(str(error))
                continue
            rows.append(_row(sample, TrainerLogprobs(logprobs=values), tops))
    return Comparison(rows=[row for row in rows if row.chosen], samples=found, refused=refused)


def _row(sample: Sample, scores: TrainerLogprobs, tops: Sequence[int] | None) -> Row:
    scores.check(sample)
    sides = {"rollout's": sample.rollout_logprobs, "trainer's": scores.logprobs}
    trained = (i for i, bit in enumerate(sample.loss_mask) if bit)
    chosen = tuple(i for i in trained if all(values[i] is not None for values in sides.values()))
    for side, values in sides.items():
        odd = next((i for i in chosen if not math.isfinite(values[i] or 0.0)), None)
        if odd is not None:
            cure = "`tokentrue audit` lists every such sample of the file"
            cure = "check the weights and --dtype" if side == "trainer's" else cure
            where = f"sample {sample.sample_id}: the {side} log-probability of token {odd}"
            raise InputError(f"{where} is {values[odd]}; {cure}")
    return Row(sample=sample, scores=scores, chosen=chosen, tops=tops)


def load_scorer(
    model: str, *, plain: bool, dtype: str, device: str
) -> Callable[[Sample], tuple[list[float | None], list[int] | None]]:
    """Log-probabilities as `tokentrue train` computes them: at the turn's temperature, over the ids that its filters
    kept. Raises TokenContractError for a sample that cannot be scored so.
    """
    import torch
    from transformers.utils import logging

    from tokentrue.hub import load_causal_model
    from tokentrue.samples.recorded_turns import scoring_temperatures
    from tokentrue.train.rows import ScoredRow, kept_rows
    from tokentrue.train.scoring import ExactScorer, PlainScorer

    logging.disable_progress_bar()  # ours is enough
    with name_option("--trainer"):
        loaded = load_causal_model(model, dtype=dtype).to(device).eval()
    tops: list[list[int]] = []

    def record_tops(_module: object, _given: object, out: Any) -> None:
        tops.append([-1, *out.logits[0, :-1].argmax(-1).tolist()])

    if plain:
        loaded.register_forward_hook(record_tops)
    score = PlainScorer() if plain else ExactScorer()

    def score_sample(sample: Sample) -> tuple[list[float | None], list[int] | None]:
        ids, temperatures = torch.tensor(list(sample.token_ids)), torch.tensor(scoring_temperatures(sample))
        row = ScoredRow(ids=ids, temperatures=temperatures, kept=kept_rows(sample))
        tops.clear()
        with torch.no_grad():
            found: Any = score(loaded, [row]).logprobs[0]
        return [None, *found[1:].tolist()], tops[0] if tops else None

    return score_sample


def _advantages(compared: Comparison) -> list[float] | None:
    from tokentrue.viewer.plots import compute_advantages

    known = compute_advantages(compared.samples)
    names = [row.sample.sample_id for row in compared.rows]
    return [known[name] for name in names] if all(name in known for name in names) else None


def _diagnose(
    rows: Sequence[Row], correction: Correction | None, advantages: list[float] | None
) -> tuple[Diagnosis, list[tuple[str, Diagnosis]]]:
    kinds = sorted({kind for row in rows for kind in row.kinds})
    by_step: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        by_step.setdefault(row.step, []).append(number)
    steps: list[tuple[str, Diagnosis]] = []
    for label in sorted(by_step, key=_natural):
        parts = [
            _diagnose_rows(
                [rows[i] for i in batch],
                None if advantages is None else [advantages[i] for i in batch],
                kinds,
                correction,
            )
            for batch in _batches(rows, by_step[label])
        ]
        steps.append((label, parts[0].merge(*parts[1:])))
    return steps[0][1].merge(*(diagnosis for _, diagnosis in steps[1:])), steps


def _diagnose_rows(
    rows: Sequence[Row], advantages: list[float] | None, kinds: list[str], correction: Correction | None
) -> Diagnosis:
    import torch

    from tokentrue.mismatch import diagnose

    def tensors(values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        return [torch.tensor(value, dtype=dtype) for value in values]

    trainer = tensors([row.trainer for row in rows])
    flips = None if any(row.tops is None for row in rows) else tensors([row.flips for row in rows], torch.long)
    return diagnose(
        trainer,
        tensors([row.rollout for row in rows]),
        logprobs=trainer if correction is not None and correction.needs_current else None,
        advantages=None if advantages is None else torch.tensor(advantages, dtype=torch.float64),
        correction=correction,
        kinds=tensors([[kinds.index(kind) for kind in row.kinds] for row in rows], torch.long),
        kind_names=kinds,
        trainer_top_ids=flips,
        rollout_top_ids=None if flips is None else [torch.zeros_like(row) for row in flips],
        row_names=[row.sample.sample_id for row in rows],
    )


def _batches(rows: Sequence[Row], numbers: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    tokens = 0
    for number in numbers:
        if batch and tokens + len(rows[number].chosen) > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += len(rows[number].chosen)
    yield batch


def _natural(label: str) -> tuple[int, float, str]:
    return (0, float(label), "") if label.lstrip("-").isdigit() else (1, 0.0, label)


def _verdict(whole: Diagnosis, compared: Comparison, max_k3: float) -> tuple[str, bool]:
    tokens, k3, most = int(whole["tokens"]), whole["corr/k3"], max(whole["delta/max"], -whole["delta/min"])
    alarm = most != 0.0 and k3 > max_k3
    text = f"exact: all {tokens:,} log-probabilities are equal"
    if most != 0.0:
        sizes = f"mean |δ| {whole['delta/abs_mean']:.3g}, largest |δ| {most:.3g}"
        text = f"K3 {k3:.3g} per token, {sizes} over {tokens:,} tokens"
    if alarm:
        text += f": above {max_k3:g}, look at the template, the tokenizer and the weights before any correction"
    is_whole = (len(compared.rows), compared.tokens) == (len(compared.samples), compared.trained_tokens)
    return text if is_whole else f"{text}; {compared.describe()}", alarm


def _show(whole: Diagnosis, verdict: str, not_scored: str | None, output: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="training-inference mismatch")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for key in SHOWN:
        if key in whole.metrics:
            table.add_row(key, f"{whole[key]:.6g}" if _is_measured(whole, key) else "-")
    for row in whole.worst[:3]:
        table.add_row(
            f"worst: {row.row}", f"mean K3 {row.score:.3g}, max |δ| {row.max_abs_delta:.3g} at token {row.position}"
        )
    console = Console()
    console.print(table)
    console.print(verdict, highlight=False)
    if not_scored is not None:
        console.print(f"not scored: {not_scored}", highlight=False, markup=False)
    if output is not None:
        console.print(f"report: {output}", highlight=False)


def _is_measured(whole: Diagnosis, key: str) -> bool:
    """The exact operators and a file of log-probabilities report no argmax, hence no flips."""
    from tokentrue.mismatch.metrics import Mean

    statistic = whole.metrics.statistics.get(key) if key == "flips" else None
    return not (isinstance(statistic, Mean) and statistic.count == 0)
