"""Gradients that do not depend on the cut into micro-batches, and exactness under FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.world import VOCABULARY, build
from tokentrue.numerics import exact, same_bits, score


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in (30, 130, 17, 64)]


def grads_of(model: Any, cut: tuple[int, ...]) -> list[Tensor]:
    model.zero_grad()
    weights, start = torch.tensor([1.0, -0.5, 2.0, 0.25]), 0
    for end in (*cut, 4):
        with exact(model):  # a micro-batch: one backward pass for each of its sequences
            for index in range(start, end):
                logprobs = score(model, sequences()[index][None], temperature=0.9)[0]
                (-(weights[index] * logprobs).sum()).backward()
        start = end
    return [p.grad.clone() for p in model.parameters()]


def test_the_cut_into_micro_batches_changes_no_bit() -> None:
    model = build("qwen3")
    whole = grads_of(model, ())
    for cut in ((1,), (2,), (1, 3), (1, 2, 3)):
        assert all(same_bits(a, b) for a, b in zip(grads_of(model, cut), whole, strict=True)), cut


def test_ordinary_accumulation_does_depend_on_the_cut() -> None:
    """The control: batched backward passes of 2+2 and 3+1 rows differ in bits."""
    model = build("qwen3")
    ids = torch.randint(0, VOCABULARY, (4, 60), generator=torch.Generator().manual_seed(1))

    def grads(cut: int) -> list[Tensor]:
        model.zero_grad()
        with exact(model):
            for part in (ids[:cut], ids[cut:]):
                score(model, part).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert not all(same_bits(a, b) for a, b in zip(grads(2), grads(3), strict=True))


FSDP = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tests.engine.world import build, VOCABULARY
from tokentrue.numerics import exact, score, same_bits
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
ids = torch.randint(0, VOCABULARY, (4, 70), generator=torch.Generator().manual_seed(1))
plain = build("qwen3")
mine = ids[2 * rank : 2 * rank + 2]
with exact(plain):
    wanted = score(plain, mine)
    score(plain, ids).mean().backward()
model = build("qwen3")
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
with exact(model):
    found = score(model, mine)
    found.mean().backward()
assert same_bits(found.detach(), wanted.detach()), "bits differ under FSDP2"
worst = 0.0
for (name, a), b in zip(model.named_parameters(), plain.parameters()):
    full = a.grad.full_tensor()
    worst = max(worst, ((full - b.grad).norm() / b.grad.norm()).item())
assert worst < 1e-4, worst
assert "forward" not in model.model.norm.__dict__
os.write(1, b"ok %d\\n" % rank)  # in one piece: two processes share the pipe
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_fsdp2_scores_have_the_same_bits_and_gradients_flow() -> None:
    from pathlib import Path

    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [*launch, sys.executable, "-c", FSDP]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok 0" in done.stdout and "ok 1" in done.stdout
