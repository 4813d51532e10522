"""A pipeline of two stages on one GPU (hidden states through host memory): the bits of one process."""

from __future__ import annotations

import copy

from tests.gpu.test_engine import model_of


def test_two_stages_have_the_trainers_bits() -> None:
    from benchmarks.gpu import runs
    from benchmarks.gpu.random_models import prompts_of
    from tokentrue.engine import ExactEngine

    for family in ("Qwen3", "Qwen3Moe"):
        model = model_of(family)
        prompts, samplings = prompts_of(12, 150, seed=1), [runs.plain(40, seed=i) for i in range(12)]
        with ExactEngine(
            copy.deepcopy(model), "cuda", "bfloat16", pipeline=2, max_len=4096, kv_tokens=24_000
        ) as engine:
            run = runs.generate(engine, prompts, samplings)
            engine.load_weights(dict(model.state_dict()), version=2)
            again = runs.generate(engine, prompts[:2], samplings[:2])
        assert runs.count_differing(model, run) == (0, 480), family
        assert [c.logprobs for c in again.completions] == [c.logprobs for c in run.completions[:2]]
