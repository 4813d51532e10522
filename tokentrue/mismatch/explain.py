"""`Correction.explain()`: the formula in words, and what it costs."""

from __future__ import annotations

from tokentrue.mismatch.config import Correction, Reject, Signal, Weights

RATIO: dict[Signal, str] = {"corr": "π_old/π_rollout", "ppo_train": "π_current/π_old", "ppo_rollout": "π_current/π_rollout"}


def explain(correction: Correction) -> str:
    base = "π_rollout (bypass)" if correction.denominator == "rollout" else "π_old, recomputed by the trainer"
    lines = [f"surrogate: {correction.surrogate}, ratio over {base}"]
    lines.append("weights: none" if correction.weights is None else "weights: " + _weights(correction.weights))
    lines += [f"keep {_rule(rule)}" + (" (else weight 0, still counted)" if rule.action == "mask" else "") for rule in correction.reject]
    if correction.veto is not None:
        lines.append(f"drop rows with a token below probability {correction.veto.below:g} under the {correction.veto.of} policy")
    if correction.outlier is not None:
        bounds = _between("r", correction.outlier.lower, correction.outlier.upper)
        lines.append(f"drop rows unless every token has {bounds}, r = {RATIO[correction.outlier.signal]}")
    if correction.off_policy_mask is not None:
        mask = correction.off_policy_mask
        lines.append(f"drop negative advantages in rows with mean -log {RATIO[mask.signal]} > {mask.threshold:g}")
    if correction.staleness is not None:
        lines.append(f"drop {correction.staleness.level}s sampled more than {correction.staleness.limit} versions ago")
    lines.append(f"the loss divides by the {correction.loss_counts} counts")
    needs_old = correction.denominator == "trainer" or "corr" in correction.signals or "ppo_train" in correction.signals
    lines.append("cost: one extra forward pass per step for π_old" if needs_old else "cost: no extra forward pass")
    return "\n".join([*lines, *(f"note: {note}" for note in correction.notes)])


def _weights(weights: Weights) -> str:
    r = RATIO[weights.signal]
    what = {"token": r, "sequence": f"Π_t {r}", "geometric": f"(Π_t {r})^(1/T)"}[weights.level]
    how = {
        "truncate": f"min({what}, {weights.upper})",
        "clip": f"clip({what}, {weights.lower}, {weights.upper})",
        "mask": f"{what} where {_between('it', weights.lower, weights.upper)}, else 0",
        "raw": what,
    }[weights.mode]
    if weights.normalise is None:
        return how
    return f"{how}, over the mean of {weights.normalise.over} {weights.normalise.level}s of the {weights.normalise.scope}"


def _rule(rule: Reject) -> str:
    ratio = RATIO[rule.signal] if not rule.inverse else f"1/({RATIO[rule.signal]})"
    name = ratio if rule.estimator == "ratio" else f"{rule.estimator}({ratio})"
    shape = {
        "token": ("tokens", name),
        "seq_sum": ("rows", f"Π_t {name}" if rule.estimator == "ratio" else f"Σ_t {name}"),
        "seq_mean": ("rows", f"mean_t {name}"),
        "seq_max": ("rows", f"max_t {name}"),
        "geometric": ("rows", f"(Π_t {name})^(1/T)"),
    }[rule.aggregate]
    return f"{shape[0]} with {_between(shape[1], rule.lower, rule.upper)}"


def _between(name: str, lower: float | None, upper: float | None) -> str:
    left = "" if lower is None else f"{lower:g} <= "
    right = "" if upper is None else f" <= {upper:g}"
    return f"{left}{name}{right}"
