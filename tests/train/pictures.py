"""Tasks with and without pictures, for a vision model with random weights; and that model."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples import images as example
from tokentrue.environments import Task
from tokentrue.environments.chat import ask


class Pictures:
    """Every second task has none. The reward is any function of the answer that groups disagree about."""

    name = "pictures"

    def tasks(self, count: int, *, seed: int = 0, split: str = "train") -> Sequence[Task]:
        random_ = random.Random(f"{split} {seed}")
        colours = list(example.COLOURS)
        return [Task(task_id=f"{random_.choice(colours)}/{seed}-{n}", prompt="What?") for n in range(count)]

    async def run(self, client: Any, task: Task) -> float:
        chat: list[Any] = [{"role": "user", "content": "Think of a colour. Which one is it, and why that one?"}]
        if task.task_id.endswith(("0", "2", "4")):
            chat = [example.ask(example.see(task.task_id))]
        chat.append(await ask(client, chat))
        said = await ask(client, [*chat, {"role": "user", "content": "Sure?"}])
        return zlib.crc32(str(said).encode()) % 7 / 7


def make_model(folder: Path) -> str:
    """Of the example, sharper, so that pictures change what it says."""
    folder.mkdir(parents=True, exist_ok=True)
    model = example.make_model(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_tokens" not in name:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return str(folder)
