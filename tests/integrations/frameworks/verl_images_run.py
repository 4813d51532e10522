"""verl 0.9.1 on rollouts with images: its agent-loop worker, processor call and M-RoPE positions; and rows of a
file. A forward pass of transformers on what verl made is compared with the engine's log-probabilities.

Ours: transformers' processor without its video part, which needs torchvision.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import GATEWAY, MODEL, record, tell
from verl import DataProto
from verl.experimental.agent_loop import agent_loop as verl_loops
from verl.utils.torch_functional import logprobs_from_logits

from tests.integrations.frameworks.verl_run import configure
from tests.integrations.seeing import load_processor, look_twice
from tokentrue.client import Client
from tokentrue.errors import ConfigError
from tokentrue.integrations.verl import agent_loop
from tokentrue.samples.files import write_samples
from tokentrue.samples.images import ImageFolder

Loop = agent_loop(look_twice, **GATEWAY)


def forward(batch: DataProto, row: int) -> float:
    """The largest difference between transformers' log-probabilities on verl's inputs and the engine's."""
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(MODEL)
    data, width = batch.batch, batch.batch["responses"].shape[1]
    inputs = dict(batch.non_tensor_batch["multi_modal_inputs"][row])
    inputs.pop("images_seqlens")
    with torch.no_grad():
        logits = model(
            input_ids=data["input_ids"][row : row + 1],
            attention_mask=data["attention_mask"][row : row + 1],
            position_ids=data["position_ids"][row : row + 1].transpose(0, 1),
            **inputs,
        ).logits
    found = logprobs_from_logits(logits[:, -width - 1 : -1], data["responses"][row : row + 1])
    apart = (found - data["rollout_log_probs"][row]) * data["response_mask"][row]
    return float(apart.abs().max())


async def exported(worker: Any, folder: Path) -> tuple[int, bool]:
    """verl's worker on the rows of a file; equal to what the loop gave it?"""
    import pyarrow.parquet as pq

    samples = list(record().values())
    out = folder / "samples.parquet"
    images = ImageFolder(out)
    with Client(**GATEWAY) as client:
        for sample in samples:
            images.write(sample, client.session_image)
    write_samples(samples, out, format="verl")
    equal = True
    rows = pq.read_table(out).to_pylist()
    for row, sample in zip(rows, samples, strict=True):
        row["multi_modal_data"]["images"] = [images.open(sha256) for sha256 in row["multi_modal_data"]["images"]]
        output = verl_loops.AgentLoopOutput(metrics=verl_loops.AgentLoopMetrics(), mm_processor_kwargs={}, **row)
        made = await worker._agent_loop_postprocess(output, False, raw_prompt=[{"role": "user", "content": ""}])
        ids = made.input_ids[made.attention_mask.bool()].tolist()
        grids = [tuple(grid) for grid in made.multi_modal_inputs["image_grid_thw"].tolist()]
        equal &= ids == list(sample.token_ids) and grids == [run.grid for run in sample.images]
    return len(rows), equal


async def main(folder: Path) -> None:
    transformers.AutoProcessor.from_pretrained = lambda *_, **__: load_processor(Path(MODEL))
    config = configure(folder)
    (folder / "loops.yaml").write_text("- name: one\n  _target_: verl_images_run.Loop\n")
    worker = verl_loops.AgentLoopWorker(config, llm_client=None)
    columns: dict[str, Any] = {
        "raw_prompt": np.array([[{"role": "user", "content": "Colour?"}], None], dtype=object)[:-1],
        "uid": np.array(["prompt-0"], dtype=object),
        "index": np.arange(1),
        "agent_name": np.array(["one"], dtype=object),
    }
    data = DataProto.from_dict(non_tensors=columns, meta_info={"global_steps": 1})
    batch = await worker.generate_sequences(data)
    apart = forward(batch, 0)
    pixels = batch.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"]
    pixels.copy_(-pixels)
    rows, equal = await exported(worker, folder)
    worker.processor.image_processor.size = {"shortest_edge": 1024, "longest_edge": 4096}
    refused = ""
    try:
        await worker.generate_sequences(data)
    except ConfigError as error:
        refused = str(error)
    tell(
        apart=apart,
        swapped=forward(batch, 0),
        positions=list(batch.batch["position_ids"].shape),
        rows=rows,
        equal=equal,
        refused=refused,
    )


if __name__ == "__main__":
    sys.modules["verl_images_run"] = sys.modules["__main__"]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    asyncio.run(main(Path(sys.argv[1])))
