"""bfloat16 with master weights against float32, on one GPU: the same learning curve, what a step takes, what it needs
in memory.

A Qwen3 of 123M random weights learns from scratch, by GRPO on the exact engine, to answer with even or odd token ids as
the prompt says. Every token of every step is compared with the trainer's own log-probability in every bit. As a
contrast, one run has its master weights rounded to bfloat16 after every update, which is training in bfloat16 alone.

    python -m tests.gpu.precision                                    # about 4 minutes of an H200; all runs at once,
    then each dtype alone
    python -m tests.gpu.precision --device cpu --shape tiny --lr 3e-3 --steps 20 --seeds 0 1      # a trial without a
    GPU
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.train.rows import sample_of
from tokentrue.engine import ExactEngine
from tokentrue.mismatch import loss_named
from tokentrue.train import Groups, OptimConfig, Publisher, TrainConfig, Trainer, train
from tokentrue.types import Sampling

VOCABULARY, PROMPT, SAMPLED = 512, 7, 16
GROUPS, SIZE = 16, 8
SHAPES: Mapping[str, Mapping[str, int]] = {
    "123M": {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "head_dim": 128,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 64,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    },
}
ARMS = {"float32": "float32", "bfloat16": "bfloat16", "bfloat16 alone": "bfloat16"}
WINDOW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arm: str
    seed: int
    steps: int
    shape: str
    device: str
    lr: float


def model_of(shape: str, seed: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**settings, **SHAPES[shape]))


class ParityRounds:
    """Half of the prompts ask for even ids, half for odd ones. The reward is the share of sampled ids that are as asked
    for."""

    def __init__(self, engine: ExactEngine, seed: int) -> None:
        self.engine, self.seed = engine, seed

    async def play(self, number: int) -> Groups:
        return list(await asyncio.gather(*(self._group(number, place) for place in range(GROUPS))))

    async def _group(self, number: int, place: int) -> list[Any]:
        chance = random.Random(repr((self.seed, number, place)))
        wanted = place % 2
        prompt = [chance.randrange(2, VOCABULARY) if t % 2 else wanted for t in range(PROMPT)]
        made: list[Any] = []
        settings = [
            Sampling(max_tokens=SAMPLED, seed=chance.randrange(2**31), extra={"ignore_eos": True}) for _ in range(SIZE)
        ]
        for index, done in enumerate(await asyncio.gather(*(self.engine.generate(prompt, each) for each in settings))):
            ids = [*prompt, *done.token_ids]
            reward = sum(token % 2 == wanted for token in done.token_ids) / SAMPLED
            given = [t < PROMPT for t in range(len(ids))]
            logprobs = [*[0.0] * PROMPT, *done.logprobs]
            name, group = f"{number}-{place}-{index}", f"{number}-{place}"
            made.append(
                sample_of(ids, given, logprobs, name=name, group=group, reward=reward, version=self.engine.version)
            )
        return made


def run_job(job: Job) -> dict[str, Any]:
    """One run: its rewards step by step, the seconds of its parts, its peak memory."""
    dtype = ARMS[job.arm]
    model = model_of(job.shape, seed=job.seed).to(device=job.device, dtype=getattr(torch, dtype))
    engine = ExactEngine(copy.deepcopy(model), job.device, dtype, max_len=256, kv_tokens=GROUPS * SIZE * 64, version=0)
    config = TrainConfig(steps=job.steps, micro_tokens=8192, seed=job.seed, max_idle_steps=job.steps)
    trainer = Trainer(model, config=config, optim=OptimConfig(lr=job.lr), loss=loss_named("dapo"))
    rewards: list[float] = []
    seconds: list[Mapping[str, float]] = []
    compared = 0

    def on_step(report: Any, took: Mapping[str, float]) -> None:
        nonlocal compared
        rewards.append(report.metrics["reward"])
        seconds.append(dict(took))
        compared += report.agreement.compared
        if job.arm == "bfloat16 alone":
            forget_masters(trainer)
        if job.device == "cuda" and len(rewards) == 1:  # without what start-up took
            torch.cuda.reset_peak_memory_stats()

    began = time.perf_counter()
    with engine:
        asyncio.run(train(trainer, ParityRounds(engine, job.seed), Publisher(engine), on_step=on_step))
    peak = torch.cuda.max_memory_allocated() / 2**30 if job.device == "cuda" else 0.0
    parts = {
        name: median([each[name] for each in seconds[2:] or seconds])
        for name in ("step", "wait", "recompute", "update", "publish")
    }
    size = sum(parameter.numel() for parameter in model.parameters())
    whole = time.perf_counter() - began
    return {
        "rewards": rewards,
        "seconds": parts,
        "peak": peak,
        "parameters": size,
        "compared": compared,
        "whole": whole,
    }


@torch.no_grad()
def forget_masters(trainer: Trainer) -> None:
    """Training in bfloat16 alone: what the rounded weights do not hold is lost."""
    own = dict(trainer.model.named_parameters())
    for name, master in trainer.masters.copies.items():
        master.copy_(own[name])


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def start(job: Job) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "tests.gpu.precision", "--arm", job.arm, "--seeds", str(job.seed), "--steps", str(job.steps),
        "--shape", job.shape, "--device", job.device, "--lr", str(job.lr),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], job: Job) -> dict[str, Any]:
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{job.arm}, seed {job.seed}: exit code {process.returncode}")
    found = json.loads(out.splitlines()[-1])
    print(
        f"{job.arm}, seed {job.seed}: reward {found['rewards'][0]:.3f} → {found['rewards'][-1]:.3f}",
        file=sys.stderr,
        flush=True,
    )
    return found


def windows(curves: Sequence[Sequence[float]]) -> list[list[float]]:
    """The mean of each run over each window of steps."""
    return [
        [sum(c[at : at + WINDOW]) / len(c[at : at + WINDOW]) for c in curves] for at in range(0, len(curves[0]), WINDOW)
    ]


def show_curves(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Prints the curves; True where the means of the two precisions are never further apart than the seeds of one of
    them."""
    curves = {arm: windows([run["rewards"] for run in runs]) for arm, runs in found.items()}
    print(
        "\n| steps | float32, mean (spread) | bfloat16, mean (spread) | difference | within the spread | bfloat16 alone |"
    )
    print("|---|---|---|---|---|---|")
    alike = True
    for number, (wide, narrow, alone) in enumerate(zip(*(curves[arm] for arm in ARMS), strict=True)):
        means = [sum(values) / len(values) for values in (wide, narrow)]
        spread = max(max(values) - min(values) for values in (wide, narrow))
        within = abs(means[0] - means[1]) <= spread
        alike = alike and within
        cells = [f"{m:.3f} ({min(v):.3f} to {max(v):.3f})" for m, v in zip(means, (wide, narrow), strict=True)]
        first = number * WINDOW
        print(
            f"| {first + 1} to {first + WINDOW} | {cells[0]} | {cells[1]} | {means[1] - means[0]:+.3f} | {'yes' if within else 'no'} "
            f"| {sum(alone) / len(alone):.3f} |"
        )
    return alike


def show_costs(found: Mapping[str, Mapping[str, Any]]) -> None:
    print("\n| alone on the device | s a step | rollouts | recompute | update | publish | peak memory, GiB |")
    print("|---|---|---|---|---|---|---|")
    for arm, run in found.items():
        s = run["seconds"]
        cells = " | ".join(f"{s[name]:.3f}" for name in ("step", "wait", "recompute", "update", "publish"))
        print(f"| {arm} | {cells} | {run['peak']:.2f} |")


def show_setting(done: Sequence[tuple[Job, Mapping[str, Any]]], lr: float) -> None:
    size, seeds = done[0][1]["parameters"] / 1e6, sorted({job.seed for job, _ in done})
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    compared = sum(run["compared"] for _, run in done)
    print(
        f"{size:.1f}M parameters, lr {lr:g}, {GROUPS} groups of {SIZE}, seeds {seeds}; {name}, torch {torch.__version__}"
    )
    print(
        f"{compared:,} log-probabilities of engine and trainer compared in every bit, none differs (a run stops where one does)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="bfloat16 with master weights against float32.")
    parser.add_argument("--arm", choices=ARMS, help="one run in this process; prints a line of JSON")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shape", choices=SHAPES, default="123M")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lr", type=float, default=3e-5)
    options = parser.parse_args()

    def job(arm: str, seed: int, steps: int) -> Job:
        return Job(arm=arm, seed=seed, steps=steps, shape=options.shape, device=options.device, lr=options.lr)

    if options.arm is not None:
        print(json.dumps(run_job(job(options.arm, options.seeds[0], options.steps))))
        return 0
    began = time.perf_counter()
    jobs = [
        job(arm, seed, options.steps)
        for arm in ARMS
        for seed in (options.seeds if arm != "bfloat16 alone" else options.seeds[:1])
    ]
    at_once = jobs if options.device != "cpu" else []
    started = [(each, start(each)) for each in at_once]
    done = [(each, finish(process, each)) for each, process in started] or [
        (each, finish(start(each), each)) for each in jobs
    ]
    found = {arm: [run for each, run in done if each.arm == arm] for arm in ARMS}
    costs = {arm: finish(start(each), each) for arm in ("float32", "bfloat16") for each in [job(arm, 0, 10)]}
    show_setting(done, options.lr)
    alike = show_curves(found)
    show_costs(costs)
    print(
        f"\nsame learning curve within the spread of the seeds: {'yes' if alike else 'no'}; {time.perf_counter() - began:.0f} s in all"
    )
    return 0 if alike else 1


if __name__ == "__main__":
    raise SystemExit(main())
