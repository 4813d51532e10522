"""Two steps of TRL's real GRPOTrainer under torchrun: each rank writes the rollouts that it was given to OUT.RANK."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tokentrue.environments import SMALL_MODEL
from tokentrue.integrations.trl import reward_from_rollout, rollout_func

GENERATIONS = 8  # of one prompt, four on each rank


async def agent(client: Any, prompt: str) -> float:
    messages = [{"role": "user", "content": prompt}]
    answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
    return float(len(answer.choices[0].message.content or "") % 2)


def main(out: Path) -> None:
    settings = GRPOConfig(
        output_dir=str(out.parent / "trl"), max_steps=2, num_generations=GENERATIONS, per_device_train_batch_size=4,
        report_to="none", save_strategy="no", use_cpu=True, beta=0.0, max_completion_length=32, seed=1, disable_tqdm=True,
        shuffle_dataset=False, bf16=False,
    )  # fmt: skip
    run = rollout_func(agent, url=os.environ["TOKENTRUE_URL"], admin_key=os.environ["TOKENTRUE_ADMIN_KEY"], seed=7)
    given: list[dict[str, Any]] = []

    def watched(prompts: Any, trainer: Any) -> Any:
        columns = run(prompts, trainer)
        rows = zip(prompts, columns["completion_ids"], strict=True)
        given.extend({"step": trainer.state.global_step, "prompt": prompt, "ids": ids} for prompt, ids in rows)
        return columns

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(SMALL_MODEL),
        reward_funcs=reward_from_rollout,
        train_dataset=Dataset.from_list([{"prompt": f"What is {n} + {n}? Say why."} for n in range(8)]),
        args=settings,
        rollout_func=watched,
    )
    trainer.train()
    assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"])
    out.with_suffix(f".{trainer.accelerator.process_index}").write_text(json.dumps(given))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
