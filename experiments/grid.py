"""Sources of mismatch × corrections on a pretrained model: SmolLM2-135M-Instruct on reasoning-gym tasks.

    python -m experiments.grid tune --model DIR                   learning rates, on a seed of its own
    python -m experiments.grid run --model DIR --seeds 0:5        adds missing runs to experiments/data/grid.jsonl
    python -m experiments.figures                                 tables and figures from the data

Every run starts from the same weights and differs from the others in its arm, and from the same arm's other runs in its
tasks and samples. The trainer is the same in all: bfloat16 weights with float32 masters, torch's sdpa, AdamW, two
updates per batch, `tokentrue.mismatch.policy_loss`. The rollouts come from

- kernels: the same weights by other kernels (one token at a time, a cache, another attention, other matrix shapes);
- fp8: that, with weights rounded to e4m3 per output channel and inputs of every product per token;
- kv8: that, with keys and values kept in e4m3 at scale 1;
- stale: `kernels` with the weights of four batches ago;
- exact: the trainer's own kernels in the trainer's own shapes, so that every log-probability has the trainer's bits
  (`differing` counts those that have not);
- mixture: `kernels` on a mixture of experts made from the same weights (every third layer, 4 experts, 2 taken).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.llama import Cache, Shape, decode, flatten, forward, head, load_shape, rope_table, upcycle
from tokentrue.mismatch import PRESETS, Correction, LossConfig, Weights, policy_loss

GROUPS, SIZE, MINIBATCHES = 4, 8, 2
ROWS = GROUPS * SIZE
PROMPT, ANSWER, HEAD = 48, 16, 64  # tokens; ids per token for score centering
HELD_OUT = 126  # questions
LAG = 4
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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    source: str
    method: str
    engine: str = "kernels"  # kernels, fp8, kv8, exact
    lag: int = 0
    experts: int = 1
    replay: bool = False  # the trainer's router takes the engine's experts

    @property
    def name(self) -> str:
        return f"{self.source}: {self.method}{' + replay' if self.replay else ''}"

    @property
    def config(self) -> LossConfig:
        correction = METHODS["bypass" if self.method == "exact" else self.method]
        return LossConfig(correction=correction, clip_low=0.2, clip_high=0.28, aggregate="token_mean")


def arms() -> list[Arm]:
    """In the order in which they are run: a cut-off leaves whole comparisons."""
    made = [Arm(source="exact", method="exact", engine="exact")]
    for source, engine in (("fp8", "fp8"), ("kernels", "kernels")):
        made += [Arm(source=source, method=method, engine=engine) for method in METHODS]
    made += [Arm(source="stale", method="exact", engine="exact", lag=LAG)]
    made += [Arm(source="stale", method=method, lag=LAG) for method in METHODS]
    made += [Arm(source="kv8", method=method, engine="kv8") for method in ("bypass", "recompute", "recompute + TIS")]
    made += [
        Arm(source="mixture", method=method, experts=4, replay=replay)
        for method in ("bypass", "recompute")
        for replay in (False, True)
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


def load_tasks(path: Path, model: Path, vocabulary: int, kinds: Sequence[str] = ()) -> tuple[Tasks, list[int]]:
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
    known = [kind for kind in dict.fromkeys(row["kind"] for row in rows) if not kinds or kind in kinds]
    for kind in known:
        kept = [
            Question(kind=kind, prompt_ids=tuple(number[i] for i in ids), answer=row["answer"])
            for row, ids in zip(rows, prompts, strict=True)
            if row["kind"] == kind and len(ids) <= PROMPT and all(i in number for i in ids)
        ]
        each = HELD_OUT // len(known)
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
    ids_BT: Tensor  # prompt and sampled ids, from the left
    lengths_B: Tensor  # of prompts
    logprobs_BA: Tensor
    mask_BA: Tensor
    head_ids_BAK: Tensor
    head_logprobs_BAK: Tensor
    routed: Tensor | None = None  # [mixture layers, B, T, 2]


def fp8(x: Tensor) -> Tensor:
    """Rounded to e4m3, one scale per row."""
    size = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    scale = size.clamp(min=1e-6) / 448
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(fp8(x), weight)


class Engine:
    """An engine of one kind with its own copy of the weights. On CUDA a prompt and a step are captured as graphs."""

    def __init__(self, shape: Shape, kind: str, *, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.kind, self.rows, self.device = shape, kind, rows, device
        self.flat = torch.zeros(shape.size(), dtype=dtype, device=device)
        self.weights = shape.views(self.flat)
        self.rope = rope_table(shape, PROMPT + ANSWER, device)
        self.linear = fp8_linear if kind == "fp8" else F.linear
        kept = torch.float8_e4m3fn if kind == "kv8" else dtype
        self.cache = Cache(shape, rows, PROMPT + ANSWER, dtype=kept, device=device)
        new = partial(torch.zeros, device=device)
        self.ids = new(rows, PROMPT + ANSWER, dtype=torch.long)
        self.lengths, self.at, self.current = (new(rows, dtype=torch.long) for _ in range(3))
        self.heat = new((), dtype=torch.float32)  # 0: greedy
        self.step = new(1, dtype=torch.long)
        self.sampled = new(rows, ANSWER, dtype=torch.long)
        self.logprobs = new(rows, ANSWER)
        self.head_ids = new(rows, ANSWER, HEAD, dtype=torch.long)
        self.head_logprobs = new(rows, ANSWER, HEAD)
        mixtures = sum(shape.is_mixture(n) for n in range(shape.layers))
        self.routed = new(mixtures, rows, PROMPT + ANSWER, 2, dtype=torch.long)
        self.every = torch.arange(rows, device=device)
        self.graphs: dict[str, Any] = {}

    def load(self, flat: Tensor) -> None:
        self.flat.copy_(flat)
        if self.kind == "fp8":
            for name, weight in self.weights.items():
                if name.rpartition(".")[2] in ("qkv", "out", "up", "down"):
                    weight.copy_(fp8(weight))

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], *, greedy: bool = False) -> Rollout:
        assert len(prompts) == self.rows
        ids = torch.zeros(self.rows, PROMPT + ANSWER, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.ids.copy_(ids)
        self.lengths.copy_(lengths)
        self.heat.fill_(0.0 if greedy else 1.0)
        self.step.zero_()
        self.at.copy_(self.lengths - 1)
        if self.routed.numel():
            self.routed[..., 0], self.routed[..., 1] = 0, 1
        if self.kind != "exact":
            self._replay("prompt", self._read_prompt)
            self.current.copy_(self.ids[self.every, self.at])
        for step in range(ANSWER):
            self._replay("step", self._step_exact if self.kind == "exact" else self._step)
            if step % 4 == 3 and bool((self.sampled[:, : step + 1] == STOP).any(1).all()):
                break
        done = (self.sampled == STOP).cumsum(1)
        mask = (done - (self.sampled == STOP).long()) == 0
        mask &= torch.arange(ANSWER, device=self.device) <= step
        return Rollout(
            ids_BT=self.ids.clone(), lengths_B=self.lengths.clone(), logprobs_BA=self.logprobs.clone(), mask_BA=mask,
            head_ids_BAK=self.head_ids.clone(), head_logprobs_BAK=self.head_logprobs.clone(),
            routed=self.routed.clone() if self.routed.numel() else None,
        )  # fmt: skip

    def _replay(self, name: str, call: Callable[[], None]) -> None:
        if self.device.type != "cuda":
            call()
            return
        if name not in self.graphs:
            keep = [t.clone() for t in (self.ids, self.at, self.current, self.step)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[name], capture_error_mode="thread_local"):
                call()
            for old, new in zip(keep, (self.ids, self.at, self.current, self.step), strict=True):
                new.copy_(old)
        self.graphs[name].replay()

    def _read_prompt(self) -> None:
        _, routed = forward(
            self.shape, self.weights, self.ids[:, :PROMPT], self.rope, linear=self.linear, cache=self.cache.write_prompt
        )
        if routed is not None:
            self.routed[:, :, :PROMPT] = routed

    def _step(self) -> None:
        hidden, routed = decode(
            self.shape, self.weights, self.current, self.at, self.rope, self.cache, linear=self.linear
        )
        if routed is not None:
            self.routed[:, self.every, self.at] = routed
        self._sample(head(hidden, self.weights))

    def _step_exact(self) -> None:
        """The trainer's whole pass, in minibatches as the trainer cuts them."""
        found = []
        for part in torch.arange(self.rows, device=self.device).chunk(self.rows // (ROWS // MINIBATCHES)):
            logprobs, _ = score(self.shape, self.weights, self.ids[part], self.lengths[part], self.rope)
            found.append(logprobs.gather(1, self.step.view(1, 1, 1).expand(len(part), 1, logprobs.shape[2]))[:, 0])
        self._sample(torch.cat(found))

    def _sample(self, logprobs_BV: Tensor) -> None:
        noise = torch.empty_like(logprobs_BV).exponential_().clamp(min=1e-20).log()
        chosen = (logprobs_BV - self.heat * noise).argmax(-1)
        self.sampled.scatter_(1, self.step.expand(self.rows, 1), chosen[:, None])
        self.logprobs.scatter_(1, self.step.expand(self.rows, 1), logprobs_BV.gather(1, chosen[:, None]))
        top = logprobs_BV.topk(min(HEAD, logprobs_BV.shape[1]), dim=-1)
        at = self.step.view(1, 1, 1).expand(self.rows, 1, HEAD)
        self.head_ids.scatter_(1, at, top.indices[:, None])
        self.head_logprobs.scatter_(1, at, top.values[:, None])
        self.at += 1
        self.ids.scatter_(1, self.at[:, None], chosen[:, None])
        self.current.copy_(chosen)
        self.step += 1


def score(
    shape: Shape, weights: Mapping[str, Tensor], ids_BT: Tensor, lengths_B: Tensor, rope: Tensor,
    routed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The trainer's log-probabilities over the vocabulary at the positions that predict an answer, [B, A, V], and the
    ids there."""
    hidden, _ = forward(shape, weights, ids_BT, rope, routed=routed)
    at = (lengths_B - 1)[:, None] + torch.arange(ANSWER, device=ids_BT.device)
    picked = hidden.gather(1, at[:, :, None].expand(-1, -1, hidden.shape[2]))
    return head(picked, weights), ids_BT.gather(1, at + 1)


# ---- the trainer -----------------------------------------------------------------------------------------------------
class Trainer:
    def __init__(self, shape: Shape, start: Tensor, *, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device = shape, device
        self.master = start.to(device).clone()
        self.flat = self.master.to(dtype)
        self.gradient = torch.zeros_like(self.flat)
        self.weights = {name: view.detach().requires_grad_() for name, view in shape.views(self.flat).items()}
        self.gradients = list(shape.views(self.gradient).values())
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.rope = rope_table(shape, PROMPT + ANSWER, device)
        per = ROWS // MINIBATCHES
        new = partial(torch.zeros, device=device)
        self.ids, self.lengths = new(per, PROMPT + ANSWER, dtype=torch.long), new(per, dtype=torch.long) + 1
        self.head_ids = new(per, ANSWER, HEAD, dtype=torch.long)
        mixtures = sum(shape.is_mixture(n) for n in range(shape.layers))
        self.routed = new(mixtures, per, PROMPT + ANSWER, 2, dtype=torch.long)
        self.routed[..., 1] = 1
        self.current_grad, self.head_grad = new(per, ANSWER), new(per, ANSWER, HEAD)
        self.passes: dict[bool, Pass] = {}

    def reset(self, start: Tensor, lr: float) -> None:
        self.master.copy_(start)
        self.flat.copy_(start)
        self.first.zero_()
        self.second.zero_()
        self.updates, self.lr = 0, lr

    def scored(self, part: Rollout, rows: slice, *, replay: bool) -> Pass:
        """The current policy's log-probabilities of one minibatch; the next call overwrites them."""
        self.ids.copy_(part.ids_BT[rows])
        self.lengths.copy_(part.lengths_B[rows])
        self.head_ids.copy_(part.head_ids_BAK[rows])
        if replay and part.routed is not None:
            self.routed.copy_(part.routed[:, rows])
        if replay not in self.passes:
            self.passes[replay] = Pass(self, replay=replay)
        self.passes[replay].forward()
        return self.passes[replay]

    def train(self, rollout: Rollout, rewards: Tensor, arm: Arm) -> dict[str, float]:
        config = arm.config
        is_centred = config.correction.centering is not None
        groups = rewards.view(-1, SIZE)
        advantages = (groups - groups.mean(1, keepdim=True)).view(-1)
        per = ROWS // MINIBATCHES
        cuts = [slice(start, start + per) for start in range(0, ROWS, per)]
        old: list[Tensor | None] = [None] * len(cuts)
        if config.correction.denominator == "trainer":
            old = [self.scored(rollout, rows, replay=arm.replay).current.detach().clone() for rows in cuts]
        row: dict[str, float] = {}
        for number, rows in enumerate(cuts):
            self.updates += 1
            learns = bool(advantages[rows].any())
            if not learns and number > 0:
                continue
            mask, sampled = rollout.mask_BA[rows], rollout.logprobs_BA[rows]
            scored = self.scored(rollout, rows, replay=arm.replay)
            current = scored.current.detach().clone().requires_grad_()
            if number == 0:  # no update yet since the weights were published
                row |= measure(current.detach(), sampled, mask)
            if not learns:
                continue
            extra: dict[str, Tensor] = {}
            if is_centred:
                extra["head_logprobs"] = scored.head.detach().clone().requires_grad_()
                extra["rollout_head_logprobs"] = rollout.head_logprobs_BAK[rows]
            loss, _ = policy_loss(current, old[number], sampled, advantages[rows], mask, config, **extra)
            loss.backward()
            self.current_grad.copy_(current.grad)
            self.head_grad.zero_() if not is_centred else self.head_grad.copy_(extra["head_logprobs"].grad)
            scored.backward()
            row["norm"] = max(row.get("norm", 0.0), self.update(self.lr * min(1.0, self.updates / 10)))
        return row

    @torch.no_grad()
    def update(self, lr: float, *, betas: tuple[float, float] = (0.9, 0.95)) -> float:
        gradient = self.gradient.float()
        norm = float(gradient.norm())
        if norm > 0 and norm < float("inf"):
            gradient.mul_(min(1.0, 1.0 / norm))
            t = torch.tensor(float(self.updates), device=self.device)
            torch._fused_adamw_(
                [self.master], [gradient], [self.first], [self.second], [], [t],
                lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            self.flat.copy_(self.master)
        return norm


class Pass:
    """The trainer's forward and backward pass over one minibatch's buffers; on CUDA both are captured as graphs. Each
    backward needs its own forward: its graph overwrites what the forward saved."""

    def __init__(self, trainer: Trainer, *, replay: bool) -> None:
        self.trainer, self.replay = trainer, replay
        self.graphs: list[Any] = []
        if trainer.device.type == "cuda" and not os.environ.get("GRID_EAGER"):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._forward()
                    self._backward()
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
            with torch.cuda.graph(self.graphs[0]):
                self._forward()
            with torch.cuda.graph(self.graphs[1], pool=self.graphs[0].pool()):
                self._backward()

    def forward(self) -> None:
        self.graphs[0].replay() if self.graphs else self._forward()

    def backward(self) -> None:
        """From `trainer.current_grad` and `trainer.head_grad` to `trainer.gradient`."""
        self.graphs[1].replay() if self.graphs else self._backward()

    def _forward(self) -> None:
        t = self.trainer
        table, ids = score(t.shape, t.weights, t.ids, t.lengths, t.rope, t.routed if self.replay else None)
        self.current = table.gather(2, ids[:, :, None])[..., 0]
        self.head = table.gather(2, t.head_ids)

    def _backward(self) -> None:
        t = self.trainer
        found = torch.autograd.grad((self.current, self.head), list(t.weights.values()), (t.current_grad, t.head_grad))
        torch._foreach_copy_(t.gradients, list(found))


def measure(trainer: Tensor, sampled: Tensor, mask: Tensor) -> dict[str, float]:
    delta = (trainer - sampled)[mask].double()
    ratio = delta.exp()
    if not delta.numel():
        return {}
    values = torch.stack([
        delta.abs().mean(), (ratio - 1 - delta).mean(), delta.min(), ratio.mean(), -trainer[mask].double().mean(),
        (trainer != sampled)[mask].double().sum(), torch.tensor(float(delta.numel()), device=delta.device),
    ])  # fmt: skip
    names = ("delta", "k3", "lowest", "ratio", "nll", "differing", "compared")
    return dict(zip(names, values.tolist(), strict=True))


# ---- one run ---------------------------------------------------------------------------------------------------------
class Bench:
    """What runs of one process share: weights of the start, trainers and engines by shape and kind."""

    def __init__(self, tasks: Tasks, *, shape: Shape, start: Tensor, device: str) -> None:
        self.tasks, self.shape, self.device = tasks, shape, torch.device(device)
        self.dtype = torch.bfloat16
        self.start = {1: start}
        self.shapes = {1: shape}
        self.trainers: dict[int, Trainer] = {}
        self.engines: dict[tuple[int, str, int], Engine] = {}

    def trainer(self, experts: int) -> Trainer:
        if experts not in self.trainers and self.trainers:  # two sizes of model in every process are too many
            self.trainers.clear()
            self.engines.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if experts not in self.shapes:
            self.shapes[experts] = replace(self.shape, experts=experts)
            self.start[experts] = upcycle(self.shape, self.start[1], self.shapes[experts])
        if experts not in self.trainers:
            shape, start = self.shapes[experts], self.start[experts]
            self.trainers[experts] = Trainer(shape, start, device=self.device, dtype=self.dtype)
        return self.trainers[experts]

    def engine(self, experts: int, kind: str, rows: int) -> Engine:
        key = (experts, kind, rows)
        if key not in self.engines:
            self.engines[key] = Engine(self.shapes[experts], kind, rows=rows, device=self.device, dtype=self.dtype)
        return self.engines[key]

    def held_out(self, trainer: Trainer, experts: int) -> dict[str, float]:
        """Greedy, with the trainer's weights, by the engine "kernels" whatever the arm; the mean of each kind."""
        questions = self.tasks.held_out
        engine = self.engine(experts, "kernels", len(questions))
        engine.load(trainer.flat)
        found: dict[str, list[float]] = {}
        said = self.texts(engine.generate([q.prompt_ids for q in questions], greedy=True))
        for question, ids in zip(questions, said, strict=True):
            found.setdefault(question.kind, []).append(self.tasks.reward(question, ids))
        return {kind: sum(values) / len(values) for kind, values in found.items()}

    def texts(self, rollout: Rollout) -> list[list[int]]:
        at = (rollout.lengths_B)[:, None] + torch.arange(ANSWER, device=self.device)
        rows, counts = rollout.ids_BT.gather(1, at).tolist(), rollout.mask_BA.sum(1).tolist()
        return [[i for i in ids[:n] if i != STOP] for ids, n in zip(rows, counts, strict=True)]

    def run(
        self, arm: Arm, *, seed: int, lr: float, steps: int, evaluate_every: int = 25, until: float = float("inf")
    ) -> dict[str, Any]:
        began = time.monotonic()
        torch.manual_seed(1000 + seed)
        order = random.Random(f"tasks/{seed}")
        trainer, engine = self.trainer(arm.experts), self.engine(arm.experts, arm.engine, ROWS)
        trainer.reset(self.start[arm.experts], lr)
        kept = [trainer.flat.clone()]  # the weights of the last batches, oldest first
        rows: list[dict[str, float]] = []
        held: list[tuple[int, dict[str, float]]] = [(0, self.held_out(trainer, arm.experts))]
        for step in range(steps):
            if time.monotonic() > until:
                break
            engine.load(kept[0])
            questions = [order.choice(self.tasks.train) for _ in range(GROUPS)]
            rollout = engine.generate([q.prompt_ids for q in questions for _ in range(SIZE)])
            said = self.texts(rollout)
            rewards = [self.tasks.reward(questions[row // SIZE], ids) for row, ids in enumerate(said)]
            row = trainer.train(rollout, torch.tensor(rewards, device=self.device), arm)
            kept = [*kept, trainer.flat.clone()][-1 - arm.lag :]
            rows.append({"reward": sum(rewards) / len(rewards), **row})
            if (step + 1) % evaluate_every == 0:
                held.append((step + 1, self.held_out(trainer, arm.experts)))
        return {
            "arm": arm.name, "seed": seed, "lr": lr, "steps": len(rows), "asked": steps,
            "seconds": round(time.monotonic() - began, 1), "held_out": held, "rows": rows,
        }  # fmt: skip


def open_bench(model: Path, tasks: Path, *, vocabulary: int, device: str, kinds: Sequence[str] = ()) -> Bench:
    from safetensors.torch import load_file

    files = sorted(model.glob("*.safetensors"))
    state: dict[str, Tensor] = {}
    for file in files:
        state |= load_file(file)
    known, cut = load_tasks(tasks, model, vocabulary, kinds)
    shape = load_shape(model, vocabulary)
    return Bench(known, shape=shape, start=flatten(shape, state, cut), device=device)


# ---- many runs on one device -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arm: Arm
    seed: int
    lr: float
    steps: int

    @property
    def key(self) -> tuple[str, int, float, int]:
        return self.arm.name, self.seed, self.lr, self.steps


def work(asked: Any, answers: Any, options: Mapping[str, Any], until: float) -> None:
    torch.set_num_threads(1)
    bench = open_bench(**options)
    answers.put(None)
    while (job := asked.get()) is not None and time.monotonic() < until:
        try:
            result = bench.run(job.arm, seed=job.seed, lr=job.lr, steps=job.steps, until=until)
        except Exception as error:
            import traceback

            result = {"arm": job.arm.name, "seed": job.seed, "error": f"{error!r}", "trace": traceback.format_exc()}
        answers.put(result)


def run_all(
    batches: Sequence[Callable[[float], list[Job]]],
    out: Path,
    options: Mapping[str, Any],
    *,
    at_once: int,
    until: float,
) -> None:
    """Adds every run that ends to a file of `out`. A batch of jobs is made when the one before it has ended, from the
    steps per second until then."""
    from multiprocessing import get_context

    context = get_context("spawn")
    asked, answers = context.Queue(), context.Queue()
    workers = [context.Process(target=work, args=(asked, answers, options, until), daemon=True) for _ in range(at_once)]
    for each in workers:
        each.start()
    out.mkdir(parents=True, exist_ok=True)
    began, ready, speed = time.monotonic(), 0, 1.0
    for batch in batches:
        since, steps = time.monotonic(), 0
        jobs = batch(speed)
        for job in jobs:
            asked.put(job)
        left = len(jobs)
        while left and time.monotonic() < until + 5 and any(each.is_alive() for each in workers):
            try:
                result = answers.get(timeout=1)
            except queue.Empty:
                continue
            seconds = time.monotonic() - began
            if result is None:
                ready += 1
                print(f"[{seconds:6.1f} s] {ready} of {at_once} processes are ready", flush=True)
                since = time.monotonic()
                continue
            left, steps, result = left - 1, steps + result.get("steps", 0), compact(result)
            with (out / ("tuning.jsonl" if result["seed"] >= TUNING_SEED else "grid.jsonl")).open("a") as file:
                file.write(json.dumps(result) + "\n")
            speed = steps / max(1e-3, time.monotonic() - since)
            said = (
                result.get("error") or f"held-out {late(result):.3f}, {result['steps']} steps in {result['seconds']} s"
            )
            where = f"{result['arm']}, seed {result['seed']}, lr {result.get('lr')}"
            print(f"[{seconds:6.1f} s] {left} left, {speed:.0f} steps/s; {where}: {said}", flush=True)
    for each in workers:
        each.kill()


def late(run: Mapping[str, Any]) -> float:
    """The mean held-out reward over the last half of the run's evaluations: what a run is judged by."""
    values = [sum(found) / len(found) for step, *found in run["held_out"] if step]
    values = values[len(values) // 2 :]
    return sum(values) / len(values) if values else float("nan")


EVERY = 5  # steps per value on file


def compact(result: dict[str, Any]) -> dict[str, Any]:
    """Curves as means of five steps; a run that was cut off says so by `steps` < `asked`."""
    if "rows" not in result:
        return result
    rows, worst = result.pop("rows"), {"lowest": min, "norm": max, "differing": sum, "compared": sum}
    curves: dict[str, list[float]] = {}
    for start in range(0, len(rows), EVERY):
        part = rows[start : start + EVERY]
        for name in sorted({name for row in part for name in row}):
            values = [row[name] for row in part if name in row]
            value = worst[name](values) if name in worst else sum(values) / len(values)
            curves.setdefault(name, []).append(float(f"{value:.3g}"))
    held = [[step, *(round(value, 3) for value in found.values())] for step, found in result["held_out"]]
    kinds = list(result["held_out"][0][1])
    return {**result, "held_out": held, "kinds": kinds, "curves": curves}


def read_runs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


RATES = (5e-6, 1.5e-5, 3e-5)
TUNED = ("exact", "fp8", "stale")  # the other sources take the rate of their method
TUNING_SEED = 100
CORE = 5  # seeds of the arms that claims are about, before anything else


def is_core(arm: Arm) -> bool:
    few = ("exact", "bypass", "recompute", "recompute + TIS", "score centering")
    return arm.source in ("exact", "fp8") or (arm.source in ("kernels", "stale") and arm.method in few)


def tuning_jobs(steps: int) -> list[Job]:
    chosen = [arm for arm in arms() if arm.source in TUNED and is_core(arm)]
    return [Job(arm=arm, seed=TUNING_SEED, lr=lr, steps=steps) for arm in chosen for lr in RATES]


def choose_rates(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The rate of the highest held-out reward, per method: stale arms apart, the others' sources together."""
    scores: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        if "curves" in run and run["steps"] == run["asked"]:
            scores.setdefault(rate_key(run["arm"]), {}).setdefault(run["lr"], []).append(late(run))
    return {key: max(found, key=lambda lr: sum(found[lr]) / len(found[lr])) for key, found in scores.items() if found}


def rate_key(arm: str) -> str:
    source, _, method = arm.partition(": ")
    return ("stale: " if source == "stale" else "") + method.removesuffix(" + replay")


def main_jobs(rates: Mapping[str, float], seeds: Sequence[int], steps: int, known: set[tuple[Any, ...]]) -> list[Job]:
    """All core arms of the first seed, then of the next: a cut-off costs seeds and not arms."""
    default = sorted(rates.values())[len(rates) // 2] if rates else RATES[1]
    jobs = [
        Job(arm=arm, seed=seed, lr=rates.get(rate_key(arm.name), default), steps=steps)
        for part in (seeds[:CORE], seeds[CORE:])
        for core in (True, False)
        for seed in part
        for arm in arms()
        if is_core(arm) == core
    ]
    return [job for job in jobs if job.key not in known]


def choose_steps(speed: float, seconds: float) -> int:
    """As many as `CORE` seeds of the core arms can have, in fifties; 300 at most."""
    runs = CORE * sum(is_core(arm) for arm in arms())
    return min(300, max(100, int(speed * seconds / runs) // 25 * 25))


def start_sharing() -> None:
    """CUDA's multi-process service, so that kernels of several runs are on the device at once."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return
    for name in ("PIPE", "LOG"):
        os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = f"/tmp/mps-{name.lower()}"
        Path(f"/tmp/mps-{name.lower()}").mkdir(exist_ok=True)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False, timeout=20)


def stop_sharing() -> None:
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=10, check=False)


DATA = Path(__file__).parent / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("rates", "tune", "run", "all"), help="all: tune and run")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, default=DATA / "tasks.jsonl")
    parser.add_argument("--kinds", default="", help="with commas between them; all of the file otherwise")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=14, help="runs at a time")
    parser.add_argument("--seeds", default="0:5", help="FIRST:END")
    parser.add_argument("--steps", type=int, default=300, help="0: as many as five seeds can have by the deadline")
    parser.add_argument("--tuning-steps", type=int, default=100)
    parser.add_argument("--only", default="", help="arms whose name holds this text")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds")
    parser.add_argument("--out", type=Path, default=DATA)
    given = parser.parse_args()
    until = time.monotonic() + given.deadline
    options = {
        "model": given.model, "tasks": given.tasks, "vocabulary": given.vocabulary, "device": given.device,
        "kinds": tuple(kind for kind in given.kinds.split(",") if kind),
    }  # fmt: skip
    if given.action == "rates":
        show_base_rates(open_bench(**options))
        return
    first, _, end = given.seeds.partition(":")

    def tune(_: float) -> list[Job]:
        return [job for job in tuning_jobs(given.tuning_steps) if given.only in job.arm.name]

    def run(speed: float) -> list[Job]:
        rates = choose_rates(read_runs(given.out / "tuning.jsonl"))
        steps = given.steps or choose_steps(speed, until - time.monotonic())
        print(f"{steps} steps; learning rates: {rates}", flush=True)
        kept = read_runs(given.out / "grid.jsonl")
        known = {(run["arm"], run["seed"], run["lr"], run["asked"]) for run in kept if "curves" in run}
        jobs = main_jobs(rates, range(int(first), int(end)), steps, known)
        return [job for job in jobs if given.only in job.arm.name]

    batches = {"tune": [tune], "run": [run], "all": [tune, run]}[given.action]
    if given.device == "cuda":
        start_sharing()
    try:
        run_all(batches, given.out, options, at_once=given.jobs, until=until)
    finally:
        stop_sharing()


def show_base_rates(bench: Bench) -> None:
    """Rewards before any training, of 16 questions of each kind, 8 samples each."""
    bench.trainer(1)
    engine = bench.engine(1, "kernels", 128)
    engine.load(bench.trainer(1).flat)
    for kind in dict.fromkeys(q.kind for q in bench.tasks.train):
        questions = [q for q in bench.tasks.train if q.kind == kind][:16]
        if len(questions) == 16:
            rollout = engine.generate([q.prompt_ids for q in questions for _ in range(8)])
            said = bench.texts(rollout)
            rewards = [bench.tasks.reward(questions[row // 8], ids) for row, ids in enumerate(said)]
            mixed = sum(0 < sum(rewards[row : row + 8]) < 8 for row in range(0, 128, 8))
            tokens = sum(map(len, said)) / 128
            shown = " | ".join(repr(bench.tasks.decode(said[row]))[:44] for row in range(0, 128, 24))
            print(f"{kind}: {sum(rewards) / 128:.3f}, {mixed} of 16 mixed, {tokens:.1f} tokens; {shown}", flush=True)


if __name__ == "__main__":
    main()
