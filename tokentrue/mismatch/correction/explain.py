"""The parts of a correction in words."""

from __future__ import annotations

from tokentrue.mismatch.correction.rules import Reject, Signal, Weights

RATIO: dict[Signal, str] = {
    "corr": "π_old/π_rollout",
    "ppo_train": "π_current/π_old",
    "ppo_rollout": "π_current/π_rollout",
}


def weights_text(weights: Weights) -> str:
    r = RATIO[weights.signal]
    what = {"token": r, "sequence": f"Π_t {r}", "geometric": f"(Π_t {r})^(1/T)"}[weights.level]
    how = {
        "truncate": f"min({what}, {weights.upper})",
        "clip": f"clip({what}, {weights.lower}, {weights.upper})",
        "mask": f"{what} where {describe_interval('it', weights.lower, weights.upper)}, else 0",
        "raw": what,
    }[weights.mode]
    if weights.mix is not None:
        how = f"1 - α + α·{how}, α = {weights.mix if isinstance(weights.mix, int | float) else 'measured on the batch'}"
    if weights.normalise is None:
        return how
    return (
        f"{how}, over the mean of {weights.normalise.over} {weights.normalise.level}s of the {weights.normalise.scope}"
    )


def rule_text(rule: Reject) -> str:
    ratio = RATIO[rule.signal] if not rule.inverse else f"1/({RATIO[rule.signal]})"
    name = ratio if rule.estimator == "ratio" else f"{rule.estimator}({ratio})"
    shape = {
        "token": ("tokens", name),
        "seq_sum": ("rows", f"Π_t {name}" if rule.estimator == "ratio" else f"Σ_t {name}"),
        "seq_mean": ("rows", f"mean_t {name}"),
        "seq_max": ("rows", f"max_t {name}"),
        "geometric": ("rows", f"(Π_t {name})^(1/T)"),
    }[rule.aggregate]
    return f"{shape[0]} with {describe_interval(shape[1], rule.lower, rule.upper)}"


def describe_interval(name: str, lower: float | None, upper: float | None) -> str:
    left = "" if lower is None else f"{lower:g} <= "
    right = "" if upper is None else f" <= {upper:g}"
    return f"{left}{name}{right}"
