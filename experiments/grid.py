"""Sources of mismatch × corrections on a pretrained model: SmolLM2-135M-Instruct on reasoning-gym tasks.

    python -m experiments.grid tune --model DIR                   learning rates, on two seeds of their own
    python -m experiments.grid run --model DIR --seeds 0:5        adds missing runs to experiments/data/grid.jsonl
    python -m experiments.figures                                 tables and figures from the data

Every run starts from the same weights and differs from the others in its arm, and from the same arm's other runs in its
tasks and samples. The trainer is the same in all: bfloat16 weights with float32 masters, torch's sdpa, AdamW, two
updates per batch, `tokentrue.mismatch.policy_loss`. Runs of one engine are trained side by side as one batch, each with
weights of its own. The rollouts come from

- kernels: the same weights by other kernels (one token at a time, a cache, another attention, other matrix shapes);
- fp8: that, with weights rounded to e4m3 per output channel and inputs of every product per token, products in bfloat16;
- real fp8: the same rounding, products by torch's fp8 kernels, as serving engines run them on Hopper;
- kv8: that, with keys and values kept in e4m3 at scale 1;
- stale: `kernels` with the weights of four batches ago;
- exact: the trainer's own kernels in the trainer's own shapes, so that every log-probability has the trainer's bits
  (`differing` counts those that have not);
- mixture: `kernels` (or exact, or fp8) on a mixture of experts made from the same weights (every third layer,
  4 experts, 2 taken).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.llama import (
    Cache,
    Linear,
    Shape,
    causal_bias,
    decode,
    flatten,
    forward,
    head,
    linear,
    load_shape,
    rope_table,
    upcycle,
)
from tokentrue.mismatch import PRESETS, Correction, LossConfig, Weights, policy_loss

GROUPS, SIZE, MINIBATCHES = 4, 8, 2
ROWS = GROUPS * SIZE
PROMPT, ANSWER, HEAD = 40, 16, 64  # tokens; ids per token for score centering
HELD_OUT = 126  # questions
LAG = 4
DTYPE = torch.bfloat16
STOP = 2  # <|im_end|>
CHAT = (
    "<|im_start|>system\nGive only the answer.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n"
)

_TIS = Weights(upper=2.0)
METHODS: Mapping[str, Correction] = {
    "bypass": PRESETS["bypass_ppo_clip"],
    "recompute": Correction(),
    "recompute + TIS": PRESETS["decoupled_token_is"],
    "bypass + TIS": Correction(
        denominator="rollout", surrogate="reinforce", weights=Weights(upper=2.0, signal="ppo_rollout")
    ),
    "MIS": Correction(weights=Weights(level="sequence", mode="mask", upper=2.0)),
    "score centering": PRESETS["score_centering"],
    "policy gradient": Correction(denominator="rollout", surrogate="reinforce"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    source: str
    method: str
    engine: str = "kernels"  # kernels, fp8, real fp8, kv8, exact
    lag: int = 0
    experts: int = 1
    replay: bool = False  # the trainer's router takes the engine's experts

    @property
    def name(self) -> str:
        return f"{self.source}: {self.method}{' + replay' if self.replay else ''}"

    @property
    def config(self) -> LossConfig:
        correction = METHODS["bypass" if self.method == "exact" else self.method]
        return LossConfig(correction=correction, clip_low=0.2, clip_high=0.28, aggregate="token_sum")


def arms() -> list[Arm]:
    """In the order in which they are run."""
    made = [Arm(source="exact", method=method, engine="exact") for method in ("exact", "policy gradient")]
    made += [Arm(source="kernels", method=method) for method in METHODS]
    made += [Arm(source="fp8", method=method, engine="fp8") for method in METHODS]
    made += [
        Arm(source="real fp8", method=method, engine="real fp8")
        for method in ("bypass", "recompute", "recompute + TIS")
    ]
    made += [Arm(source="stale", method=method, lag=LAG) for method in METHODS if method != "policy gradient"]
    made += [Arm(source="stale", method="exact", engine="exact", lag=LAG)]
    made += [Arm(source="kv8", method=method, engine="kv8") for method in ("bypass", "recompute", "recompute + TIS")]
    made += [Arm(source="mixture", method="exact", engine="exact", experts=4)]
    made += [
        Arm(source=source, method=method, engine=engine, experts=4, replay=replay)
        for source, engine in (("mixture", "kernels"), ("mixture of fp8", "fp8"))
        for replay in (False, True)
        for method in ("bypass", "recompute")
    ]
    return made


# ---- tasks -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    kind: str
    prompt_ids: tuple[int, ...]
    answer: str


@dataclass(slots=True, kw_only=True)
class Tasks:
    """Questions by split; `decode` turns ids to text."""

    train: list[Question] = field(default_factory=list)
    held_out: list[Question] = field(default_factory=list)
    decode: Callable[[list[int]], str]

    def reward(self, question: Question, sampled_ids: list[int]) -> float:
        return float(is_right(self.decode(sampled_ids), question.answer))


def load_tasks(path: Path, model: Path, vocabulary: int) -> tuple[Tasks, list[int]]:
    """`path` has lines of {"kind", "question", "answer"}; the first `HELD_OUT` questions, as many of each kind, are
    held out. The vocabulary is cut to the ids that the file's questions hold and the first others: returns its ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    prompts = [tokenizer.encode(CHAT.format(question=row["question"])).ids for row in rows]
    held = dict.fromkeys([*range(STOP + 1), *sorted({i for ids in prompts for i in ids})])
    filled = [*held, *(i for i in range(tokenizer.get_vocab_size()) if i not in held)]
    cut = sorted(filled[:vocabulary])
    number = {i: n for n, i in enumerate(cut)}
    tasks = Tasks(decode=lambda ids: tokenizer.decode([cut[i] for i in ids]))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for kind in kinds:
        kept = [
            Question(kind=kind, prompt_ids=tuple(number[i] for i in ids), answer=row["answer"])
            for row, ids in zip(rows, prompts, strict=True)
            if row["kind"] == kind and len(ids) <= PROMPT and all(i in number for i in ids)
        ]
        each = HELD_OUT // len(kinds)
        tasks.held_out += kept[:each]
        tasks.train += kept[each:]
    return tasks, cut


def is_right(text: str, answer: str) -> bool:
    """The last number, where the answer is one; otherwise the whole reply."""
    if answer.lstrip("-").isdecimal():
        found = re.findall(r"-?\d+", text.replace(",", ""))
        return bool(found) and int(found[-1]) == int(answer)
    return text.strip().strip('."').lower() == answer.lower()


# ---- rollouts --------------------------------------------------------------------------------------------------------
@dataclass(slots=True, kw_only=True)
class Rollout:
    prompts_SGP: Tensor  # one of each group
    lengths_SG: Tensor  # of prompts
    sampled_SBA: Tensor
    logprobs_SBA: Tensor
    mask_SBA: Tensor
    head_ids_SBAK: Tensor
    head_logprobs_SBAK: Tensor
    routed: Tensor | None = None  # the experts taken, as the trainer lays tokens out: [mixture layers, S, G, T, 2]


class Rounded(NamedTuple):
    """A tensor [..., in] in e4m3, a scale per row."""

    values: Tensor
    scales: Tensor  # [..., 1], float32


def round_rows(x: Tensor) -> Rounded:
    size = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    scales = size.clamp(min=1e-6) / 448
    return Rounded((x / scales).to(torch.float8_e4m3fn), scales)


def fp8(x: Tensor) -> Tensor:
    """Rounded to e4m3 and back."""
    values, scales = round_rows(x)
    return (values.float() * scales).to(x.dtype)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    return linear(fp8(x), weight)


def real_fp8_linear(x: Tensor, weight: Rounded) -> Tensor:
    """`linear` by fp8 kernels, which take one run at a time. Fast accumulation, as serving engines have it."""
    values, scales = round_rows(x.flatten(1, -2))
    found = [
        torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=x.dtype, use_fast_accum=True
        )
        for a, b, a_scale, b_scale in zip(values, weight.values, scales, weight.scales, strict=True)
    ]
    return torch.stack(found).view(*x.shape[:-1], -1)


class Engine:
    """An engine of one kind, with a row of `flat` as each run's weights, that samples `copies` answers to each prompt.
    On CUDA reading the prompts and sampling a token are captured as graphs."""

    def __init__(self, shape: Shape, kind: str, flat: Tensor, *, groups: int, copies: int) -> None:
        self.shape, self.kind, self.flat = shape, kind, flat
        self.runs, self.groups, self.copies, self.device = len(flat), groups, copies, flat.device
        self.rows = groups * copies
        self.weights: dict[str, Any] = dict(shape.views(flat))
        self.rope = rope_table(shape, PROMPT + ANSWER, self.device)
        self.product: Linear = {"fp8": fp8_linear, "real fp8": real_fp8_linear}.get(kind, linear)
        products = [name for name in self.weights if name.rpartition(".")[2] in ("qkv", "out", "up", "down")]
        self.rounded = {name: self.weights[name] for name in products if "fp8" in kind}
        if kind == "real fp8":  # graphs read these tensors: `load` writes into them
            self.weights |= {name: round_rows(weight) for name, weight in self.rounded.items()}
        self.cache = Cache(
            shape, self.runs * self.rows, PROMPT + ANSWER, copies=copies, device=self.device,
            dtype=torch.float8_e4m3fn if kind == "kv8" else flat.dtype,
        )  # fmt: skip
        new, size = partial(torch.zeros, device=self.device), (self.runs, self.rows)
        self.prompts = new(self.runs, groups, PROMPT, dtype=torch.long)
        self.lengths = new(self.runs, groups, dtype=torch.long)
        self.at, self.current = (new(size, dtype=torch.long) for _ in range(2))
        self.heat = new((), dtype=torch.float32)  # 0: greedy
        self.step = new(1, dtype=torch.long)
        self.sampled = new(*size, ANSWER, dtype=torch.long)
        self.logprobs = new(*size, ANSWER)
        self.head_ids = new(*size, ANSWER, HEAD, dtype=torch.long)
        self.head_logprobs = new(*size, ANSWER, HEAD)
        self.prompt_routed = new(shape.mixtures, self.runs, groups, PROMPT, 2, dtype=torch.long)
        self.routed = new(shape.mixtures, *size, ANSWER, 2, dtype=torch.long)  # of the token before each sampled one
        self.graphs: dict[str, Any] = {}

    def load(self, flat: Tensor) -> None:
        if flat is not self.flat:
            self.flat.copy_(flat)
        for name, weight in self.rounded.items():
            if self.kind == "fp8":
                weight.copy_(fp8(weight))
            else:
                for kept, new in zip(self.weights[name], round_rows(weight), strict=True):
                    kept.copy_(new)

    @torch.no_grad()
    def generate(self, questions: Sequence[Sequence[Question]], *, greedy: bool = False) -> Rollout:
        """`copies` answers to each of a run's `groups` questions."""
        self.prompts.copy_(
            torch.tensor([[[*q.prompt_ids, *[0] * (PROMPT - len(q.prompt_ids))] for q in row] for row in questions])
        )
        self.lengths.copy_(torch.tensor([[len(q.prompt_ids) for q in row] for row in questions]))
        self.heat.fill_(0.0 if greedy else 1.0)
        self.step.zero_()
        self.at.copy_((self.lengths - 1).repeat_interleave(self.copies, 1))
        last = self.prompts.gather(2, self.lengths[:, :, None] - 1)[:, :, 0]
        self.current.copy_(last.repeat_interleave(self.copies, 1))
        self.routed[..., 1] = 1  # two experts also at positions after the last step
        if self.kind != "exact":
            self._replay("prompt", self._read_prompts)
        steps = 0
        while steps < ANSWER and not bool((self.sampled[:, :, :steps] == STOP).any(2).all()):
            for _ in range(4):  # looking costs a wait for the device
                self._replay("step", self._step_exact if self.kind == "exact" else self._step)
            steps += 4
        stops = self.sampled == STOP
        mask = (stops.cumsum(2) - stops.long() == 0) & (torch.arange(ANSWER, device=self.device) < steps)
        routed = None
        if self.shape.mixtures:
            answers = self.routed[:, :, :, 1:].unflatten(2, (self.groups, self.copies)).flatten(3, 4)
            routed = torch.cat([self.prompt_routed, answers], 3)
        return Rollout(
            prompts_SGP=self.prompts.clone(), lengths_SG=self.lengths.clone(), sampled_SBA=self.sampled.clone(),
            logprobs_SBA=self.logprobs.clone(), mask_SBA=mask, head_ids_SBAK=self.head_ids.clone(),
            head_logprobs_SBAK=self.head_logprobs.clone(), routed=routed,
        )  # fmt: skip

    def _replay(self, name: str, call: Callable[[], None]) -> None:
        if self.device.type != "cuda":
            call()
            return
        if name not in self.graphs:
            keep = [t.clone() for t in (self.at, self.current, self.step)]
            warm_up(call)
            self.graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[name]):
                call()
            for old, new in zip(keep, (self.at, self.current, self.step), strict=True):
                new.copy_(old)
        self.graphs[name].replay()

    def _read_prompts(self) -> None:
        positions = torch.arange(PROMPT, device=self.device).expand_as(self.prompts)
        _, routed = forward(
            self.shape, self.weights, self.prompts, positions, causal_bias(self.prompts, self.flat.dtype), self.rope,
            product=self.product, cache=self.cache.write_prompt,
        )  # fmt: skip
        if routed is not None:
            self.prompt_routed.copy_(routed)

    def _step(self) -> None:
        hidden, routed = decode(
            self.shape, self.weights, self.current, self.at, self.rope, self.cache, product=self.product
        )
        if routed is not None:
            self.routed.index_copy_(3, self.step, routed[:, :, :, None])
        self._sample(head(hidden, self.weights))

    def _step_exact(self) -> None:
        """The trainer's whole pass, in minibatches as the trainer cuts them."""
        given = (self.prompts, self.lengths, self.sampled)
        found = []
        for prompts, lengths, sampled in zip(*(tensor.chunk(MINIBATCHES, 1) for tensor in given), strict=True):
            logprobs = score(self.shape, self.weights, prompts, lengths, sampled, self.rope)
            found.append(logprobs.index_select(2, self.step)[:, :, 0])
        self._sample(torch.cat(found, 1))

    def _sample(self, logprobs_SBV: Tensor) -> None:
        noise = torch.empty_like(logprobs_SBV).exponential_().clamp(min=1e-20).log()
        chosen = (logprobs_SBV - self.heat * noise).argmax(-1, keepdim=True)
        at = self.step.expand(self.runs, self.rows, 1)
        self.sampled.scatter_(2, at, chosen)
        self.logprobs.scatter_(2, at, logprobs_SBV.gather(2, chosen))
        top = logprobs_SBV.topk(min(HEAD, logprobs_SBV.shape[2]), dim=-1)
        at = at[..., None].expand(-1, -1, 1, HEAD)
        self.head_ids.scatter_(2, at, top.indices[:, :, None])
        self.head_logprobs.scatter_(2, at, top.values[:, :, None])
        self.at += 1
        self.current.copy_(chosen[:, :, 0])
        self.step += 1


def warm_up(call: Callable[[], None]) -> None:
    """On a stream other than the one that a graph is then captured on, as CUDA graphs need it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)


def score(
    shape: Shape, weights: Mapping[str, Tensor], prompts_SGP: Tensor, lengths_SG: Tensor, sampled_SBA: Tensor,
    rope: Tensor, routed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The trainer's log-probabilities over the vocabulary at every sampled token, [S, B, A, V].

    A group is one row: its prompt once, then its answers but for their last token, kept apart by attention's mask.
    """
    runs, groups, device = *lengths_SG.shape, lengths_SG.device
    answers = sampled_SBA.unflatten(1, (groups, -1))[..., :-1]
    copies, kept = answers.shape[2:]
    ids = torch.cat([prompts_SGP, answers.flatten(2)], 2)
    steps, order = torch.arange(kept, device=device).repeat(copies), torch.arange(PROMPT, device=device)
    positions = torch.cat([order.expand_as(prompts_SGP), lengths_SG[..., None] + steps], 2)
    branch = torch.cat([torch.full_like(order, -1), torch.arange(copies, device=device).repeat_interleave(kept)])
    sees = ((branch[:, None] == branch) | (branch == -1)).tril()
    exists = torch.cat([order < lengths_SG[..., None], steps.expand(runs, groups, -1) >= 0], 2)
    visible = sees & exists[:, :, None, :]
    bias = torch.zeros_like(visible, dtype=weights["norm"].dtype).masked_fill(~visible, -torch.inf)
    hidden, _ = forward(shape, weights, ids, positions, bias, rope, routed=routed)
    first = (lengths_SG - 1)[..., None, None].expand(-1, -1, copies, 1)
    later = torch.arange(PROMPT, ids.shape[2], device=device).view(copies, kept).expand(runs, groups, -1, -1)
    at = torch.cat([first, later], 3).flatten(2)  # of the token before each sampled one
    picked = hidden.gather(2, at[..., None].expand(-1, -1, -1, hidden.shape[3]))
    return head(picked.view(runs, groups * copies, kept + 1, -1), weights)


# ---- the trainer -----------------------------------------------------------------------------------------------------
class Trainer:
    """Trains each job's weights, one row of `flat`; all jobs have the arms' `experts` and `replay` in common."""

    def __init__(self, shape: Shape, start: Tensor, jobs: Sequence[Job], *, device: torch.device) -> None:
        self.shape, self.device, self.jobs = shape, device, jobs
        self.master = start.to(device).repeat(len(jobs), 1)
        self.flat = self.master.to(DTYPE)
        self.gradient, self.first, self.second = (torch.zeros_like(self.master) for _ in range(3))
        self.weights = {name: view.detach().requires_grad_() for name, view in shape.views(self.flat).items()}
        self.gradients = list(shape.views(self.gradient).values())
        self.rope = rope_table(shape, PROMPT + ANSWER, device)
        self.updates = 0
        groups = GROUPS // MINIBATCHES
        self.cuts = [slice(start, start + groups) for start in range(0, GROUPS, groups)]  # in groups
        new, size = partial(torch.zeros, device=device), (len(jobs), groups * SIZE)
        self.prompts = new(len(jobs), groups, PROMPT, dtype=torch.long)
        self.lengths = new(len(jobs), groups, dtype=torch.long) + 1
        self.sampled = new(*size, ANSWER, dtype=torch.long)
        self.head_ids = new(*size, ANSWER, HEAD, dtype=torch.long)
        tokens = PROMPT + SIZE * (ANSWER - 1)
        self.routed = new(shape.mixtures, len(jobs), groups, tokens, 2, dtype=torch.long)
        self.routed[..., 1] = 1
        self.replays = jobs[0].arm.replay
        self.current_grad, self.head_grad = new(*size, ANSWER), new(*size, ANSWER, HEAD)
        configs = [job.arm.config for job in jobs]
        self.parts = [(config, [n for n, c in enumerate(configs) if c == config]) for config in unique(configs)]
        self.recomputes = any(config.correction.denominator == "trainer" for config in configs)
        self.graphs: list[Any] = []
        if device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        """Forward and backward pass as graphs. Each backward needs its own forward: its graph overwrites what the
        forward saved."""

        def both() -> None:
            self._forward()
            self._backward()

        warm_up(both)
        self.graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        with torch.cuda.graph(self.graphs[0]):
            self._forward()
        with torch.cuda.graph(self.graphs[1], pool=self.graphs[0].pool()):
            self._backward()

    def _forward(self) -> None:
        routed = self.routed if self.replays else None
        table = score(self.shape, self.weights, self.prompts, self.lengths, self.sampled, self.rope, routed)
        self.current = table.gather(3, self.sampled[..., None])[..., 0]
        self.head = table.gather(3, self.head_ids)

    def _backward(self) -> None:
        """From `current_grad` and `head_grad` to `gradient`."""
        given = (self.current_grad, self.head_grad)
        found = torch.autograd.grad((self.current, self.head), list(self.weights.values()), given)
        for kept, new in zip(self.gradients, found, strict=True):
            kept.copy_(new)

    def score(self, rollout: Rollout, groups: slice) -> tuple[Tensor, Tensor]:
        """The current policy's log-probabilities of one minibatch's tokens and of the engine's most likely ids."""
        rows = slice(groups.start * SIZE, groups.stop * SIZE)
        self.prompts.copy_(rollout.prompts_SGP[:, groups])
        self.lengths.copy_(rollout.lengths_SG[:, groups])
        self.sampled.copy_(rollout.sampled_SBA[:, rows])
        self.head_ids.copy_(rollout.head_ids_SBAK[:, rows])
        if self.replays and rollout.routed is not None:
            self.routed.copy_(rollout.routed[:, :, groups])
        self.graphs[0].replay() if self.graphs else self._forward()
        return self.current.detach().clone(), self.head.detach().clone()

    def train(self, rollout: Rollout, rewards_SB: Tensor) -> list[dict[str, float]]:
        """One update for each minibatch; a row of measurements for each job."""
        groups = rewards_SB.unflatten(1, (-1, SIZE))
        advantages_SB = (groups - groups.mean(2, keepdim=True)).flatten(1)
        # The denominator of the first minibatch is its own first score: its weights are those before any update.
        later = [self.score(rollout, groups)[0] for groups in self.cuts[1:]] if self.recomputes else []
        measured: list[dict[str, float]] = []
        norms: list[Tensor] = []
        for number, groups in enumerate(self.cuts):
            rows = slice(groups.start * SIZE, groups.stop * SIZE)
            current, likely = (x.requires_grad_() for x in self.score(rollout, groups))
            mask, sampled = rollout.mask_SBA[:, rows], rollout.logprobs_SBA[:, rows]
            if number == 0:
                measured = measure(current.detach(), sampled, mask)
            old = later[number - 1] if number and later else current.detach()
            # A sum over tokens of A / (the run's tokens) is the run's own mean over tokens.
            advantages = advantages_SB[:, rows] / mask.sum((1, 2))[:, None]
            losses = []
            for config, runs in self.parts:
                a, b, c, d, e = (x[runs].flatten(0, 1) for x in (current, sampled, advantages, mask, likely))
                recomputes = config.correction.denominator == "trainer"
                is_centred = config.correction.centering is not None
                loss, _ = policy_loss(
                    a, old[runs].flatten(0, 1) if recomputes else None, b, c, d, config,
                    head_logprobs=e if is_centred else None,
                    rollout_head_logprobs=rollout.head_logprobs_SBAK[runs, rows].flatten(0, 1) if is_centred else None,
                )  # fmt: skip
                losses.append(loss)
            torch.stack(losses).sum().backward()
            assert current.grad is not None
            self.current_grad.copy_(current.grad)
            self.head_grad.zero_() if likely.grad is None else self.head_grad.copy_(likely.grad)
            self.graphs[1].replay() if self.graphs else self._backward()
            norms.append(self.update())
        worst = torch.stack(norms).amax(0).tolist()
        return [{**row, "norm": norm} for row, norm in zip(measured, worst, strict=True)]

    @torch.no_grad()
    def update(self) -> Tensor:
        """AdamW, gradients clipped to norm 1; a run whose gradient is 0 or not finite keeps its weights. Returns the
        norms."""
        self.updates += 1
        norms = torch.linalg.vector_norm(self.gradient, dim=1)
        skipped = ((norms == 0) | ~norms.isfinite()).float()
        t = torch.tensor(float(self.updates), device=self.device)
        for run, job in enumerate(self.jobs):
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                [self.master[run]], [self.gradient[run]], [self.first[run]], [self.second[run]], [], [t],
                lr=job.lr * min(1.0, self.updates / 10), beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8,
                amsgrad=False, maximize=False, grad_scale=norms[run].clamp(min=1.0), found_inf=skipped[run],
            )  # fmt: skip
        self.flat.copy_(self.master)
        return norms


def unique(values: Sequence[LossConfig]) -> list[LossConfig]:
    return [value for n, value in enumerate(values) if value not in values[:n]]


def measure(trainer_SBA: Tensor, sampled_SBA: Tensor, mask_SBA: Tensor) -> list[dict[str, float]]:
    """Per run, over the tokens of `mask_SBA`."""
    delta = torch.where(mask_SBA, trainer_SBA - sampled_SBA, 0.0).double()
    ratio, tokens = delta.exp(), mask_SBA.sum((1, 2)).double()
    weights = ratio * mask_SBA
    values = {
        "delta": delta.abs().sum((1, 2)) / tokens,
        "k3": (ratio - 1 - delta).sum((1, 2)) / tokens,
        "lowest": delta.amin((1, 2)),
        "ess": weights.sum((1, 2)) ** 2 / (weights**2).sum((1, 2)) / tokens,
        "nll": -(trainer_SBA * mask_SBA).double().sum((1, 2)) / tokens,
        "differing": ((trainer_SBA != sampled_SBA) & mask_SBA).double().sum((1, 2)),
        "compared": tokens,
    }
    table = torch.stack(list(values.values()), 1).tolist()
    return [dict(zip(values, row, strict=True)) for row in table]


# ---- runs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arm: Arm
    seed: int
    lr: float

    @property
    def program(self) -> tuple[Any, ...]:
        """Jobs that are equal in it can run as one batch."""
        return self.arm.engine, self.arm.lag, self.arm.experts, self.arm.replay


@dataclass(slots=True, kw_only=True)
class Bench:
    """What all runs start from."""

    tasks: Tasks
    shape: Shape
    start: Tensor
    device: torch.device

    def run(
        self, jobs: Sequence[Job], *, steps: int, evaluate_every: int = 25, until: float = float("inf")
    ) -> list[dict[str, Any]]:
        """Runs jobs of one program as one batch. Empty if they would not end by `until`."""
        began = time.monotonic()
        arm, seed = jobs[0].arm, min(job.seed for job in jobs)
        torch.manual_seed(1000 + seed)
        orders = [random.Random(f"tasks/{job.seed}") for job in jobs]
        shape = replace(self.shape, experts=arm.experts)
        start = self.start if arm.experts == 1 else upcycle(self.shape, self.start, shape)
        trainer = Trainer(shape, start, jobs, device=self.device)
        is_shared = arm.lag == 0 and arm.engine != "fp8"
        engine = Engine(
            shape,
            arm.engine,
            trainer.flat if is_shared else torch.zeros_like(trainer.flat),
            groups=GROUPS,
            copies=SIZE,
        )
        # The judge has the trainer's weights and is of one kind for all arms.
        judge = Engine(shape, "kernels", trainer.flat, groups=len(self.tasks.held_out), copies=1)
        kept = [trainer.flat if arm.lag == 0 else trainer.flat.clone()]  # of the last batches, oldest first
        rows: list[list[dict[str, float]]] = [[] for _ in jobs]
        held = [[(0, found)] for found in self.judge(judge)]
        since = began
        for step in range(steps):
            if step == 10:  # what comes before includes the capture of graphs
                since = time.monotonic()
            if step == 20 and time.monotonic() + (time.monotonic() - since) / 10 * (steps - 20) > until:
                print(f"no time for {steps} steps of {len(jobs)} runs: {arm.name}, …", flush=True)
                return []
            engine.load(kept[0])
            questions = [[order.choice(self.tasks.train) for _ in range(GROUPS)] for order in orders]
            rollout = engine.generate(questions)
            rewards = self.rewards(rollout, questions)
            measured = trainer.train(rollout, torch.tensor(rewards, device=self.device))
            if arm.lag:
                kept = [*kept, trainer.flat.clone()][-1 - arm.lag :]
            for row, reward, found in zip(rows, rewards, measured, strict=True):
                row.append({"reward": sum(reward) / len(reward), **found})
            if (step + 1) % evaluate_every == 0:
                for mine, found in zip(held, self.judge(judge), strict=True):
                    mine.append((step + 1, found))
        seconds = round((time.monotonic() - began) / len(jobs), 2)
        return [
            {"arm": job.arm.name, "seed": job.seed, "lr": job.lr, "steps": steps, "seconds": seconds, "held_out": mine,
             "rows": row}
            for job, mine, row in zip(jobs, held, rows, strict=True)
        ]  # fmt: skip

    def judge(self, engine: Engine) -> list[dict[str, float]]:
        """Held-out reward of each run, greedy: the mean of each kind of task."""
        questions = [self.tasks.held_out] * engine.runs
        found: list[dict[str, float]] = []
        for rewards in self.rewards(engine.generate(questions, greedy=True), questions):
            kinds: dict[str, list[float]] = {}
            for question, reward in zip(self.tasks.held_out, rewards, strict=True):
                kinds.setdefault(question.kind, []).append(reward)
            found.append({kind: sum(values) / len(values) for kind, values in kinds.items()})
        return found

    def rewards(self, rollout: Rollout, questions: Sequence[Sequence[Question]]) -> list[list[float]]:
        sampled, counts = rollout.sampled_SBA.tolist(), rollout.mask_SBA.sum(2).tolist()
        copies = rollout.sampled_SBA.shape[1] // rollout.lengths_SG.shape[1]
        return [
            [
                self.tasks.reward(mine[row // copies], [i for i in ids[:count] if i != STOP])
                for row, (ids, count) in enumerate(zip(*answers, strict=True))
            ]
            for mine, *answers in zip(questions, sampled, counts, strict=True)
        ]


def open_bench(model: Path, tasks: Path, *, vocabulary: int, device: str) -> Bench:
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        state |= load_file(file)
    known, cut = load_tasks(tasks, model, vocabulary)
    shape = load_shape(model, vocabulary)
    return Bench(tasks=known, shape=shape, start=flatten(shape, state, cut), device=torch.device(device))


def make_batches(jobs: Sequence[Job], at_once: int) -> list[list[Job]]:
    """Jobs of one program together, `at_once` at most, in batches of about one size."""
    programs: dict[Any, list[Job]] = {}
    for job in jobs:
        programs.setdefault(job.program, []).append(job)
    batches: list[list[Job]] = []
    for mine in programs.values():
        number = -(-len(mine) // at_once)
        batches += [mine[len(mine) * n // number : len(mine) * (n + 1) // number] for n in range(number)]
    return batches


def run_jobs(bench: Bench, jobs: Sequence[Job], file: Path, *, steps: int, at_once: int, until: float) -> None:
    """Adds the runs of every batch that ends to `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for batch in make_batches(jobs, at_once):
        began = time.monotonic()
        if began >= until:
            print(f"no time for {len(batch)} runs: {batch[0].arm.name}, …", flush=True)
            continue
        for result in bench.run(batch, steps=steps, until=until):
            run = compact(result)
            with file.open("a") as out:
                out.write(json.dumps(run) + "\n")
            deltas, differing = run["curves"]["delta"], sum(run["curves"]["differing"])
            print(
                f"  held-out {late(run):.3f}, mean |δ| {sum(deltas) / len(deltas):.4f}, differing bits {differing:,};"
                f" {run['arm']}, seed {run['seed']}, lr {run['lr']:g}",
                flush=True,
            )
        gc.collect()  # of the batch's graphs: their memory is free only then
        seconds, peak = time.monotonic() - began, 0.0
        if bench.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        speed = len(batch) * steps / seconds
        print(f"{len(batch)} runs in {seconds:.0f} s, {speed:.0f} steps/s, {peak:.0f} GiB", flush=True)


def late(run: Mapping[str, Any]) -> float:
    """The mean held-out reward over the last half of the run's evaluations: what a run is judged by."""
    values = [sum(found) / len(found) for step, *found in run["held_out"] if step]
    values = values[len(values) // 2 :]
    return sum(values) / len(values) if values else float("nan")


EVERY = 10  # steps per value on file


def compact(result: dict[str, Any]) -> dict[str, Any]:
    """Curves as means, sums or extremes of ten steps."""
    rows = result.pop("rows")
    other = {"lowest": min, "ess": min, "norm": max, "differing": sum, "compared": sum}
    curves: dict[str, list[float]] = {}
    for start in range(0, len(rows), EVERY):
        part = rows[start : start + EVERY]
        for name in rows[0]:
            values = [row[name] for row in part]
            value = other[name](values) if name in other else sum(values) / len(values)
            exact = name in ("differing", "compared")
            curves.setdefault(name, []).append(int(value) if exact else float(f"{value:.3g}"))
    held = [[step, *(round(value, 3) for value in found.values())] for step, found in result["held_out"]]
    kinds = list(result["held_out"][0][1])
    return {**result, "held_out": held, "kinds": kinds, "curves": curves}


def read_runs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- which runs ------------------------------------------------------------------------------------------------------
RATES = (5e-6, 1.5e-5, 3e-5)
TUNED = ("exact", "kernels", "fp8", "stale")  # the other sources take the rate that `kernels` has for their method
TUNING_SEEDS = (100, 101)


def tuning_jobs() -> list[Job]:
    tuned = [arm for arm in arms() if arm.source in TUNED]
    return [Job(arm=arm, seed=seed, lr=lr) for arm in tuned for seed in TUNING_SEEDS for lr in RATES]


def choose_rates(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each tuned arm's rate of the highest held-out reward."""
    scores: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        scores.setdefault(run["arm"], {}).setdefault(run["lr"], []).append(late(run))
    return {arm: max(found, key=lambda lr: sum(found[lr]) / len(found[lr])) for arm, found in scores.items()}


def main_jobs(rates: Mapping[str, float], seeds: Sequence[int], known: set[tuple[str, int]]) -> list[Job]:
    return [
        Job(arm=arm, seed=seed, lr=rates.get(arm.name) or rates.get(f"kernels: {arm.method}", RATES[1]))
        for arm in arms()
        for seed in seeds
        if (arm.name, seed) not in known
    ]


DATA = Path(__file__).parent / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("tune", "run"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, default=DATA / "tasks.jsonl")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=20, help="runs of a batch, each 2 to 4 GiB")
    parser.add_argument("--seeds", default="0:5", help="FIRST:END")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--only", default="", help="starts of arms' names, in the order to run them, with commas between them"
    )
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds")
    parser.add_argument("--out", type=Path, default=DATA)
    given = parser.parse_args()
    until = time.monotonic() + given.deadline
    if given.action == "tune":
        jobs, file = tuning_jobs(), given.out / "tuning.jsonl"
    else:
        file = given.out / "grid.jsonl"
        rates = choose_rates(read_runs(DATA / "tuning.jsonl") + read_runs(given.out / "tuning.jsonl"))
        known = {(run["arm"], run["seed"]) for run in read_runs(DATA / "grid.jsonl") + read_runs(file)}
        first, _, end = given.seeds.partition(":")
        jobs = main_jobs(rates, range(int(first), int(end)), known)
    jobs = list(dict.fromkeys(job for start in given.only.split(",") for job in jobs if job.arm.name.startswith(start)))
    bench = open_bench(given.model, given.tasks, vocabulary=given.vocabulary, device=given.device)
    run_jobs(bench, jobs, file, steps=given.steps, at_once=given.at_once, until=until)


if __name__ == "__main__":
    main()
