"""Breaks the code on purpose, one place at a time, and demands that closed-form checks notice: the tests bite.

Each mutant is a copy of the room with one line changed, imported in place of the real one for the length of a probe.
"""

from __future__ import annotations

import importlib
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tokentrue
from tests.mismatch.batches import make

ROOM = Path(tokentrue.__file__).parent / "mismatch"
D = torch.float64


@contextmanager
def room(folder: Path | None) -> Iterator[Any]:
    """The mismatch room from `folder`, or the real one; sys.modules is put back afterwards."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("tokentrue.mismatch")}
    for name in before:
        del sys.modules[name]
    path = list(tokentrue.__path__)
    real = tokentrue.__dict__.get("mismatch")
    if folder is not None:
        tokentrue.__path__.insert(0, str(folder))  # type: ignore[attr-defined]
    importlib.invalidate_caches()
    try:
        yield importlib.import_module("tokentrue.mismatch")
    finally:
        tokentrue.__path__[:] = path  # type: ignore[index]
        for name in [name for name in sys.modules if name.startswith("tokentrue.mismatch")]:
            del sys.modules[name]
        sys.modules.update(before)
        if isinstance(real, ModuleType):
            tokentrue.mismatch = real  # type: ignore[attr-defined]


def near(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(torch.as_tensor(a, dtype=D), torch.as_tensor(b, dtype=D), atol=tolerance, rtol=tolerance)


def probe(m: Any) -> None:
    """Expectations written out by hand or by plain torch on the flat tokens; nothing here is taken from the code under
    test."""
    delta = torch.tensor([[0.7, -0.4, 0.1, 5.0], [-0.2, 0.3, 99.0, 99.0], [-3.0, 99.0, 99.0, 99.0]], dtype=D)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    zeros = torch.where(mask, 0.0, torch.nan).to(D)
    flat = delta[mask]

    def weights(**options: Any) -> torch.Tensor:
        return m.correct(delta, zeros, mask, m.Correction(weights=m.Weights(**options))).weights

    def kept(**options: Any) -> list[list[bool]]:
        return m.correct(delta, zeros, mask, m.Correction(reject=(m.Reject(**options),))).mask.tolist()

    near(weights(upper=2.0)[mask], flat.exp().clamp(max=2.0))
    near(weights(mode="clip", lower=0.5, upper=2.0)[mask], flat.exp().clamp(0.5, 2.0))
    near(
        weights(mode="mask", lower=0.5, upper=2.0)[mask],
        torch.where((flat.exp() >= 0.5) & (flat.exp() <= 2.0), flat.exp(), 0.0),
    )
    near(weights(level="sequence", mode="raw")[:, 0], torch.tensor([5.4, 0.1, -3.0], dtype=D).exp())
    near(weights(level="geometric", mode="raw")[:, 0], torch.tensor([1.35, 0.05, -3.0], dtype=D).exp())
    assert not weights(upper=2.0)[~mask].any()
    inner = [True, True, False, False]
    assert kept(estimator="ratio", aggregate="token", lower=0.5, upper=2.1) == [
        [True, True, True, False],
        inner,
        [False] * 4,
    ]
    assert kept(estimator="k1", aggregate="seq_sum", upper=0.0) == [[True] * 4, [True, True, False, False], [False] * 4]
    assert kept(estimator="k1", aggregate="seq_sum", upper=0.0, inverse=True) == [
        [False] * 4,
        [False] * 4,
        [True, False, False, False],
    ]
    assert kept(estimator="k2", aggregate="seq_max", upper=0.06) == [
        [False] * 4,
        [True, True, False, False],
        [False] * 4,
    ]
    assert kept(estimator="ratio", aggregate="geometric", lower=0.9, upper=1.1) == [
        [False] * 4,
        [True, True, False, False],
        [False] * 4,
    ]
    assert kept(estimator="k3", aggregate="seq_mean", upper=2.1) == [
        [False] * 4,
        [True, True, False, False],
        [True, False, False, False],
    ]

    found = m.diagnose(delta, zeros, mask, advantages=torch.tensor([1.0, -1.0, 0.0], dtype=D))
    near(found["corr/k1"], -flat.mean())
    near(found["corr/k2"], (flat**2).mean() / 2)
    near(found["corr/k3"], (flat.exp() - 1 - flat).mean())
    near(m.diagnose(delta, zeros, mask, logprobs=delta)["ppo_rollout/k3"], (flat.exp() - 1 - flat).mean())
    small = m.diagnose(torch.full((1, 3), 9e-4, dtype=D), torch.zeros(1, 3, dtype=D))
    near(small["corr/k3"] / (0.5 * 9e-4**2 + 9e-4**3 / 6 + 9e-4**4 / 24), 1.0, 1e-9)
    near(small["chi2/token"] / math.expm1(2 * 9e-4), 1.0)
    near(found["chi2/token"], (2 * flat).exp().mean() - 1)
    near(found["chi2/sequence"], (2 * torch.tensor([5.4, 0.1, -3.0], dtype=D)).exp().mean() - 1)
    near(found["ratio/raw/ess"], flat.exp().sum() ** 2 / (7 * (2 * flat).exp().sum()))
    near(found["ppl/ratio"], (-torch.tensor([1.35, 0.05, -3.0], dtype=D)).exp().mean())
    near(found["contribution/rollout/positive/mean"], -(delta[0].exp() - 1).mean())
    near(found["contribution/rollout/negative/mean"], (delta[1, :2].exp() - 1).mean())
    assert found["tail/raw/above_2"] == 2 / 7 and found["tail/raw/below_1/2"] == 1 / 7
    assert found.worst[0].row == "row 0" and found.worst[0].position == 3
    near(m.diagnose(torch.tensor([[1e-5]], dtype=D), torch.zeros(1, 1, dtype=D))["corr/k3"] / 0.5e-10, 1.0, 1e-5)
    long = m.diagnose(torch.full((2, 256), 0.5, dtype=D), torch.zeros(2, 256, dtype=D))  # long rows
    assert long["tokens"] == 512 and long.worst[0].tokens == 256
    rule = m.Reject(estimator="k3", aggregate="seq_mean", upper=1.0)
    fractions = m.correct(delta, zeros, mask, m.Correction(reject=(rule,))).metrics
    assert (
        fractions["fraction/corr_seq_mean_k3_tokens"] == 5 / 7 and fractions["fraction/corr_seq_mean_k3_rows"] == 2 / 3
    )
    parts = ((slice(0, 1), ["row 0"]), (slice(1, 3), ["row 1", "row 2"]))
    halves = [m.diagnose(delta[s], zeros[s], mask[s], row_names=n) for s, n in parts]
    assert dict(halves[0].merge(halves[1]).metrics) == pytest.approx(dict(m.diagnose(delta, zeros, mask).metrics))

    _probe_losses(m)
    _probe_newer(m)
    near(m.grpo_advantages(torch.tensor([3.0, 1.0]), [0, 0], eps=0.0), [math.sqrt(0.5), -math.sqrt(0.5)], 1e-6)
    near(m.rloo_advantages(torch.tensor([3.0, 1.0, 2.0]), [0, 0, 0]), [1.5, -1.5, 0.0], 1e-6)


def _probe_losses(m: Any) -> None:
    ratio, a = torch.tensor([[0.5, 1.0, 1.5, 4.0]], dtype=D), torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=D)
    old = torch.full_like(ratio, -2.0)
    current = (old + ratio.log()).requires_grad_()

    def loss(**options: Any) -> tuple[float, list[float]]:
        value, _ = m.policy_loss(current, old, old, a, None, m.LossConfig(**options))
        (grad,) = torch.autograd.grad(value, current)
        return float(value.detach()), grad[0].tolist()

    near(loss()[0], (-0.5 + 1.0 - 1.2 + 4.0) / 4)
    near(loss()[1], [-0.125, 0.25, 0.0, 1.0])
    near(loss(dual_clip=3.0)[0], (-0.5 + 1.0 - 1.2 + 3.0) / 4)
    near(loss(surrogate="reinforce")[1], [-0.25, 0.25, -0.25, 0.25])
    near(loss(surrogate="cispo", clip_low=None, clip_high=1.0)[1], [-0.125, 0.25, -0.375, 0.5])
    mean = float(ratio.log().mean().exp())
    near(loss(surrogate="gspo", clip_low=0.9, clip_high=0.9)[1], [-mean / 4, mean / 4, -mean / 4, mean / 4])
    near(loss(surrogate="dppo_tv", clip_low=0.05, clip_high=0.05)[1], [-0.125, 0.25, 0.0, 1.0])
    near(loss(aggregate="fixed_length", fixed_length=8)[0], (-0.5 + 1.0 - 1.2 + 4.0) / 8)
    dropped = m.Correction(reject=(m.Reject(estimator="k3", aggregate="token", upper=0.5),))
    far = old - torch.tensor([[0.0, 3.0, 0.0, 0.0]], dtype=D)
    for counts, by in (("original", 4), ("kept", 3)):
        correction = m.Correction(reject=dropped.reject, loss_counts=counts)
        value, _ = m.policy_loss(current, old, far, a, None, correction)
        near(float(value.detach()), (-0.5 - 1.2 + 4.0) / by)
    batch = make(3)
    penalised, _ = m.policy_loss(
        batch.current,
        batch.trainer,
        None,
        batch.advantages * 0,
        batch.mask,
        m.LossConfig(penalty=m.Penalty(coefficient=2.0)),
        reference_logprobs=batch.trainer,
    )
    x = (batch.trainer - batch.current)[batch.mask]
    near(penalised, 2 * (x.exp() - 1 - x).mean())
    one = torch.tensor([[-1.0]], dtype=D, requires_grad=True)
    with_penalty = m.LossConfig(surrogate="reinforce", penalty=m.Penalty(coefficient=1.0))
    for x in (0.5, 0.005):
        reference = torch.tensor([[x - 1.0]], dtype=D)
        value, _ = m.policy_loss(one, None, None, torch.zeros(1, 1), None, with_penalty, reference_logprobs=reference)
        near(torch.autograd.grad(value, one)[0], [[1 - math.exp(x)]])
    # Weights of current ÷ rollout hold the current policy, and are constants all the same: the gradient is -w·A/n and
    # no more.
    weighed = m.Correction(
        denominator="rollout", surrogate="reinforce", weights=m.Weights(upper=3.0, signal="ppo_rollout")
    )
    value, _ = m.policy_loss(current, old, old, a, None, weighed)
    near(torch.autograd.grad(value, current)[0][0], [-0.125, 0.25, -0.375, 0.75])


def _probe_newer(m: Any) -> None:
    delta = torch.tensor([[0.1, 0.5, 0.5, -0.9]], dtype=D)
    zeros, a = torch.zeros_like(delta), torch.tensor([[1.0, 1.0, 1.0, -1.0]], dtype=D)
    rule = m.SecondMoment(threshold=0.15, signal="corr")
    assert m.correct(delta, zeros, None, m.Correction(second_moment=rule), advantages=a).mask.tolist() == [
        [True, False, False, False]
    ]
    _probe_centering(m)
    loss, _ = m.policy_loss(delta, zeros, None, a, None, m.loss_named("sapo", aggregate="token_sum"))
    tau = torch.where(a > 0, 1.0, 1.05)
    near(loss, -(a * torch.sigmoid(tau * (delta.exp() - 1)) * 4 / tau).sum())
    loss, _ = m.policy_loss(delta, None, zeros, a, None, m.loss_named("vespo", aggregate="token_sum"))
    w, positive = math.exp(0.2), delta[0, :3].sum()
    near(loss, -(w**2 * math.exp(3 * (1 - w)) * positive - w**3 * math.exp(2 * (1 - w)) * delta[0, 3]))
    near(m.check_update(delta, zeros, a).gain, ((delta.exp() - 1) * a).mean())
    near(m.check_update_mipu(delta, zeros, torch.tensor([0.5], dtype=D)).gain, -0.5 * (delta.mean()).exp())


def _probe_centering(m: Any) -> None:
    """One token of a vocabulary of three, of which two were recorded: p = (.5, .3, .2), q = (.2, .5, .3)."""
    p, q = (torch.tensor(values, dtype=D) for values in ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]))
    given = {"head_logprobs": p[1:].log()[None, None], "rollout_head_logprobs": q[1:].log()[None, None]}
    for preset, own, inner, rest in (
        ("score_centering", 1.0, q[1:], 0.2 / 0.5),
        ("score_centering_tis", 0.6, torch.tensor([0.3, 0.2], dtype=D), 0.8),
    ):
        loss, _ = m.policy_loss(
            p[None, 1:2].log(), None, q[None, 1:2].log(), torch.tensor([2.0], dtype=D), None, m.PRESETS[preset], **given
        )
        near(loss, -2 * (own * p[1].log() - ((inner - rest * p[1:]) * p[1:].log()).sum()))
    loss, _ = m.policy_loss(
        p[None].log(),
        None,
        q[None].log(),
        torch.tensor([1.0], dtype=D),
        None,
        m.PRESETS["a3po"],
        versions=torch.tensor([[1, 3, 4]]),
        version=4,
    )
    prox = torch.stack((q[0] * (p[0] / q[0]) ** (2 / 3), q[1], q[2]))
    near(loss, -(prox / q * torch.minimum(p / prox, (p / prox).clamp(0.8, 1.2))).mean())


MUTANTS = [
    ("metrics.py", "    return -log_ratio\n", "    return log_ratio\n"),
    ("metrics.py", "return 0.5 * log_ratio * log_ratio", "return log_ratio * log_ratio"),
    ("metrics.py", "torch.expm1(x) - x)", "torch.expm1(x) + x)"),
    ("metrics.py", "(1 / 2 + y *", "(1 / 3 + y *"),
    ("metrics.py", "torch.where(x == y, series, ", "torch.where(x == y, series.detach(), "),
    (
        "metrics.py",
        "torch.where(x == y, series, torch.expm1(x) - x)",
        "torch.where(x == y, series, (torch.expm1(x) - x).detach())",
    ),
    ("metrics.py", "return -torch.expm1(log_ratio) * advantages", "return torch.expm1(log_ratio) * advantages"),
    ("batch.py", "return self.trainer - self.rollout", "return self.rollout - self.trainer"),
    ("batch.py", "self.sum(values) / self.lengths.clamp(min=1)", "self.sum(values) / (self.lengths + 1)"),
    ("batch.py", "flatten(values).index_select(0, self.source)", "flatten(values)[: self.tokens]"),
    ("batch.py", "return per_row.index_select(0, self.row)", "return per_row[:1].expand(self.tokens)"),
    ("rules.py", 'total / count if self.level == "geometric" else total', "total"),
    ("rules.py", "unmasked.clamp(min=self.lower, max=self.upper)", "unmasked.clamp(min=self.lower)"),
    ("rules.py", "masked_fill(outside, 0)", "masked_fill(~outside, 0)"),
    ("rules.py", "good & (values <= high)", "good & (values >= high)"),
    ("rules.py", "values >= low\n", "values > low - 9\n"),
    ("rules.py", "        batch.dropped |= failing\n", "        pass\n"),
    ("rules.py", "        if self.inverse:\n            values = -values\n", ""),
    ("rules.py", 'values = total if self.aggregate == "seq_sum" else total / count', "values = total"),
    ("rules.py", "squares >= smallest", "squares > smallest"),
    ("rules.py", "- share[:, None] * p", "- p"),
    ("rules.py", "torch.minimum(p, cap * q)) -", "q) -"),
    ("loss.py", "per_token + tokens.advantages * term", "per_token - tokens.advantages * term"),
    ("batch.py", "(1 - 1 / age.clamp(min=1))", "(1 / age.clamp(min=1))"),
    ("diagnosis.py", "gain = -float((ratio", "gain = float((ratio"),
    ("rules.py", "means = ordered.cumsum(0)", "means = ordered.cumsum(0) * 0"),
    ("rules.py", "(advantages < 0) & (log_ratio < 0)", "(advantages < 0) & (log_ratio > 0)"),
    (
        "correction.py",
        "mask=rows.scatter(~batch.dropped, torch.bool)",
        "mask=rows.scatter(rows.flags(True), torch.bool)",
    ),
    (
        "loss.py",
        "torch.sigmoid(temperature * torch.expm1(t.log_ratio)) * 4",
        "torch.sigmoid(temperature * t.log_ratio) * 4",
    ),
    ("loss.py", "k * log_w - steepness * torch.expm1(log_w)", "k * log_w - steepness * log_w"),
    ("diagnosis.py", "gain, divergence = -float", "gain, divergence = float"),
    ("diagnosis.py", '"chi2/token": Mean.of(torch.expm1(2 * x))', '"chi2/token": Mean.of((2 * x).exp())'),
    ("diagnosis.py", "Mean.of(x * x / 2)", "Mean.of(x * x)"),
    ("diagnosis.py", "gap = rollout - trainer", "gap = trainer - rollout"),
    ("diagnosis.py", "(advantages > 0, advantages < 0)", "(advantages < 0, advantages > 0)"),
    ("diagnosis.py", "Mean.of(ratio > bound)", "Mean.of(ratio > 2 * bound)"),
    ("diagnosis.py", "product = rows.sum(delta)[full]", "product = rows.mean(delta)[full]"),
    ("metrics.py", "self.mean**2 / raw if raw else 0.0", "self.mean / raw if raw else 0.0"),
    ("metrics.py", "gap**2 * a * b / n", "gap**2 * a * b"),
    ("metrics.py", "merged[name] = stat if mine is None else mine.merge(stat)", "merged[name] = stat"),
    ("diagnosis.py", "position=int(delta.abs().argmax())", "position=int(delta.argmin())"),
    ("loss.py", "loss = torch.maximum(plain, bounded)", "loss = torch.minimum(plain, bounded)"),
    ("loss.py", "torch.where(t.advantages < 0, torch.minimum(loss, cap), loss)", "torch.minimum(loss, cap)"),
    ("loss.py", "return -t.advantages * t.current, {}", "return -t.advantages * t.log_ratio.exp(), {}"),
    ("loss.py", "ratio = t.log_ratio.detach().exp()\n    low", "ratio = t.log_ratio.exp()\n    low"),
    (
        "loss.py",
        "carrier = t.current - t.current.detach()",
        "carrier = t.current.detach() - t.current.detach()",
    ),
    (
        "loss.py",
        "change > config.clip_high, change < -config.clip_low",
        "change < -config.clip_low, change > config.clip_high",
    ),
    (
        "loss.py",
        'counted = everything if correction.loss_counts == "original" else keep',
        "counted = everything",
    ),
    ("loss.py", "sums / float(config.fixed_length or 1)", "sums"),
    ("loss.py", "config.penalty.coefficient * reduce(divergence, paid)", "reduce(divergence, paid)"),
    ("advantages.py", "index) / (size - 1).clamp(min=1)).sqrt()", "index) / size).sqrt()"),
    ("advantages.py", "(centred * size / (size - 1).clamp(min=1))", "centred"),
]


def test_the_probe_holds_for_the_code_as_it_is() -> None:
    with room(None) as m:
        probe(m)


GUARDS = [  # either keeps gradient out of weights; the mutant lacks both
    ("correction.py", "@torch.no_grad()\n", ""),
    ("loss.py", "detached = detach(logprobs)", "detached = logprobs"),
]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
def test_weights_would_be_differentiated_without_the_guards(tmp_path: Path) -> None:
    folder = tmp_path / "tokentrue"
    shutil.copytree(ROOM, folder / "mismatch", ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in GUARDS:
        path = folder / "mismatch" / file
        assert path.read_text().count(old) == 1, (file, old)
        path.write_text(path.read_text().replace(old, new))
    with room(folder) as m, pytest.raises(AssertionError, match="not close"):
        probe(m)


FIRST = {file: mutant for mutant in reversed(MUTANTS) for file in mutant[:1]}  # `make test` breaks a line of each file


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [pytest.param(*one, marks=() if one is FIRST[one[0]] else pytest.mark.slow) for one in MUTANTS],
    ids=[f"{file}-{n}" for n, (file, _, _) in enumerate(MUTANTS)],
)
def test_a_broken_line_is_noticed(tmp_path: Path, file: str, old: str, new: str) -> None:
    folder = tmp_path / "tokentrue"
    shutil.copytree(ROOM, folder / "mismatch", ignore=shutil.ignore_patterns("__pycache__"))
    source = (ROOM / file).read_text()
    assert source.count(old) == 1, f"{file}: the line to break is there {source.count(old)} times"
    (folder / "mismatch" / file).write_text(source.replace(old, new))
    with room(folder) as m:
        assert str(folder) in m.__file__
        noticed = False
        try:
            probe(m)
        except Exception:
            noticed = True
        assert noticed, f"{file}: nothing noticed that {old!r} became {new!r}"
