"""One rank and several, each with an exact engine of its own, on one GPU: bits, and where the time of a step goes.

    python -m tests.gpu.ranks [--device cuda] [--shape 120M] [--ranks 1 2] [--steps 5]

Random weights in a shape of Qwen3. Every rank samples its part of the groups with its engine, all ranks train the
shards of one model (FSDP2; gloo where they share a GPU), and the weights go back to every engine. The reward is the
share of even token ids, which a policy can learn.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.gpu import host_collectives
from tokentrue.engine import ExactEngine
from tokentrue.mismatch import loss_named
from tokentrue.train import OptimConfig, Publisher, Ranks, TrainConfig, Trainer, join, leave, shard, train
from tokentrue.train.rows import Groups
from tokentrue.types import Certificate, Completion, Sample, Sampling, Span

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "vocab_size": 512},
    "120M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
             "head_dim": 64, "vocab_size": 32000},
    "600M": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
PROMPT = 64


def model_of(shape: str, device: str, dtype: torch.dtype) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        max_position_embeddings=2048, tie_word_embeddings=True, attn_implementation="eager", **SHAPES[shape]
    )  # type: ignore[arg-type]
    return Qwen3ForCausalLM(config).to(device=device, dtype=dtype)


class EngineRounds:
    """Groups of samples of seeded random prompts; this rank plays its part of the groups."""

    def __init__(
        self, engine: ExactEngine, ranks: Ranks, *, groups: int, size: int, tokens: int, vocabulary: int
    ) -> None:
        self._engine, self._ranks = engine, ranks
        self._groups, self._size, self._tokens, self._vocabulary = groups, size, tokens, vocabulary
        self.digests: dict[int, list[str]] = {}
        self.seconds: list[float] = []

    async def play(self, number: int) -> Groups:
        began = time.perf_counter()
        rank, world = self._ranks.rank, self._ranks.world
        mine = range(self._groups * rank // world, self._groups * (rank + 1) // world)
        groups = await asyncio.gather(*(self.group(number, index) for index in mine))
        self.seconds.append(time.perf_counter() - began)
        return list(groups)

    async def group(self, number: int, index: int) -> list[Sample]:
        chance = torch.Generator().manual_seed(1000 * number + index)
        prompt = torch.randint(0, self._vocabulary, (PROMPT,), generator=chance).tolist()
        asked = Sampling(max_tokens=self._tokens, seed=1000 * number + index, extra={"ignore_eos": True})
        found = await self._engine.generate_n(prompt, asked, self._size)
        self.digests.setdefault(number, []).append(digest_of(found))
        name = f"round-{number}/{index}"
        return [sample_of(prompt, completion, group=name, session=f"{name}/{i}") for i, completion in enumerate(found)]


def digest_of(found: list[Completion]) -> str:
    text = hashlib.sha256()
    for completion in found:
        text.update(struct.pack(f"<{len(completion.token_ids)}i", *completion.token_ids))
        text.update(struct.pack(f"<{len(completion.logprobs)}d", *completion.logprobs))
    return text.hexdigest()


def sample_of(prompt: list[int], completion: Completion, *, group: str, session: str) -> Sample:
    sampled = list(completion.token_ids)
    whole = len(prompt) + len(sampled)
    given = Span(
        start=0, end=len(prompt), kind="given", role="user", turn=0, policy_version=None, trainable=False, why="prompt"
    )
    version = completion.versions[0].version
    own = Span(
        start=len(prompt),
        end=whole,
        kind="sampled",
        role="assistant",
        turn=0,
        policy_version=version,
        trainable=True,
        why="sampled",
    )
    return Sample(
        sample_id=f"{session}/0",
        session_id=session,
        group=group,
        token_ids=[*prompt, *sampled],
        loss_mask=[0] * len(prompt) + [1] * len(sampled),
        rollout_logprobs=[None] * len(prompt) + list(completion.logprobs),
        spans=(given, own),
        reward=sum(token % 2 == 0 for token in sampled) / len(sampled),
        finish_reason="length",
        metadata={},
        certificate=Certificate(chain="sha256:0", template="sha256:0", tokenizer="sha256:0"),
    )


def work(options: argparse.Namespace) -> None:
    """One rank of one run; rank 0 writes what all ranks saw."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1"))))
    if options.device == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        host_collectives.register()
        torch.distributed.init_process_group(host_collectives.BACKEND)
    ranks = join(options.device)
    device = ranks.device or options.device
    name = "bfloat16" if device.startswith("cuda") else "float32"
    dtype = getattr(torch, name)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    room = options.groups * options.size * (PROMPT + options.tokens + 64)
    engine = ExactEngine(model_of(options.shape, device, dtype), device=device, dtype=name, version=0, kv_tokens=room)
    config = TrainConfig(steps=options.steps, micro_tokens=options.micro_tokens, checkpoint_activations=True)
    model = model_of(options.shape, device, dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer = Trainer(
        shard(model, ranks), config=config, optim=OptimConfig(lr=1e-4), loss=loss_named("dapo"), ranks=ranks
    )
    rounds = EngineRounds(
        engine, ranks, groups=options.groups, size=options.size, tokens=options.tokens, vocabulary=vocabulary
    )
    steps: list[dict[str, Any]] = []

    def note(report: Any, seconds: Any) -> None:
        kept = ("reward", "exact_compared", "exact_differing", "update/loss", "update/grad_norm", "tokens_trained")
        steps.append({**{key: report.metrics[key] for key in kept}, **dict(seconds)})

    asyncio.run(train(trainer, rounds, Publisher(engine), on_step=note))
    engine.close()
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else 0.0
    found = ranks.all_gather_object((rounds.digests.get(0, []), peak, rounds.seconds))
    if ranks.first:
        first = hashlib.sha256("".join(digest for digests, _, _ in found for digest in digests).encode()).hexdigest()
        seen = {
            "steps": steps,
            "first_round": first,
            "peak_gib": [peak for _, peak, _ in found],
            "play_s": [s for _, _, s in found],
        }
        Path(options.out).write_text(json.dumps(seen))
    leave()


def run(options: argparse.Namespace, world: int, folder: Path) -> dict[str, Any]:
    out = folder / f"{world}.json"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    kept = [
        f"--{key.replace('_', '-')}={getattr(options, key)}"
        for key in ("device", "shape", "steps", "groups", "size", "tokens", "micro_tokens")
    ]
    command = [sys.executable, *launch, "-m", "tests.gpu.ranks", "--worker", f"--out={out}", *kept]
    done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout_s)
    if done.returncode:
        raise SystemExit(f"{world} ranks: exit status {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(out.read_text())


def table(results: dict[int, dict[str, Any]]) -> list[str]:
    """Medians of all steps but the first, which compiles kernels and captures graphs."""
    columns = (
        "ranks",
        "round s",
        "sampled tok/s",
        "recompute s",
        "update s",
        "publish s",
        "step s",
        "differ",
        "first norm",
        "last reward",
    )
    lines = [f"| {' | '.join((*columns, 'peak GiB per rank'))} |", "|" + "---|" * (len(columns) + 1)]
    for world, seen in results.items():
        later = seen["steps"][1:] or seen["steps"]
        took = {
            key: statistics.median(step[key] for step in later)
            for key in ("wait", "recompute", "update", "publish", "step")
        }
        tokens = statistics.median(step["tokens_trained"] for step in later)
        differ, compared = (
            int(sum(step[key] for step in seen["steps"])) for key in ("exact_differing", "exact_compared")
        )
        peaks = ", ".join(f"{peak:.1f}" for peak in seen["peak_gib"])
        lines.append(
            f"| {world} | {took['wait']:.2f} | {tokens / took['wait']:,.0f} | {took['recompute']:.2f} | {took['update']:.2f} "
            f"| {took['publish']:.3f} | {took['step']:.2f} | {differ} of {compared:,} | {seen['steps'][0]['update/grad_norm']:.6f} "
            f"| {seen['steps'][-1]['reward']:.4f} | {peaks} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="120M", choices=SHAPES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--timeout-s", type=float, default=150.0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = {world: run(options, world, Path(folder)) for world in options.ranks}
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{os.cpu_count()} cores"
    print(
        f"{where}, torch {torch.__version__}, {options.shape}: {options.groups} groups × {options.size}, {options.tokens} tokens each"
    )
    print("\n".join(table(results)))
    same = len({seen["first_round"] for seen in results.values()}) == 1
    print(
        f"first round, tokens and log-probabilities: {'the same bits' if same else 'DIFFERENT bits'} on {options.ranks} ranks"
    )
    differing = sum(step["exact_differing"] for seen in results.values() for step in seen["steps"])
    return 0 if same and not differing else 1


if __name__ == "__main__":
    raise SystemExit(main())
