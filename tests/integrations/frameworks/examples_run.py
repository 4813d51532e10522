"""A file of examples/trainers does a rollout with its framework's own types: `python examples_run.py FOLDER NAME`."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc,assignment]  # SkyRL 0.3.0 needs it on Python 3.11
sys.path.insert(0, str(Path(__file__).parent.parent.parent.parent / "examples" / "trainers"))

from common import tell  # noqa: E402

QUESTION, EXPECTED = "What is 12 + 7?", "19"
MESSAGES = [{"role": "user", "content": QUESTION}]


async def run_verl() -> int:
    kind = importlib.import_module("verl_loop").GatewayLoop
    loop = kind.__new__(kind)  # verl's constructor wants its servers; the rollout does not
    loop.rollout_config, loop.processor = SimpleNamespace(prompt_length=512, response_length=512), None
    made = await loop.run({"temperature": 1.0}, raw_prompt=MESSAGES, reward_model={"ground_truth": EXPECTED}, uid="q")
    return sum(made.response_mask)


async def run_slime() -> int:
    from slime.utils.types import Sample

    generate = importlib.import_module("slime_generate").generate
    made = await generate(None, Sample(prompt=QUESTION, label=EXPECTED, index=0, group_index=0), {"temperature": 1.0})
    return sum(made[0].loss_mask)


async def run_skyrl() -> int:
    from skyrl.train.generators.base import TrajectoryID

    batch: Any = {
        "prompts": [MESSAGES], "env_classes": ["q"], "env_extras": [{"reward_spec": {"ground_truth": EXPECTED}}],
        "sampling_params": {}, "trajectory_ids": [TrajectoryID("q", 0)], "batch_metadata": None,
    }  # fmt: skip
    made = await importlib.import_module("skyrl_generator").make_generator().generate(batch)
    return sum(made["loss_masks"][0])


async def run_areal() -> int:
    made = (
        await importlib.import_module("areal_workflow")
        .make_workflow()
        .arun_episode(None, {"question": QUESTION, "answer": EXPECTED})
    )
    return int(made["loss_mask"].sum())


async def run_openrlhf() -> int:
    executor = importlib.import_module("openrlhf_agent").AgentExecutor()
    made = await executor.execute(QUESTION, EXPECTED, SimpleNamespace(temperature=1.0), 1024, None, None)
    return sum(end - start for start, end in made["action_ranges"])


async def run_tinker() -> int:
    return len(await asyncio.to_thread(importlib.import_module("tinker_datums").make_datums))


async def run_prime_rl() -> int:
    return len(await asyncio.to_thread(importlib.import_module("prime_rl_samples").make_samples))


RUNS = {
    "verl": run_verl, "slime": run_slime, "skyrl": run_skyrl, "areal": run_areal, "openrlhf": run_openrlhf,
    "tinker": run_tinker, "prime_rl": run_prime_rl,
}  # fmt: skip

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tell(made=asyncio.run(RUNS[sys.argv[2]]()))
