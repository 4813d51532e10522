"""TRL's real GRPOTrainer on rollouts with images: prints how far its log-probabilities are from the engine's.
`python trl_images_run.py MODEL OUT`; the gateway is in the environment.

`swapped` trains on the same rows with other pictures of the same size.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from PIL import Image, ImageOps
from transformers import Qwen3VLForConditionalGeneration
from trl import GRPOConfig, GRPOTrainer

from tests.integrations.seeing import load_processor, look_twice
from tokentrue.errors import TokenTrueError
from tokentrue.integrations import trl as adapter

URL, KEY = os.environ["TOKENTRUE_URL"], os.environ["TOKENTRUE_ADMIN_KEY"]


def train(model: Path, out: str, *, swapped: bool = False, carried: bool = True) -> dict[str, Any]:
    config = GRPOConfig(
        output_dir=out, max_steps=1, num_generations=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        steps_per_generation=2, temperature=1.0, learning_rate=1e-6, report_to="none", save_strategy="no", use_cpu=True,
        bf16=False, max_completion_length=512, disable_tqdm=True, logging_steps=1, beta=0.0,
    )  # fmt: skip
    play, given = adapter.rollout_func(look_twice, url=URL, admin_key=KEY), list[Any]()

    def watched(prompts: Any, trainer: Any) -> dict[str, list[Any]]:
        columns = play(prompts, trainer)
        given.extend(columns["images"])
        if swapped:
            columns["images"] = [[ImageOps.invert(image) for image in row] for row in columns["images"]]
        return columns

    trainer = GRPOTrainer(
        model=Qwen3VLForConditionalGeneration.from_pretrained(model),
        processing_class=load_processor(model),
        reward_funcs=adapter.reward_from_rollout,
        train_dataset=Dataset.from_list([{"prompt": "Colour?"}, {"prompt": "Shape?"}]),
        args=config,
        rollout_func=watched,
    )
    adapter.correct_with_gateway_logprobs(trainer, lambda model, step: None)
    if carried:
        adapter.carry_images(trainer)
    trainer.train()
    (entry,) = [each for each in trainer.state.log_history if "sampling/sampling_logp_difference/max" in each]
    assert all(isinstance(image, Image.Image) and image.size == (32, 48) for row in given for image in row)
    return {"images": [len(row) for row in given], "apart": entry["sampling/sampling_logp_difference/max"]}


def main(model: str, out: str) -> None:
    told: dict[str, Any] = {"true": train(Path(model), out), "swapped": train(Path(model), out, swapped=True)}
    try:
        train(Path(model), out, carried=False)
    except TokenTrueError as error:
        told["refused"] = str(error)
    print("RESULT " + json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
