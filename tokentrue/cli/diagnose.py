"""tokentrue diagnose SAMPLES: how far and where rollout and trainer log-probabilities differ."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from typer import Option

from tokentrue.cli.common import (
    AsJson,
    ReportPage,
    SamplesFile,
    TrainerFile,
    check_model_of,
    name_option,
    pluralise,
    print_json,
    print_report,
    renderer_from,
    require_file,
    show_status,
)
from tokentrue.errors import AuditError, InputError, TokenContractError, did_you_mean
from tokentrue.json_types import read_table
from tokentrue.records import record

if TYPE_CHECKING:
    from torch import Tensor

    from tokentrue.mismatch import Correction, Diagnosis
    from tokentrue.samples.trainer_logprobs import TrainerLogprobs
    from tokentrue.types import Sample
    from tokentrue.viewer import Chart, Report

BATCH_TOKENS = 8192
PADDED_TOKENS = 2048  # of a forward pass with --plain, which holds all logits at once
PAGE_TOKENS = 200_000
ALARM_K3 = 0.015
ORDINARY = "K3 of ordinary engines"
YARDSTICKS = "1e-5 to 1e-3 for dense models, 1e-3 to 1e-1 for mixtures"
LABELS: Mapping[str, Mapping[str, str]] = read_table(__file__, "diagnose.toml")
NUMBERS, WORST, PLACES = LABELS["numbers"], LABELS["worst"], LABELS["places"]
Scored: TypeAlias = "tuple[TrainerLogprobs, list[int] | None]"
"""The trainer's log-probabilities, and its most likely tokens if known."""


@record
class ComparedSample:
    """Of each trained token with numbers of both sides: the numbers, its kind, and whether the argmax flips (None if
    unknown)."""

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
    out: ReportPage = None,
    plain: Annotated[
        bool, Option("--plain", help="with --trainer: the model's own forward pass, not the exact operators")
    ] = False,
    dtype: Annotated[str, Option(help="with --trainer: float32, bfloat16 or float16")] = "float32",
    device: Annotated[str, Option(help="with --trainer: cpu, cuda or cuda:N")] = "cpu",
    tokenizer: Annotated[
        str | None, Option(help="with -o: a model's directory or hub id, to show tokens as text")
    ] = None,
    correction: Annotated[str, Option(help="preset whose effect is shown")] = "decoupled_token_is",
    max_k3: Annotated[float, Option(min=0.0, help="exit 1 where the mean K3 per token is above this")] = ALARM_K3,
    policy_version: Annotated[
        int | None, Option(help="only samples that this version of the weights sampled from first to last token")
    ] = None,
    write_logprobs: Annotated[
        Path | None, Option(help="with --trainer: write its log-probabilities for `tokentrue view --trainer-logprobs`")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Mismatch report: δ, K1/K3, ratio tails, ESS, argmax flips, contribution skew; a table, and plots with -o."""
    from tokentrue.app.configuration import Checks
    from tokentrue.app.libraries import require_device_name, require_dtype
    from tokentrue.hub import find_directory
    from tokentrue.samples.trainer_logprobs import read_trainer_logprobs

    checks = Checks()
    checks.require(
        (trainer is None) != (trainer_logprobs is None),
        "pass either --trainer MODEL or --trainer-logprobs FILE: the trainer's side of the comparison",
    )
    checks.require(
        write_logprobs is None or trainer is not None,
        "--write-logprobs writes what --trainer computes; give --trainer MODEL",
    )
    checks(require_dtype, dtype)
    checks(require_device_name, device)
    checks(require_file, "-o", out)
    checks(require_file, "--write-logprobs", write_logprobs)
    for option, model in {"--trainer": trainer, "--tokenizer": tokenizer}.items():
        checks(check_model_of, option, model, find_directory)
    found = checks(read_sealed, samples, policy_version) or []
    given = {} if trainer_logprobs is None else checks(read_trainer_logprobs, str(trainer_logprobs)) or {}
    checks.finish()
    # From here on torch is loaded.
    from tokentrue.app.libraries import require_device, require_samples_of
    from tokentrue.mismatch import PRESETS
    from tokentrue.viewer import SampleList, write_report
    from tokentrue.viewer.records import check_names

    listed = f"choose one of {', '.join(PRESETS)}{did_you_mean(correction, PRESETS)}"
    checks.require(correction in PRESETS, f"--correction: no preset {correction!r}; {listed}")
    checks(require_device, device)
    checks.finish()
    renderer: Any = None if out is None else renderer_from("--tokenizer", tokenizer)
    for sample in found if out is not None else ():  # refused now, not after minutes of scoring
        check_names(sample)
    if trainer is None:
        side = {"trainer": str(trainer_logprobs)}
        known = [sample for sample in found if sample.sample_id in given]
        rows, refused = score_all(known, lambda each: [(given[sample.sample_id], None) for sample in each], quiet=True)
    else:
        side = {"trainer": trainer}
        side["scored"] = f"{'the model’s own forward pass' if plain else 'exact operators'}, {dtype}, {device}"
        with name_option("--trainer"):
            require_samples_of(found, trainer)
        score = load_scorer(trainer, plain=plain, dtype=dtype, device=device)
        rows, refused = score_all(found, score, tokens=PADDED_TOKENS if plain else BATCH_TOKENS, quiet=as_json)
        if write_logprobs is not None:
            lines = ({"sample_id": row.sample.sample_id, "logprobs": row.scores.logprobs} for row in rows)
            write_logprobs.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if not rows and refused:
        raise InputError(f"{samples}: the trainer cannot score any sample as it was sampled; the first: {refused[0]}")
    if not rows:
        raise InputError(f"{samples}: no sample has trained tokens with log-probabilities of both sides")
    counts = {
        "samples": len(rows),
        "samples_in_file": len(found),
        "trained_tokens": sum(len(row.trainer) for row in rows),
        "trained_tokens_in_file": sum(sum(map(bool, sample.loss_mask)) for sample in found),
    }
    whole, steps, shown = diagnose_steps(rows, found, correction)
    facts = {"file": samples.name, **side, "correction shown": shown, ORDINARY: YARDSTICKS}
    if left_out := len(found) - len(rows) - len(refused):
        missing = "without trained tokens or without the trainer's log-probabilities"
        facts["left out"] = f"{pluralise(left_out, 'sample')} {missing}"
    if refused:
        facts["not scored"] = f"{pluralise(len(refused), 'sample')}; the first: {refused[0]}"
    versions = set[int]() if trainer is None else set[int]().union(*(sampled_by(row.sample) for row in rows))
    verdict, alarm = judge(whole, counts, max_k3, versions)
    metrics: dict[str, float | None] = dict(whole.metrics.items())
    if rows[0].flips is None:  # the exact operators and a file of log-probabilities report no argmax
        metrics["flips"] = None
    report = replace(report_from(whole, steps, metrics, facts), verdict=verdict, ok=not alarm)
    if out is not None:
        scores = {row.sample.sample_id: row.scores for row in rows}
        source = SampleList(sort_by_worst(found, whole, scores), name="worst sequences first")
        write_report(out, report, source, renderer=renderer, trainer=scores, most_tokens=PAGE_TOKENS)
    if as_json:
        head = {"verdict": verdict, "ok": not alarm, "facts": facts, "compared": counts}
        print_json({**head, "metrics": metrics, "worst": [asdict(row) for row in whole.worst]})
        return int(alarm)
    print_report(report, out, tables=1)
    for name, text in {**facts, "log-probabilities": write_logprobs}.items():
        if text and name in (ORDINARY, "not scored", "log-probabilities"):
            print(f"{name}: {text}")
    return int(alarm)


def read_sealed(path: Path, policy_version: int | None) -> list[Sample]:
    """A sealed sample must be as it was sealed: its session may be incomplete."""
    from tokentrue.samples import audit
    from tokentrue.samples.files import read_all

    found = read_all(path)
    for sample in found:
        record = sample.metadata.get("tokentrue")
        if isinstance(record, dict) and "seal" in record:
            broken = [each for each in audit([sample]).findings if each.sample == sample.sample_id]
            if broken:
                raise AuditError(f"{path}: {broken[0]}; `tokentrue audit {path}` lists all that does not hold")
    if policy_version is None:
        return found
    chosen = [sample for sample in found if sampled_by(sample) == {policy_version}]
    if not chosen:
        versions = sorted(set[int]().union(*map(sampled_by, found)))
        known = ", ".join(map(str, versions)) or "none is recorded"
        raise InputError(f"{path}: no sample of policy version {policy_version}; versions in the file: {known}")
    return chosen


def sampled_by(sample: Sample) -> set[int]:
    spans = (span for span in sample.spans if span.kind == "sampled")
    return {span.policy_version for span in spans if span.policy_version is not None}


def score_all(
    samples: Sequence[Sample],
    score: Callable[[Sequence[Sample]], list[Scored]],
    *,
    quiet: bool,
    tokens: int = BATCH_TOKENS,
) -> tuple[list[ComparedSample], list[str]]:
    from tokentrue.samples.recorded_turns import scoring_temperatures
    from tokentrue.train.rows import pack

    scorable: list[Sample] = []
    refused: list[str] = []
    for sample in (sample for sample in samples if any(sample.loss_mask)):
        try:
            scoring_temperatures(sample)
            scorable.append(sample)
        except TokenContractError as error:
            refused.append(str(error))
    rows: dict[int, ComparedSample] = {}
    with show_status("scoring", quiet=quiet or not sys.stderr.isatty()) as update:
        for batch in pack([len(sample.token_ids) for sample in scorable], tokens):
            found = score([scorable[number] for number in batch])
            rows |= {number: compare(scorable[number], *each) for number, each in zip(batch, found, strict=True)}
            update(f"scored {len(rows):,} of {pluralise(len(scorable), 'sample')}")
    return [rows[number] for number in sorted(rows) if rows[number].trainer], refused


def compare(sample: Sample, scores: TrainerLogprobs, tops: Sequence[int] | None) -> ComparedSample:
    from tokentrue.samples.shape import spread_spans

    scores.check(sample)
    turns = spread_spans(sample, lambda span: f"turn {span.turn}" if span.turn < 8 else "turn 8+", "sampled")
    row = ComparedSample(
        sample=sample, scores=scores, rollout=[], trainer=[], kinds=[], flips=None if tops is None else []
    )
    for i, trained in enumerate(sample.loss_mask):
        rollout, trainer = sample.rollout_logprobs[i], scores.logprobs[i]
        if not trained or rollout is None or trainer is None:
            continue
        if not (math.isfinite(rollout) and math.isfinite(trainer)):
            side, value, cure = "trainer's", trainer, "check the weights and --dtype"
            if not math.isfinite(rollout):
                side, value, cure = "rollout's", rollout, "`tokentrue audit` lists every such sample of the file"
            raise InputError(f"sample {sample.sample_id}: the {side} log-probability of token {i} is {value}; {cure}")
        row.rollout.append(float(rollout))
        row.trainer.append(float(trainer))
        row.kinds.append(turns[i])
        if tops is not None and row.flips is not None:
            # A sampled token with probability above one half is the rollout's argmax: does the trainer have another?
            row.flips.append(rollout > math.log(0.5) and tops[i] != sample.token_ids[i])
    return row


def load_scorer(model: str, *, plain: bool, dtype: str, device: str) -> Callable[[Sequence[Sample]], list[Scored]]:
    """As `tokentrue train` computes them: at the turn's temperature, over the ids that its filters kept."""
    import torch

    from tokentrue.hub import load_causal_model
    from tokentrue.pixels import find_images
    from tokentrue.samples.recorded_turns import scoring_temperatures
    from tokentrue.samples.trainer_logprobs import TrainerLogprobs
    from tokentrue.train.rows import ScoredRow, kept_rows
    from tokentrue.train.scoring import ExactScorer, PlainScorer

    with name_option("--trainer"):
        loaded = load_causal_model(model, dtype=dtype).to(device).eval()
    tops: list[list[int] | None] = []

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
            found = cast("list[Any]", score(loaded, rows).logprobs)  # torch's `tolist` has no element type
        sides = [TrainerLogprobs(logprobs=[None, *values[1:].tolist()]) for values in found]
        return list(zip(sides, tops or [None] * len(rows), strict=True))

    return score_samples


def diagnose_steps(
    rows: Sequence[ComparedSample], found: Sequence[Sample], preset: str
) -> tuple[Diagnosis, dict[str, Diagnosis], str]:
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
    by_step: dict[str, list[ComparedSample]] = {}
    for row in rows:
        newest = max(sampled_by(row.sample), default=0)
        by_step.setdefault(str(row.sample.metadata.get("step", newest)), []).append(row)
    # numbers first, in their order
    order = sorted(by_step, key=lambda step: (0, float(step), "") if re.fullmatch(r"-?\d+", step) else (1, 0.0, step))
    steps = {label: diagnose_rows(by_step[label], advantages, kinds, correction) for label in order}
    first, *others = steps.values()
    return first.merge(*others), steps, preset


def diagnose_rows(
    rows: Sequence[ComparedSample], advantages: dict[str, float] | None, kinds: list[str], correction: Correction | None
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
    compared, trained = counts["trained_tokens"], counts["trained_tokens_in_file"]
    samples, all_samples = counts["samples"], counts["samples_in_file"]
    if (compared, samples) != (trained, all_samples):
        text += f"; compared {compared:,} of {trained:,} trained tokens, {samples:,} of {all_samples:,} samples"
    return text, alarm


def sort_by_worst(samples: Sequence[Sample], whole: Diagnosis, compared: Mapping[str, object]) -> list[Sample]:
    """All samples, for the groups' baselines. A session's stay together and in order: its reward is its first one's."""
    worst = {row.row: number for number, row in enumerate(whole.worst)}
    rank: dict[str, int] = {}
    for sample in samples:
        place = worst.get(sample.sample_id, len(worst) + (sample.sample_id not in compared))
        rank[sample.session_id] = min(place, rank.get(sample.session_id, place))
    return sorted(samples, key=lambda sample: rank[sample.session_id])


def report_from(
    whole: Diagnosis, steps: Mapping[str, Diagnosis], metrics: Mapping[str, float | None], facts: Mapping[str, str]
) -> Report:
    from tokentrue.mismatch.metrics import Mean
    from tokentrue.viewer import Report, ReportTable

    numbers: list[tuple[str, str | float]] = []
    by_turn = {key: f"mean |δ| in {key.removeprefix('by_kind/')}" for key in metrics if key.startswith("by_kind/turn")}
    for key, label in {**NUMBERS, **by_turn}.items():
        measured, known = whole.metrics.statistics.get(key), metrics.get(key)
        if known is None or (isinstance(measured, Mean) and not measured.count):
            known = "-"
        numbers.append((f"{label} ({key})" if key in NUMBERS else label, known))
    for row in whole.worst[:3]:
        most = f"mean K3 {row.score:.3g}, max |δ| {row.max_abs_delta:.3g} at token {row.position}"
        numbers.append((f"worst: {row.row}", most))
    title = "Training-inference mismatch"
    worst = [tuple(getattr(row, name) for name in WORST) for row in whole.worst]
    return Report(
        title=title,
        highlights=[
            ("tokens compared", f"{int(whole['tokens']):,}"),
            ("K3 per token", f"{whole['corr/k3']:.3g}"),
            ("mean |δ|", f"{whole['delta/abs_mean']:.3g}"),
        ],
        note="δ = trainer − rollout log-probability, r = exp(δ). Sessions with the worst sequences come first.",
        charts=list(mismatch_charts(whole, steps)),
        facts=list(facts.items()),
        tables=[
            ReportTable(title=title, columns=("metric", "value"), rows=numbers),
            *([ReportTable(title="Worst sequences", columns=list(WORST.values()), rows=worst)] if worst else ()),
        ],
    )


def mismatch_charts(whole: Diagnosis, steps: Mapping[str, Diagnosis]) -> Iterator[Chart]:
    from tokentrue.mismatch.metrics import Mean
    from tokentrue.viewer import Chart

    if len(steps) > 1:
        series = {"|K1|": [abs(d["corr/k1"]) for d in steps.values()], "K3": [d["corr/k3"] for d in steps.values()]}
        title, labels = "K1 and K3 over steps", list(steps)
        yield Chart(title=title, x_label="step", y_label="per token", labels=labels, series=series, log_y=True)
    for prefix, place in PLACES.items():
        found = {name.partition("/"): stat for name, stat in whole.metrics.statistics.items()}
        means = {name: stat for name, stat in found.items() if isinstance(stat, Mean) and stat.count}
        bars = {name: stat.value for (kind, _, name), stat in means.items() if kind == prefix}
        if any(bars.values()):
            series, labels, what = {"mean |δ|": list(bars.values())}, list(bars), "mean |δ|"
            yield Chart(title=f"|δ| by {place}", x_label=place, y_label=what, labels=labels, kind="bars", series=series)
