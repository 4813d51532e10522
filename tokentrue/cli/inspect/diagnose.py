"""tokentrue diagnose SAMPLES: how far the rollout's log-probabilities are from the trainer's, where, and what a correction would do."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tokentrue.errors import ConfigError, FileFormatError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from tokentrue.mismatch import Diagnosis
    from tokentrue.types import Sample

BATCH_TOKENS = 8192
ALARM_K3 = 0.015


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The trained tokens of one sample, with the trainer's numbers for them."""

    name: str
    step: str
    group: str | None
    reward: float | None
    token_ids: tuple[int, ...]
    kinds: tuple[str, ...]
    rollout: tuple[float, ...]
    trainer: tuple[float, ...]
    flips: tuple[bool, ...] | None  # the trainer would have chosen another token where the rollout was sure of this one
    sample: Sample
    columns: Sequence[float | None]  # the trainer's log-probabilities, one for each token of the sample


def command(
    samples: Annotated[Path, typer.Argument(help="exported samples, in any of tokentrue's formats")],
    trainer: Annotated[str | None, typer.Option("--trainer", help="the trainer's model, a directory, scored here")] = None,
    trainer_logprobs: Annotated[
        Path | None, typer.Option("--trainer-logprobs", help='JSON lines {"sample_id": …, "logprobs": [per token, null where unknown]}')
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the report as one HTML page")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="with --trainer: the model's own forward pass, not the exact operators")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="with --trainer: float32 or bfloat16")] = "float32",
    device: Annotated[str, typer.Option("--device", help="with --trainer: cpu or cuda")] = "cpu",
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="a model directory, to show tokens as text in the page")] = None,
    correction: Annotated[str, typer.Option("--correction", help="preset whose effect is shown")] = "decoupled_token_is",
    max_k3: Annotated[float, typer.Option("--max-k3", help="exit 1 where the mean K3 per token is above this")] = ALARM_K3,
    as_json: Annotated[bool, typer.Option("--json", help="print the diagnosis as JSON")] = False,
) -> int:
    """Mismatch report: δ, K1/K3, ratio tails, ESS, argmax flips, contribution skew; a table, and plots with -o."""
    from tokentrue.mismatch import PRESETS

    if correction not in PRESETS:
        raise ConfigError(f"--correction: no preset {correction!r}; choose one of {', '.join(PRESETS)}")
    if (trainer is None) == (trainer_logprobs is None):
        raise ConfigError("pass either --trainer MODEL or --trainer-logprobs FILE: the trainer's side of the comparison")
    rows, left_out = _load(samples, trainer, trainer_logprobs, plain=plain, dtype=dtype, device=device, quiet=as_json)
    if not rows:
        raise InputError(f"{samples}: no sample has trained tokens with log-probabilities of both sides")
    whole, steps = _diagnose(rows, correction)
    verdict, alarm = _verdict(whole, max_k3)
    facts = {"samples": f"{len(rows)} of {samples.name}", "trainer": trainer or str(trainer_logprobs), "correction shown": correction}
    if trainer is not None:
        facts["scored"] = f"{'the model’s own forward pass' if plain else 'exact operators'}, {dtype}, {device}"
    if left_out:
        facts["left out"] = f"{left_out} samples without trained tokens or without the trainer's log-probabilities"
    if output is not None:
        from tokentrue.cli.inspect.diagnose_report import write_diagnosis

        compared = [(row.sample, row.columns) for row in rows]
        renderer = None if tokenizer is None else _renderer(tokenizer)
        write_diagnosis(output, whole, steps, verdict=verdict, ok=not alarm, facts=facts, samples=compared, renderer=renderer)
    if as_json:
        worst = [asdict(row) for row in whole.worst]
        print(json.dumps({"verdict": verdict, "ok": not alarm, "facts": facts, "metrics": dict(whole.metrics), "worst": worst}, indent=1))
    else:
        _show(whole, verdict, output)
    return 1 if alarm else 0


def _load(
    samples: Path, trainer: str | None, logprobs: Path | None, *, plain: bool, dtype: str, device: str, quiet: bool
) -> tuple[list[Row], int]:
    from tokentrue.app.training.sample_files import require_samples_of
    from tokentrue.samples import read_samples

    found = list(read_samples(samples))
    given = _read_logprobs(logprobs) if logprobs is not None else None
    scorer = None if trainer is None else _scorer(trainer, plain=plain, dtype=dtype, device=device)
    if trainer is not None:
        require_samples_of(found, trainer)
    rows: list[Row] = []
    with _progress(len(found), quiet) as advance:
        for sample in found:
            if scorer is not None:
                values, tops = scorer(sample)
            else:
                values, tops = (given or {}).get(sample.sample_id), None
            row = None if values is None else _row(sample, values, tops)
            if row is not None:
                rows.append(row)
            advance()
    return rows, len(found) - len(rows)


def _row(sample: Sample, trainer: Sequence[float | None], tops: Sequence[int] | None) -> Row | None:
    if len(trainer) != len(sample.token_ids):
        raise FileFormatError(f"sample {sample.sample_id}: {len(trainer)} trainer log-probabilities for {len(sample.token_ids)} tokens")
    chosen = [i for i, mask in enumerate(sample.loss_mask) if mask and sample.rollout_logprobs[i] is not None and trainer[i] is not None]
    if not chosen:
        return None
    kind = {i: f"turn {span.turn}" if span.turn < 8 else "turn 8+" for span in sample.spans for i in range(span.start, span.end)}
    versions = [span.policy_version for span in sample.spans if span.kind == "sampled" and span.policy_version is not None]
    rollout = tuple(float(sample.rollout_logprobs[i] or 0.0) for i in chosen)
    flips = None
    if tops is not None:  # above one half the sampled token is the rollout's argmax, whatever the rest
        flips = tuple(rollout[n] > math.log(0.5) and tops[i] != sample.token_ids[i] for n, i in enumerate(chosen))
    return Row(
        name=sample.sample_id,
        step=str(sample.metadata.get("step", max(versions, default=0))),
        group=sample.group,
        reward=sample.reward,
        token_ids=tuple(sample.token_ids[i] for i in chosen),
        kinds=tuple(kind.get(i, "sampled") for i in chosen),
        rollout=rollout,
        trainer=tuple(float(trainer[i] or 0.0) for i in chosen),
        flips=flips,
        sample=sample,
        columns=trainer,
    )


def _read_logprobs(path: Path) -> dict[str, list[float | None]]:
    """JSON lines, one sample each."""
    if not path.exists():
        raise FileFormatError(f"{path}: no such file")
    found: dict[str, list[float | None]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found[row["sample_id"]] = [None if value is None else float(value) for value in row["logprobs"]]
        except (ValueError, KeyError, TypeError) as error:
            raise FileFormatError(f'{path}:{number}: not a JSON object with "sample_id" and "logprobs" ({error})') from error
    return found


def _scorer(trainer: str, *, plain: bool, dtype: str, device: str) -> Callable[[Sample], tuple[list[float | None], list[int] | None]]:
    """The trainer's log-probability of each token given those before it; the first has none."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # ours is enough
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in kinds:
        raise ConfigError(f"--dtype: {dtype!r} is not one of {', '.join(kinds)}")
    if not Path(trainer).is_dir():
        raise ConfigError(f"--trainer: {trainer} is not a directory with a model")
    models: Any = AutoModelForCausalLM
    try:
        model: Any = models.from_pretrained(trainer, dtype=kinds[dtype])
    except (OSError, ValueError) as error:
        raise ConfigError(f"--trainer: cannot load {trainer}: {str(error).splitlines()[0]}") from error
    model.to(device).eval()

    def score_exactly(ids: Tensor, temperature: float) -> tuple[Tensor, None]:
        from tokentrue.numerics import score

        return score(model, ids, temperature=temperature)[0], None

    def score_plainly(ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1), logits.argmax(-1)

    def of(sample: Sample) -> tuple[list[float | None], list[int] | None]:
        ids = torch.tensor([list(sample.token_ids)], device=device)
        with torch.no_grad():
            values, tops = (score_plainly if plain else score_exactly)(ids, _temperature(sample))
        found: tuple[Any, Any] = values, tops
        return [None, *found[0].tolist()], None if tops is None else [-1, *found[1].tolist()]

    return of


def _temperature(sample: Sample) -> float:
    """What the sample was sampled at; all its turns must agree."""
    nodes = sample.metadata.get("tokentrue", {}).get("nodes", [])
    found = {float(node["temperature"]) for node in nodes if "temperature" in node and node.get("sampled")}
    if len(found) > 1:
        raise InputError(f"sample {sample.sample_id}: turns sampled at different temperatures {sorted(found)}; score them yourself")
    return next(iter(found), 1.0) or 1.0


def _diagnose(rows: Sequence[Row], correction: str) -> tuple[Diagnosis, list[tuple[str, Diagnosis]]]:
    """The whole, and its steps in order; advantages are the rewards' group-relative ones where every row has a reward."""
    import torch

    from tokentrue.mismatch import grpo_advantages

    advantages: list[float] | None = None
    if all(row.reward is not None for row in rows):
        rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
        groups = [row.group if row.group is not None else "all" for row in rows]
        found: Any = grpo_advantages(rewards, groups, std=False)
        advantages = cast("list[float]", found.tolist())
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


def _diagnose_rows(rows: Sequence[Row], advantages: list[float] | None, names: list[str], correction: str) -> Diagnosis:
    import torch

    from tokentrue.mismatch import PRESETS, diagnose

    def tensors(values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        return [torch.tensor(value, dtype=dtype) for value in values]

    flips = None if any(row.flips is None for row in rows) else tensors([row.flips or () for row in rows], torch.long)
    chosen = PRESETS[correction]
    return diagnose(
        tensors([row.trainer for row in rows]),
        tensors([row.rollout for row in rows]),
        logprobs=tensors([row.trainer for row in rows]) if chosen.needs_current else None,
        advantages=None if advantages is None else torch.tensor(advantages, dtype=torch.float64),
        correction=chosen if advantages is not None or chosen.off_policy_mask is None else None,
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


def _verdict(whole: Diagnosis, max_k3: float) -> tuple[str, bool]:
    tokens, k3, most = int(whole["tokens"]), whole["corr/k3"], max(whole["delta/max"], -whole["delta/min"])
    if most == 0.0:
        return f"exact: all {tokens:,} log-probabilities are equal", False
    text = f"K3 {k3:.3g} per token, mean |δ| {whole['delta/abs_mean']:.3g}, largest |δ| {most:.3g} over {tokens:,} tokens"
    if k3 > max_k3:
        return f"{text}: above {max_k3:g}, look at the template, the tokenizer and the weights before any correction", True
    return text, False


def _renderer(directory: str) -> Any:
    from tokentrue.renderers import load_renderer

    if not Path(directory).is_dir():
        raise ConfigError(f"--tokenizer: {directory} is not a directory with a tokenizer and a chat template")
    return load_renderer(directory)


def _show(whole: Diagnosis, verdict: str, output: Path | None) -> None:
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
            table.add_row(key, f"{whole[key]:.6g}")
    for row in whole.worst[:3]:
        table.add_row(f"worst: {row.row}", f"mean K3 {row.score:.3g}, max |δ| {row.max_abs_delta:.3g} at token {row.position}")
    console = Console()
    console.print(table)
    console.print(verdict, highlight=False)
    if output is not None:
        console.print(f"report: {output}", highlight=False)


@contextmanager
def _progress(total: int, quiet: bool) -> Generator[Callable[[], None], None, None]:
    from rich.progress import Progress

    with Progress(transient=True, disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task("samples", total=total)
        yield lambda: progress.advance(task)
