"""tokentrue diagnose SAMPLES: how far and where rollout and trainer log-probabilities differ; what a correction
does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from typer import Option

from tokentrue.cli.common import (
    AsJson,
    ReportPage,
    SamplesFile,
    TrainerFile,
    name_option,
    pluralise,
    print_json,
    print_table,
    renderer_from,
    show_status,
)
from tokentrue.errors import InputError, TokenContractError, did_you_mean
from tokentrue.hub import load_causal_model
from tokentrue.records import record

if TYPE_CHECKING:
    from torch import Tensor

    from tokentrue.mismatch import Correction, Diagnosis
    from tokentrue.mismatch.diagnosis import WorstRow
    from tokentrue.samples.trainer_logprobs import TrainerLogprobs
    from tokentrue.types import Sample

BATCH_TOKENS = 8192
PADDED_TOKENS = 2048  # of a forward pass with --plain, which holds all logits at once
ALARM_K3 = 0.015
ORDINARY = "K3 of ordinary engines"
YARDSTICKS = "1e-5 to 1e-3 for dense models, 1e-3 to 1e-1 for mixtures"
T = TypeVar("T")
Scored: TypeAlias = "tuple[TrainerLogprobs, list[int] | None]"
"""The trainer's log-probabilities, and its most likely tokens if known."""


@record
class Row:
    """One sample, and for each of its trained tokens with numbers of both sides: the numbers, the token's kind, and
    whether the argmax flips (None if unknown)."""

    sample: Sample
    scores: TrainerLogprobs
    rollout: list[float]
    trainer: list[float]
    kinds: list[str]
    flips: list[bool] | None


def command(
    samples: SamplesFile,
    trainer: Annotated[str | None, Option(help="the trainer's model, a directory or a hub id, scored here")] = None,
    trainer_logprobs: TrainerFile = None,
    output: ReportPage = None,
    plain: Annotated[
        bool, Option("--plain", help="with --trainer: the model's own forward pass, not the exact operators")
    ] = False,
    dtype: Annotated[str, Option(help="with --trainer: float32, bfloat16 or float16")] = "float32",
    device: Annotated[str, Option(help="with --trainer: cpu, cuda or cuda:N")] = "cpu",
    tokenizer: Annotated[
        str | None, Option(help="with -o: a model's directory or hub id, to show tokens as text")
    ] = None,
    correction: Annotated[str, Option(help="preset whose effect is shown")] = "decoupled_token_is",
    max_k3: Annotated[float, Option(help="exit 1 where the mean K3 per token is above this")] = ALARM_K3,
    policy_version: Annotated[
        int | None, Option(help="only samples that this version of the weights sampled from first to last token")
    ] = None,
    write_logprobs: Annotated[
        Path | None,
        Option(help="with --trainer: write its log-probabilities for `tokentrue view --trainer-logprobs`"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Mismatch report: δ, K1/K3, ratio tails, ESS, argmax flips, contribution skew; a table, and plots with -o."""
    from tokentrue.app.configuration import Checks
    from tokentrue.app.libraries import require_device, require_dtype, require_samples_of
    from tokentrue.mismatch import PRESETS

    checks = Checks()
    listed = f"choose one of {', '.join(PRESETS)}{did_you_mean(correction, PRESETS)}"
    checks.require(correction in PRESETS, f"--correction: no preset {correction!r}; {listed}")
    sides = "pass either --trainer MODEL or --trainer-logprobs FILE: the trainer's side of the comparison"
    checks.require((trainer is None) != (trainer_logprobs is None), sides)
    checks.require(max_k3 >= 0, f"--max-k3: {max_k3:g} must be a number >= 0")
    needs = "--write-logprobs writes what --trainer computes; give --trainer MODEL"
    checks.require(write_logprobs is None or trainer is not None, needs)
    checks(require_dtype, dtype)
    checks(require_device, device)
    checks.finish()
    from tokentrue.samples import read_samples
    from tokentrue.samples.trainer_logprobs import read_trainer_logprobs
    from tokentrue.viewer.records import check_names

    renderer: Any = None if output is None else renderer_from("--tokenizer", tokenizer)
    found = list(read_samples(samples))
    versions = {sample.sample_id: sampled_by(sample) for sample in found}
    if policy_version is not None:
        found = [sample for sample in found if versions[sample.sample_id] == {policy_version}]
        if not found:
            known = ", ".join(map(str, sorted(set[int]().union(*versions.values())))) or "none is recorded"
            raise InputError(f"{samples}: no sample of policy version {policy_version}; versions in the file: {known}")
    if output is not None:  # refuse names that the page cannot hold now, not after minutes of scoring
        for sample in found:
            check_names(sample)
    if trainer is None:
        given = read_trainer_logprobs(str(trainer_logprobs))
        side = {"trainer": str(trainer_logprobs)}
        known = [sample for sample in found if sample.sample_id in given]
        rows, refused = score_all(known, lambda each: [(given[sample.sample_id], None) for sample in each], quiet=True)
    else:
        side = {"trainer": trainer}
        side["scored"] = f"{'the model’s own forward pass' if plain else 'exact operators'}, {dtype}, {device}"
        score = load_scorer(trainer, plain=plain, dtype=dtype, device=device)
        require_samples_of(found, trainer)
        rows, refused = score_all(found, score, tokens=PADDED_TOKENS if plain else BATCH_TOKENS, quiet=as_json)
        if write_logprobs is not None:
            write_logprobs.parent.mkdir(parents=True, exist_ok=True)
            write_logprobs.write_text("".join(row.scores.to_line(row.sample) for row in rows), encoding="utf-8")
    if not rows:
        why = "no sample has trained tokens with log-probabilities of both sides"
        if refused:
            why = f"the trainer cannot score any sample as it was sampled; the first: {refused[0]}"
        raise InputError(f"{samples}: {why}")
    counts = {
        "samples": len(rows),
        "samples_in_file": len(found),
        "trained_tokens": sum(len(row.trainer) for row in rows),
        "trained_tokens_in_file": sum(sum(map(bool, sample.loss_mask)) for sample in found),
    }
    whole, steps, shown = diagnose_steps(rows, found, correction)
    facts = {
        "samples": f"{len(rows):,} of {len(found):,} in {samples.name}",
        "trained tokens": f"{counts['trained_tokens']:,} of {counts['trained_tokens_in_file']:,}",
        "correction shown": shown,
        ORDINARY: YARDSTICKS,
        **side,
    }
    if left_out := len(found) - len(rows) - len(refused):
        missing = "without trained tokens or without the trainer's log-probabilities"
        facts["left out"] = f"{pluralise(left_out, 'sample')} {missing}"
    if refused:
        facts["not scored"] = f"{pluralise(len(refused), 'sample')}; the first: {refused[0]}"
    spread = set[int]().union(*(versions[row.sample.sample_id] for row in rows))
    verdict, alarm = judge(whole, counts, max_k3, spread if trainer is not None else set())
    if output is not None:
        from tokentrue.cli.reports import diagnosis_report, write_diagnosis

        report = diagnosis_report(whole, steps, verdict=verdict, ok=not alarm, facts=facts)
        write_diagnosis(output, report, whole, found, {row.sample.sample_id: row.scores for row in rows}, renderer)
    metrics: dict[str, float | None] = dict(whole.metrics.items())
    if rows[0].flips is None:  # the exact operators and a file of log-probabilities report no argmax
        metrics["flips"] = None
    if as_json:
        head = {"verdict": verdict, "ok": not alarm, "facts": facts, "compared": counts}
        print_json({**head, "metrics": metrics, "worst": [asdict(row) for row in whole.worst]})
    else:
        print_metrics(metrics, whole.worst[:3])
        lines = {
            **{name: facts.get(name) for name in (ORDINARY, "not scored")},
            "report": output,
            "log-probabilities": write_logprobs,
        }
        print("\n".join([verdict, *(f"{name}: {text}" for name, text in lines.items() if text)]))
    return 1 if alarm else 0


def print_metrics(metrics: Mapping[str, float | None], worst: Sequence[WorstRow]) -> None:
    from tokentrue.cli.reports import NUMBERS

    cells: list[tuple[str, str]] = []
    for key in (key for key in NUMBERS if key in metrics):
        value = metrics[key]
        cells.append((f"{NUMBERS[key]} ({key})", "-" if value is None else f"{value:.6g}"))
    for key, value in metrics.items():
        if key.startswith("by_kind/turn") and value is not None:
            cells.append((f"mean |δ| in {key.removeprefix('by_kind/')}", f"{value:.6g}"))
    for row in worst:
        most = f"mean K3 {row.score:.3g}, max |δ| {row.max_abs_delta:.3g} at token {row.position}"
        cells.append((f"worst: {row.row}", most))
    print_table("training-inference mismatch", ("metric", "value"), cells)


def sampled_by(sample: Sample) -> set[int]:
    """The policy versions of its sampled tokens."""
    spans = (span for span in sample.spans if span.kind == "sampled")
    return {span.policy_version for span in spans if span.policy_version is not None}


def score_all(
    samples: Sequence[Sample],
    score: Callable[[Sequence[Sample]], list[Scored]],
    *,
    quiet: bool,
    tokens: int = BATCH_TOKENS,
) -> tuple[list[Row], list[str]]:
    """Samples with numbers of both sides, and why others cannot be scored. `score` gets up to `tokens` tokens at once."""
    from tokentrue.samples.recorded_turns import scoring_temperatures

    rows: dict[int, Row] = {}
    refused: list[str] = []
    trained = [number for number, sample in enumerate(samples) if any(sample.loss_mask)]
    trained.sort(key=lambda number: len(samples[number].token_ids))
    done = 0
    with show_status("scoring", quiet=quiet or not sys.stderr.isatty()) as update:
        for batch in cut_batches(trained, lambda number: len(samples[number].token_ids), tokens):
            scorable: list[int] = []
            for number in batch:
                try:
                    scoring_temperatures(samples[number])
                    scorable.append(number)
                except TokenContractError as error:
                    refused.append(str(error))
            if scorable:
                found = score([samples[number] for number in scorable])
                rows.update(
                    {number: compare(samples[number], *each) for number, each in zip(scorable, found, strict=True)}
                )
            done += len(batch)
            update(f"scored {done:,} of {pluralise(len(trained), 'sample')}")
    return [rows[number] for number in sorted(rows) if rows[number].trainer], refused


def compare(sample: Sample, scores: TrainerLogprobs, tops: Sequence[int] | None) -> Row:
    scores.check(sample)
    turns = {i: span.turn for span in sample.spans for i in range(span.start, span.end)}
    row = Row(sample=sample, scores=scores, rollout=[], trainer=[], kinds=[], flips=None if tops is None else [])
    for i, trained in enumerate(sample.loss_mask):
        rollout, trainer = sample.rollout_logprobs[i], scores.logprobs[i]
        if not trained or rollout is None or trainer is None:
            continue
        for side, value, cure in (
            ("rollout's", rollout, "`tokentrue audit` lists every such sample of the file"),
            ("trainer's", trainer, "check the weights and --dtype"),
        ):
            if not math.isfinite(value):
                where = f"sample {sample.sample_id}: the {side} log-probability of token {i}"
                raise InputError(f"{where} is {value}; {cure}")
        row.rollout.append(float(rollout))
        row.trainer.append(float(trainer))
        row.kinds.append("sampled" if i not in turns else f"turn {turns[i]}" if turns[i] < 8 else "turn 8+")
        if tops is not None and row.flips is not None:
            # A sampled token with probability above one half is the rollout's argmax: does the trainer have another?
            row.flips.append(rollout > math.log(0.5) and tops[i] != sample.token_ids[i])
    return row


def load_scorer(model: str, *, plain: bool, dtype: str, device: str) -> Callable[[Sequence[Sample]], list[Scored]]:
    """Log-probabilities as `tokentrue train` computes them, several samples in one pass: at the turn's temperature, over
    the ids that its filters kept.
    """
    import torch

    from tokentrue.pixels import find_images
    from tokentrue.samples.recorded_turns import scoring_temperatures
    from tokentrue.samples.trainer_logprobs import TrainerLogprobs
    from tokentrue.train.rows import ScoredRow, kept_rows
    from tokentrue.train.scoring import ExactScorer, PlainScorer

    with name_option("--trainer"):
        loaded = load_causal_model(model, dtype=dtype).to(device).eval()
    tops: list[list[int]] = []

    def record_tops(_module: object, _given: object, out: Any) -> None:
        tops.extend([-1, *row] for row in out.logits[:, :-1].argmax(-1).tolist())

    if plain:
        loaded.register_forward_hook(record_tops)
    score = PlainScorer() if plain else ExactScorer()

    def score_samples(samples: Sequence[Sample]) -> list[Scored]:
        rows = [
            ScoredRow(
                ids=torch.tensor(list(sample.token_ids)),
                temperatures=torch.tensor(scoring_temperatures(sample)),
                kept=kept_rows(sample),
                images=find_images(sample.images, None, f"sample {sample.sample_id}"),
            )
            for sample in samples
        ]
        tops.clear()
        with torch.no_grad(), score.active(loaded):
            found = score(loaded, rows).logprobs
        chosen = tops or [None] * len(rows)
        return [
            (TrainerLogprobs(logprobs=[None, *values[1:].tolist()]), top)
            for values, top in zip(found, chosen, strict=True)
        ]

    return score_samples


def diagnose_steps(
    rows: Sequence[Row], found: Sequence[Sample], preset: str
) -> tuple[Diagnosis, dict[str, Diagnosis], str]:
    """The whole, each step by its label, and the correction that is shown."""
    from tokentrue.mismatch import PRESETS
    from tokentrue.viewer.plots import compute_advantages

    correction: Correction | None = PRESETS[preset]
    advantages: dict[str, float] | None = compute_advantages(found)
    unknown = {"versions": "the trainer's policy version"}
    if not all(row.sample.sample_id in advantages for row in rows):
        advantages, unknown["advantages"] = None, "a reward for every sample"
    if missing := sorted(correction.needs & unknown.keys()):
        correction, preset = None, f"none: {preset} needs {unknown[missing[0]]}"
    kinds = sorted({kind for row in rows for kind in row.kinds})
    by_step: dict[str, list[Row]] = {}
    for row in rows:
        newest = max(sampled_by(row.sample), default=0)
        by_step.setdefault(str(row.sample.metadata.get("step", newest)), []).append(row)

    def in_order(label: str) -> tuple[int, float, str]:
        return (0, float(label), "") if label.lstrip("-").isdigit() else (1, 0.0, label)

    def tokens_of(row: Row) -> int:
        return len(row.trainer)

    steps: dict[str, Diagnosis] = {}
    for label in sorted(by_step, key=in_order):
        first, *others = [
            diagnose_rows(batch, advantages, kinds, correction) for batch in cut_batches(by_step[label], tokens_of)
        ]
        steps[label] = first.merge(*others)
    first, *others = steps.values()
    return first.merge(*others), steps, preset


def cut_batches(items: Sequence[T], size: Callable[[T], int], most: int = BATCH_TOKENS) -> Iterator[list[T]]:
    """Runs of items of at most `most` tokens; a larger item is a run by itself."""
    batch: list[T] = []
    tokens = 0
    for item in items:
        if batch and tokens + size(item) > most:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += size(item)
    if batch:
        yield batch


def diagnose_rows(
    rows: Sequence[Row], advantages: dict[str, float] | None, kinds: list[str], correction: Correction | None
) -> Diagnosis:
    import torch

    from tokentrue.mismatch import diagnose

    def tensors(values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        return [torch.tensor(value, dtype=dtype) for value in values]

    names = [row.sample.sample_id for row in rows]
    trainer = tensors([row.trainer for row in rows])
    known = [row.flips for row in rows if row.flips is not None]
    return diagnose(
        trainer,
        tensors([row.rollout for row in rows]),
        logprobs=trainer if correction is not None and correction.needs_current else None,
        advantages=None if advantages is None else tensors([[advantages[name] for name in names]])[0],
        correction=correction,
        kinds=tensors([[kinds.index(kind) for kind in row.kinds] for row in rows], torch.long),
        kind_names=kinds,
        flips=tensors(known, torch.bool) if len(known) == len(rows) else None,
        row_names=names,
    )


def judge(whole: Diagnosis, counts: Mapping[str, int], max_k3: float, versions: set[int]) -> tuple[str, bool]:
    """The verdict, and whether it is an alarm. `versions`: those that one trainer's model was compared with."""
    tokens, k3, most = int(whole["tokens"]), whole["corr/k3"], max(whole["delta/max"], -whole["delta/min"])
    alarm = most != 0.0 and k3 > max_k3
    text = f"exact: all {tokens:,} log-probabilities are equal"
    if most != 0.0:
        sizes = f"mean |δ| {whole['delta/abs_mean']:.3g}, largest |δ| {most:.3g}"
        bound = f"{'FAIL' if alarm else 'OK'}: K3 {k3:.3g} {'>' if alarm else '<='} {max_k3:g} (--max-k3)"
        text = f"{bound}, {sizes} over {tokens:,} tokens"
    if len(versions) > 1 and most != 0.0:
        span = f"policy versions {min(versions)} to {max(versions)}"
        text += f": {span} sampled, the trainer has the weights of one; --policy-version N compares those of one alone"
    elif alarm:
        text += ": are these the weights, template and tokenizer that sampled? `tokentrue doctor` names the cause"
    compared, trained, samples, all_samples = (
        counts[name] for name in ("trained_tokens", "trained_tokens_in_file", "samples", "samples_in_file")
    )
    if (compared, samples) != (trained, all_samples):
        text += f"; compared {compared:,} of {trained:,} trained tokens, {samples:,} of {all_samples:,} samples"
    return text, alarm
