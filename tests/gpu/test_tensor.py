"""Leaves and ranks on one GPU: sums by the kernels at every size, engines of processes that share the device."""

from __future__ import annotations

import copy

import torch

from tests.gpu.test_engine import model_of


def test_sums_do_not_depend_on_rows_or_ranks() -> None:
    """Ranks simulated one after the other; the tree itself against plain float32 additions of one leaf each."""
    from tokentrue.numerics import same_bits
    from tokentrue.numerics.exact import ops_for
    from tokentrue.numerics.leaves import leaves_agree, randn
    from tokentrue.numerics.ops import join

    where = torch.device("cuda")

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ops = ops_for("cuda", 8)
        for shape in [(1024, 256), (768, 256), (4096, 4096)][: 1 if dtype == torch.float32 else 3]:
            assert leaves_agree(ops, *shape, dtype, where), (shape, dtype)
        for rows in (1, 40, 300):
            x, w, b = (randn(*shape, dtype=dtype, device=where) for shape in ((rows, 2048), (512, 2048), (512,)))
            single = [
                ops.leaf_product(p.contiguous(), q.contiguous(), None, 1, rounded=False)
                for p, q in zip(x.chunk(8, -1), w.chunk(8, -1), strict=True)
            ]
            wanted = join(single) + b.float()
            assert same_bits(ops.leaf_product(x, w, b, 8), wanted.to(dtype)), (dtype, rows)
            in_order = sum(single[1:], single[0]) + b.float()
            assert not same_bits(in_order, wanted), "the control: another order has other bits"


def check_sizes(family: str, sizes: tuple[int, ...]) -> None:
    """Engines of processes that share the device have one process's answers, and the trainer's bits."""
    from benchmarks.gpu import runs
    from benchmarks.gpu.random_models import prompts_of
    from tokentrue.engine import ExactEngine

    prompts, samplings = prompts_of(8, 150, seed=1), [runs.plain(16, seed=i) for i in range(8)]
    model, found = model_of(family), []
    for size in sizes:
        with ExactEngine(
            copy.deepcopy(model), "cuda", "bfloat16", tensor=size, leaves=8, max_len=4096, kv_tokens=24_000
        ) as engine:
            run = runs.generate(engine, prompts, samplings)
        assert runs.count_differing(model, run, 8) == (0, 128), (family, size)
        found.append([(c.token_ids, c.logprobs, c.fingerprint) for c in run.completions])
    assert all(one == found[0] for one in found), family


def test_a_dense_model_over_two_processes() -> None:
    check_sizes("Qwen3", (1, 2))


def test_a_mixture_over_four_processes() -> None:
    check_sizes("Qwen3Moe", (1, 4))
