"""Compares two providers on one prompt: a verdict to read, not a tolerance to trust."""

from tokentrue.errors import InputError
from tokentrue.protocols import Provider
from tokentrue.records import record
from tokentrue.types import Completion, Ids, Sampling


@record
class Closeness:
    """`first_difference` is the first differing token, or None."""

    close: bool
    exact: bool
    compared: int
    max_difference: float
    mean_difference: float
    first_difference: int | None
    verdict: str


async def check_logprobs_close(
    first: Provider | Completion,
    second: Provider | Completion,
    prompt_ids: Ids = (),
    *,
    sampling: Sampling | None = None,
    tolerance: float = 1e-3,
) -> Closeness:
    """Compares log-probabilities up to the first differing token; greedy unless `sampling` is set."""
    asked = sampling if sampling is not None else Sampling(temperature=0.0, max_tokens=32)
    a = first if isinstance(first, Completion) else await first.generate(prompt_ids, asked)
    b = second if isinstance(second, Completion) else await second.generate(prompt_ids, asked)
    return compare_completions(a, b, tolerance=tolerance)


def compare_completions(first: Completion, second: Completion, *, tolerance: float) -> Closeness:
    ids, other_ids = first.token_ids, second.token_ids
    if not ids or not other_ids:
        raise InputError("nothing to compare: one of the completions is empty")
    common = next(
        (i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b), min(len(ids), len(other_ids))
    )
    apart = None if common == len(ids) == len(other_ids) else common
    differences = [abs(a - b) for a, b in zip(first.logprobs[:common], second.logprobs[:common], strict=True)]
    worst = max(differences, default=0.0)
    mean = sum(differences) / len(differences) if differences else 0.0
    close = common > 0 and worst <= tolerance
    exact = apart is None and worst == 0.0
    if common == 0:
        verdict = f"different from the first token on: {ids[0]} and {other_ids[0]}"
    else:
        where = f" up to token {apart}, where the tokens differ" if apart is not None else ""
        grade = "bit-identical" if worst == 0.0 else f"max |δ| {worst:.3g}, mean {mean:.3g} (tolerance {tolerance:g})"
        verdict = f"{common} tokens compared{where}: {grade}"
    return Closeness(
        close=close,
        exact=exact,
        compared=common,
        max_difference=worst,
        mean_difference=mean,
        first_difference=apart,
        verdict=verdict,
    )
