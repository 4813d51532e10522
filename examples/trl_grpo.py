"""GRPO with TRL's own trainer, on rows that a gateway recorded: an agent with a calculator tool, the shipped model, a
CPU.

Needs: the extra `engine`, `pip install trl`.
Run: python examples/trl_grpo.py [STEPS]
"""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tokentrue.app.background import BackgroundGateway
from tokentrue.environments import SMALL_MODEL, load_environment
from tokentrue.integrations.trl import correct_with_gateway_logprobs, reward_from_rollout, rollout_func


def train(steps: int, out: str = "out/trl", rows: int = 64) -> list[dict[str, float]]:
    """TRL's log, one entry per step of `rows` rollouts."""
    environment = load_environment("calculator", {})
    tasks = {task.prompt: task for task in environment.tasks(steps * rows // 8, seed=1)}
    settings = GRPOConfig(
        output_dir=out, max_steps=steps, num_generations=8, per_device_train_batch_size=rows, learning_rate=2e-4, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, beta=0.0, max_completion_length=256, seed=1, disable_tqdm=True,
        loss_type="grpo", shuffle_dataset=False, bf16=False,
    )  # fmt: skip
    with BackgroundGateway(str(SMALL_MODEL)) as gateway:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype="float32"),
            processing_class=AutoTokenizer.from_pretrained(SMALL_MODEL),
            reward_funcs=reward_from_rollout,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in tasks]),
            args=settings,
            rollout_func=rollout_func(
                lambda client, prompt: environment.run(client, tasks[prompt]),
                url=gateway.url,
                admin_key=gateway.admin_key,
                seed=1,
            ),
        )
        correct_with_gateway_logprobs(trainer, lambda model, step: gateway.publish(model.state_dict(), version=step))
        trainer.train()
        return [entry for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    log = train(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print("mean reward per step:", " ".join(f"{entry['reward']:.2f}" for entry in log))
