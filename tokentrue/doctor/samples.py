"""From samples alone: recorded log-probabilities against the reference, by position, turn and version.

Each token is scored at its turn's temperature and over the ids that its filters kept, where recorded.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from tokentrue.doctor.exam import Examination
from tokentrue.doctor.findings import Finding, cannot_tell, fault, ok
from tokentrue.doctor.naming import Evidence, grows_with_position
from tokentrue.doctor.reference import Observation
from tokentrue.doctor.weights import judge_causes
from tokentrue.samples.recorded_turns import read_turns, scoring_temperatures, why_not_scorable
from tokentrue.samples.shape import spread_spans
from tokentrue.types import Sample, Span

MOST_TOKENS = 3000
STALE_FACTOR = 5.0


async def probe_samples(exam: Examination, samples: Sequence[Sample]) -> list[Finding]:
    name = "samples: recorded log-probabilities against the model directory"
    judged = [(sample, why_not_comparable(sample)) for sample in samples]
    refused = [why for _, why in judged if why]
    pairs = [(sample, seen) for sample, why in judged if not why and (seen := observe(sample)) is not None]
    fitting = [pair for pair in pairs if len(pair[1].token_ids) <= exam.reference.max_positions]
    totals = list(accumulate(len(seen.token_ids) for _, seen in fitting))
    chosen = fitting[: max(1, bisect_right(totals, MOST_TOKENS))]
    left_out: list[Finding] = []
    if refused:
        why = f"{len(refused)} of {len(samples)} samples; the first: {refused[0]}"
        left_out.append(cannot_tell(why, probe="samples: not compared"))
    if not chosen:
        return left_out or [cannot_tell("no sample holds log-probabilities of sampled tokens", probe=name)]
    seen = Evidence(exam.reference, [observation for _, observation in chosen], exam.dtype)
    groups = {
        "position": [_bucket(position) for _, one in chosen for position in one.positions],
        "turn": _keys(chosen, lambda span: str(span.turn)),
        "policy version": _keys(chosen, _version),
    }
    means = {label: mean_by_key(seen.e, keys) for label, keys in groups.items()}
    verdict = judge_version(exam, seen, chosen, means["policy version"]) or judge_causes(exam, seen)
    rows = [
        ok(", ".join(f"{key}: {mean:.2g}" for key, mean in found.items()), probe=f"samples: mean |δ| by {label}")
        for label, found in means.items()
        if len(found) > 1
    ]
    growth = f"last third of positions ÷ first third: {grows_with_position(seen.e, seen.position):.2f}"
    rows.append(ok(growth, probe="samples: growth of |δ| with the position"))
    return [replace(verdict, probe=name), *left_out, *rows]


def observe(sample: Sample) -> Observation | None:
    positions = tuple(i for i, value in enumerate(sample.rollout_logprobs) if value is not None and i > 0)
    if not positions:
        return None
    temperatures, mask = scoring_temperatures(sample), sample.sampling_mask
    return Observation(
        token_ids=tuple(sample.token_ids),
        positions=positions,
        logprobs=tuple(float(value) for i in positions if (value := sample.rollout_logprobs[i]) is not None),
        prompt_tokens=positions[0],
        temperatures=tuple(temperatures[i] for i in positions),
        kept=() if mask is None else tuple(tuple(mask.row(i).tolist()) for i in positions),
    )


def why_not_comparable(sample: Sample) -> str:
    """Empty where the distribution of the draws can be computed again."""
    for number, turn in enumerate(read_turns(sample)):
        if why := why_not_scorable(sample, turn):
            return f"sample {sample.sample_id}, turn {number}: {why}"
    return ""


def judge_version(
    exam: Examination, seen: Evidence, chosen: Sequence[tuple[Sample, Observation]], means: dict[str, float]
) -> Finding | None:
    """The difference is that of one policy version: its samples were drawn with other weights, or otherwise."""
    if len(means) < 2:
        return None
    limit, worst = seen.mean_limit, max(means, key=lambda version: means[version])
    rest = max(mean for version, mean in means.items() if version != worst)
    if means[worst] <= limit or means[worst] < STALE_FACTOR * max(rest, limit / STALE_FACTOR):
        return None
    own = [one for pair in chosen if {*_keys([pair], _version)} == {worst} for one in pair[1:]]
    drawn = judge_causes(exam, Evidence(exam.reference, own, exam.dtype), is_output=True) if own else None
    figure = f"version {worst}: mean |δ| {means[worst]:.2g}; all others at most {rest:.2g}"
    if drawn is not None and drawn.fault not in ("", "unknown"):
        return replace(drawn, figure=figure)
    detail = f"samples of version {worst} were drawn with other weights: no setting of the sampler explains them"
    return fault("stale_weights", figure, confidence="medium", detail=detail)


def _version(span: Span) -> str:
    return str(span.policy_version)


def _keys(chosen: Sequence[tuple[Sample, Observation]], key: Callable[[Span], str]) -> list[str]:
    found: list[str] = []
    for sample, seen in chosen:
        by_token = spread_spans(sample, key, "?")
        found += [by_token[position] for position in seen.positions]
    return found


def _bucket(position: int) -> str:
    return next((f"<{edge}" for edge in (64, 256, 1024, 4096) if position < edge), ">=4096")


def mean_by_key(e: Tensor, keys: Sequence[str]) -> dict[str, float]:
    return {key: float(e[torch.tensor([k == key for k in keys])].abs().mean()) for key in dict.fromkeys(keys)}
