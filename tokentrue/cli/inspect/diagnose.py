"""tokentrue diagnose SAMPLES: how far the rollout's log-probabilities are from the trainer's, where, and what a
correction would do."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokentrue.app.devices import require_device, require_dtype
from tokentrue.cli.options import name_option
from tokentrue.cli.words import count_of
from tokentrue.errors import ConfigError, InputError, TokenContractError
from tokentrue.json_types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

    from tokentrue.mismatch import Correction, Diagnosis
    from tokentrue.samples.trainer_logprobs import TrainerLogprobs
    from tokentrue.types import Sample

BATCH_TOKENS = 8192
ALARM_K3 = 0.015


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The trained tokens of one sample, with the trainer's numbers for them."""

    name: str
    step: str
    token_ids: tuple[int, ...]
    kinds: tuple[str, ...]
    rollout: tuple[float, ...]
    trainer: tuple[float, ...]
    flips: tuple[bool, ...] | None  # the trainer would have chosen another token where the rollout was sure of this one
    sample: Sample
    scores: TrainerLogprobs  # of all tokens of the sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows that have numbers of both sides, and how much of the file they are."""

    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]  # of the file
    trained_tokens: int  # in the file
    refused: tuple[str, ...] = ()  # why the trainer cannot score a sample, one for each such sample

    @property
    def tokens(self) -> int:
        return sum(len(row.rollout) for row in self.rows)

    @property
    def is_whole(self) -> bool:
        return (len(self.rows), self.tokens) == (len(self.samples), self.trained_tokens)

    def describe(self) -> str:
        return f"compared {self.tokens:,} of {self.trained_tokens:,} trained tokens, {len(self.rows):,} of {len(self.samples):,} samples"

    def to_json(self) -> dict[str, int]:
        return {
            "samples": len(self.rows),
            "samples_in_file": len(self.samples),
            "trained_tokens": self.tokens,
            "trained_tokens_in_file": self.trained_tokens,
        }


def command(
    samples: Annotated[Path, typer.Argument(help="exported samples, in any of tokentrue's formats")],
    trainer: Annotated[
        str | None, typer.Option("--trainer", help="the trainer's model, a directory or a hub id, scored here")
    ] = None,
    trainer_logprobs: Annotated[
        Path | None,
        typer.Option(
            "--trainer-logprobs", help='JSON lines {"sample_id": …, "logprobs": [per token, null where unknown]}'
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the report as one HTML page")] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="print the diagnosis as JSON")] = False,
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
    renderer = None if tokenizer is None or output is None else _renderer(tokenizer)
    found = _read_samples(samples, for_page=output is not None)
    compared = _compare(found, trainer, trainer_logprobs, plain=plain, dtype=dtype, device=device, quiet=as_json)
    if not compared.rows:
        raise InputError(_why_nothing(samples, compared))
    advantages = _advantages(compared)
    is_shown = advantages is not None or "advantages" not in PRESETS[correction].needs
    whole, steps = _diagnose(compared, PRESETS[correction] if is_shown else None, advantages)
    verdict, alarm = _verdict(whole, compared, max_k3)
    facts = {
        "samples": f"{len(compared.rows):,} of {len(compared.samples):,} in {samples.name}",
        "trained tokens": f"{compared.tokens:,} of {compared.trained_tokens:,}",
        "trainer": trainer or str(trainer_logprobs),
        "correction shown": correction if is_shown else f"none: {correction} needs a reward for every sample",
    }
    if trainer is not None:
        facts["scored"] = f"{'the model’s own forward pass' if plain else 'exact operators'}, {dtype}, {device}"
    if left_out := len(compared.samples) - len(compared.rows) - len(compared.refused):
        facts["left out"] = (
            f"{count_of(left_out, 'sample')} without trained tokens or without the trainer's log-probabilities"
        )
    if compared.refused:
        facts["not scored"] = f"{count_of(len(compared.refused), 'sample')}; the first: {compared.refused[0]}"
    if output is not None:
        from tokentrue.cli.inspect.diagnose_report import diagnosis_report, write_diagnosis

        report = diagnosis_report(whole, steps, verdict=verdict, ok=not alarm, facts=facts)
        scores = {row.name: row.scores for row in compared.rows}
        write_diagnosis(output, report, whole, samples=compared.samples, trainer=scores, renderer=renderer)
    if as_json:
        head: JsonObject = {"verdict": verdict, "ok": not alarm, "facts": facts, "compared": compared.to_json()}
        worst = [asdict(row) for row in whole.worst]
        metrics = {key: value if _is_measured(whole, key) else None for key, value in whole.metrics.items()}
        print(json.dumps({**head, "metrics": metrics, "worst": worst}, indent=1))
    else:
        _show(whole, verdict, facts.get("not scored"), output)
    return 1 if alarm else 0


def _why_nothing(samples: Path, compared: Comparison) -> str:
    if compared.refused:
        return f"{samples}: the trainer cannot score any sample as it was sampled; the first: {compared.refused[0]}"
    return f"{samples}: no sample has trained tokens with log-probabilities of both sides"


def _read_samples(path: Path, *, for_page: bool) -> list[Sample]:
    """`for_page`: names that the report's page cannot hold are refused now, not after minutes of scoring."""
    from tokentrue.samples import read_samples

    found = list(read_samples(path))
    if for_page:
        from tokentrue.viewer.page_json import check_names

        for sample in found:
            check_names(sample)
    return found


def _compare(
    found: Sequence[Sample],
    trainer: str | None,
    logprobs: Path | None,
    *,
    plain: bool,
    dtype: str,
    device: str,
    quiet: bool,
) -> Comparison:
    from tokentrue.app.training.sample_files import require_samples_of
    from tokentrue.samples.trainer_logprobs import TrainerLogprobs, read_trainer_logprobs

    given = {} if logprobs is None else read_trainer_logprobs(logprobs)
    scorer = None if trainer is None else _scorer(trainer, plain=plain, dtype=dtype, device=device)
    if trainer is not None:
        require_samples_of(found, trainer)
    rows: list[Row] = []
    refused: list[str] = []
    with _progress(len(found), quiet) as advance:
        for sample in found:
            scores, tops = given.get(sample.sample_id), None
            if scorer is not None and any(sample.loss_mask):
                try:
                    values, tops = scorer(sample)
                    scores = TrainerLogprobs(logprobs=values)
                except TokenContractError as error:
                    refused.append(str(error))
            row = None if scores is None else _row(sample, scores, tops)
            if row is not None:
                rows.append(row)
            advance()
    trained = sum(sum(map(bool, sample.loss_mask)) for sample in found)
    return Comparison(rows=tuple(rows), samples=tuple(found), trained_tokens=trained, refused=tuple(refused))


def _row(sample: Sample, scores: TrainerLogprobs, tops: Sequence[int] | None) -> Row | None:
    scores.check(sample)
    trainer = scores.logprobs
    chosen = [
        i
        for i, mask in enumerate(sample.loss_mask)
        if mask and sample.rollout_logprobs[i] is not None and trainer[i] is not None
    ]
    if not chosen:
        return None
    for side, values in (("rollout's", sample.rollout_logprobs), ("trainer's", trainer)):
        _require_finite(sample, side, values, chosen)
    kind = {
        i: f"turn {span.turn}" if span.turn < 8 else "turn 8+"
        for span in sample.spans
        for i in range(span.start, span.end)
    }
    versions = [
        span.policy_version for span in sample.spans if span.kind == "sampled" and span.policy_version is not None
    ]
    rollout = tuple(float(sample.rollout_logprobs[i] or 0.0) for i in chosen)
    flips = None
    if tops is not None:  # above one half the sampled token is the rollout's argmax, whatever the rest
        flips = tuple(rollout[n] > math.log(0.5) and tops[i] != sample.token_ids[i] for n, i in enumerate(chosen))
    return Row(
        name=sample.sample_id,
        step=str(sample.metadata.get("step", max(versions, default=0))),
        token_ids=tuple(sample.token_ids[i] for i in chosen),
        kinds=tuple(kind.get(i, "sampled") for i in chosen),
        rollout=rollout,
        trainer=tuple(float(trainer[i] or 0.0) for i in chosen),
        flips=flips,
        sample=sample,
        scores=scores,
    )


def _require_finite(sample: Sample, side: str, values: Sequence[float | None], chosen: Sequence[int]) -> None:
    for index in chosen:
        value = values[index]
        if value is not None and not math.isfinite(value):
            cure = (
                "check the weights and --dtype"
                if side == "trainer's"
                else "`tokentrue audit` lists every such sample of the file"
            )
            raise InputError(
                f"sample {sample.sample_id}: the {side} log-probability of token {index} is {value}; {cure}"
            )


def _scorer(
    trainer: str, *, plain: bool, dtype: str, device: str
) -> Callable[[Sample], tuple[list[float | None], list[int] | None]]:
    """The log-probability of each token given those before it, as `tokentrue train` computes it; the first token has
    none.

    At the temperature that each turn was sampled at, over the ids that its filters kept. Raises TokenContractError for
    a sample whose distribution cannot be computed again (`why_not_scorable`).
    """
    import torch
    from transformers.utils import logging

    from tokentrue.hub import load_causal_model

    logging.disable_progress_bar()  # ours is enough
    with name_option("--trainer"):
        model = load_causal_model(trainer, dtype=dtype)
    model.to(device).eval()
    tops: list[Tensor] = []

    def record_tops(_module: object, _given: object, out: Any) -> None:
        tops.append(out.logits[0, :-1].argmax(-1))

    if plain:
        model.register_forward_hook(record_tops)

    from tokentrue.samples.recorded_turns import scoring_temperatures
    from tokentrue.train.data.routing_replay import kept_rows
    from tokentrue.train.update.scoring import ExactScorer, PlainScorer

    score = PlainScorer() if plain else ExactScorer()

    def score_sample(sample: Sample) -> tuple[list[float | None], list[int] | None]:
        ids, temperatures = torch.tensor(list(sample.token_ids)), torch.tensor(scoring_temperatures(sample))
        tops.clear()
        with torch.no_grad():
            found: Any = score(model, [ids], [temperatures], kept=[kept_rows(sample)]).logprobs[0]
        best: Any = tops[0] if tops else None
        return [None, *found[1:].tolist()], None if best is None else [-1, *best.tolist()]

    return score_sample


def _advantages(compared: Comparison) -> list[float] | None:
    """Those that the viewer shows; None where a row has none."""
    from tokentrue.viewer.advantages import advantages_of

    known = advantages_of(compared.samples)
    return [known[row.name] for row in compared.rows] if all(row.name in known for row in compared.rows) else None


def _diagnose(
    compared: Comparison, correction: Correction | None, advantages: list[float] | None
) -> tuple[Diagnosis, list[tuple[str, Diagnosis]]]:
    """The whole, and its steps in order."""
    rows = compared.rows
    names = sorted({kind for row in rows for kind in row.kinds})
    labels = list(dict.fromkeys(sorted((row.step for row in rows), key=_natural)))
    parts: dict[str, list[Diagnosis]] = {label: [] for label in labels}
    for start, stop in _batches(rows):
        for label in labels:
            chosen = [i for i in range(start, stop) if rows[i].step == label]
            if chosen:
                given = None if advantages is None else [advantages[i] for i in chosen]
                parts[label].append(_diagnose_rows([rows[i] for i in chosen], given, names, correction))
    steps = [(label, found[0].merge(*found[1:])) for label, found in parts.items() if found]
    return steps[0][1].merge(*(diagnosis for _, diagnosis in steps[1:])), steps


def _diagnose_rows(
    rows: Sequence[Row], advantages: list[float] | None, names: list[str], correction: Correction | None
) -> Diagnosis:
    import torch

    from tokentrue.mismatch import diagnose

    def tensors(values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        return [torch.tensor(value, dtype=dtype) for value in values]

    flips = None if any(row.flips is None for row in rows) else tensors([row.flips or () for row in rows], torch.long)
    return diagnose(
        tensors([row.trainer for row in rows]),
        tensors([row.rollout for row in rows]),
        logprobs=tensors([row.trainer for row in rows])
        if correction is not None and correction.needs_current
        else None,
        advantages=None if advantages is None else torch.tensor(advantages, dtype=torch.float64),
        correction=correction,
        kinds=tensors([[names.index(kind) for kind in row.kinds] for row in rows], torch.long),
        kind_names=names,
        trainer_top_ids=flips,
        rollout_top_ids=None if flips is None else [torch.zeros_like(row) for row in flips],
        row_names=[row.name for row in rows],
    )


def _batches(rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    start = tokens = 0
    for index, row in enumerate(rows):
        if tokens and tokens + len(row.rollout) > BATCH_TOKENS:
            yield start, index
            start, tokens = index, 0
        tokens += len(row.rollout)
    yield start, len(rows)


def _natural(label: str) -> tuple[int, float, str]:
    return (0, float(label), "") if label.lstrip("-").isdigit() else (1, 0.0, label)


def _verdict(whole: Diagnosis, compared: Comparison, max_k3: float) -> tuple[str, bool]:
    text, alarm = _verdict_of_tokens(whole, max_k3)
    return (text if compared.is_whole else f"{text}; {compared.describe()}"), alarm


def _verdict_of_tokens(whole: Diagnosis, max_k3: float) -> tuple[str, bool]:
    tokens, k3, most = int(whole["tokens"]), whole["corr/k3"], max(whole["delta/max"], -whole["delta/min"])
    if most == 0.0:
        return f"exact: all {tokens:,} log-probabilities are equal", False
    text = (
        f"K3 {k3:.3g} per token, mean |δ| {whole['delta/abs_mean']:.3g}, largest |δ| {most:.3g} over {tokens:,} tokens"
    )
    if k3 > max_k3:
        return (
            f"{text}: above {max_k3:g}, look at the template, the tokenizer and the weights before any correction",
            True,
        )
    return text, False


def _renderer(model: str) -> Any:
    from tokentrue.renderers import load_renderer

    with name_option("--tokenizer"):
        return load_renderer(model)


def _show(whole: Diagnosis, verdict: str, not_scored: str | None, output: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="training-inference mismatch")
    table.add_column("metric")
    table.add_column("value", justify="right")
    keys = (
        "tokens", "rows", "delta/mean", "delta/abs_mean", "delta/min", "delta/max", "delta/quantile/abs_p99", "corr/k1", "corr/k3",
        "ppl/trainer", "ppl/rollout", "chi2/token", "ratio/raw/ess", "tail/raw/above_2", "tail/applied/above_2",
        "fraction/rejected", "flips",
        "contribution/rollout/positive/mean", "contribution/rollout/positive/skew", "contribution/rollout/negative/mean",
        "contribution/rollout/negative/skew",
    )  # fmt: skip
    for key in keys:
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
    """False for argmax flips where no token's argmax is known: the exact operators and a file of log-probabilities give
    none."""
    from tokentrue.mismatch.metrics import Mean

    statistic = whole.metrics.statistics.get(key) if key == "flips" else None
    return not (isinstance(statistic, Mean) and statistic.count == 0)


@contextmanager
def _progress(total: int, quiet: bool) -> Generator[Callable[[], None], None, None]:
    from rich.progress import Progress

    with Progress(transient=True, disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task("samples", total=total)
        yield lambda: progress.advance(task)
