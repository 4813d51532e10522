"""TRL's asynchronous GRPO trainer on rows that a gateway recorded: an agent with a calculator tool, the shipped model.

Run on a GPU: python examples/trl_async_grpo.py [STEPS]. TRL's attention for packed rows is a CUDA kernel that it fetches.
Needs: the extra `engine`, `pip install trl`.
"""

import sys
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from tokentrue.app.background import BackgroundGateway
from tokentrue.environments import SMALL_MODEL, load_environment
from tokentrue.integrations.trl import WeightTransfer, rollout_worker


def train(steps: int, out: str = "out/trl-async", rows: int = 64, **more: Any) -> list[dict[str, float]]:
    """TRL's log, one entry per step of `rows` rows."""
    environment = load_environment("calculator", {})
    tasks = environment.tasks(64, seed=1)
    args = AsyncGRPOConfig(
        output_dir=out, max_steps=steps, num_generations=8, per_device_train_batch_size=rows, learning_rate=2e-4,
        gradient_accumulation_steps=1, logging_steps=1, report_to="none", save_strategy="no", seed=1, disable_tqdm=True,
        token_budget=0, max_staleness=1, dtype="float32", bf16=False, **more,
    )  # fmt: skip
    with BackgroundGateway(str(SMALL_MODEL)) as gateway:
        worker = rollout_worker(environment.run, tasks, args, url=gateway.url, admin_key=gateway.admin_key, seed=1)
        trainer = AsyncGRPOTrainer(
            model=str(SMALL_MODEL),
            processing_class=AutoTokenizer.from_pretrained(SMALL_MODEL),
            args=args,
            reward_funcs=[],  # the agent returns the reward
            train_dataset=Dataset.from_list([{"prompt": task.prompt} for task in tasks]),
            rollout_worker=worker,
            weight_transfer=WeightTransfer(lambda weights, version: gateway.publish(weights, version=version)),
        )
        trainer.train()
        return [entry for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    log = train(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print("mean reward per step:", " ".join(f"{entry['reward']:.2f}" for entry in log))
