"""The peer in the GPU benchmark: VeXact's own engine on the same random model and load, in a process of its own.

    python -m tokentrue.bench.vexact_peer CHECKOUT MODEL_DIR PROMPT OUTPUT COUNT [COUNT …]

CHECKOUT holds the package `vexact` and, under `deps`, what it imports beyond torch and transformers (msgspec, pyzmq). Its dense path is
used as it stands, with its Triton attention and CUDA graphs; flash-attn's cross entropy, which it asks for, is stood in for by a
log-softmax. Prints one JSON line: {"count": tokens per second, …}.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CROSS_ENTROPY = """
import torch

def cross_entropy_loss(logits, labels, inplace_backward=False):
    table = torch.log_softmax(logits.float(), dim=-1)
    return -table.gather(-1, labels.unsqueeze(-1)).squeeze(-1), None
"""


def stand_in() -> str:
    """A folder with a `flash_attn.ops.triton.cross_entropy` of one function."""
    root = Path(tempfile.mkdtemp(prefix="flash-attn-stand-in-"))
    folder = root / "flash_attn" / "ops" / "triton"
    folder.mkdir(parents=True)
    for at in (folder, folder.parent, folder.parent.parent):
        (at / "__init__.py").write_text("")
    (folder / "cross_entropy.py").write_text(CROSS_ENTROPY)
    return str(root)


def main(checkout: str, model_dir: str, prompt: int, output: int, counts: list[int]) -> None:
    paths = [checkout, str(Path(checkout) / "deps"), stand_in()]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    os.environ["VEXACT_DISABLE_MODEL_PATCH"] = "1"
    from transformers import GenerationConfig
    from vexact.config import CacheConfig, DriverConfig, ModelConfig, SchedulerConfig, VeXactConfig  # pyright: ignore
    from vexact.core.request import DriverRequest  # pyright: ignore
    from vexact.engine import VeXact  # pyright: ignore

    VeXact._load_tokenizer = lambda self: None  # ids in, ids out: a random model has no tokenizer
    engine: Any = VeXact(
        VeXactConfig(
            model=ModelConfig(model_path=model_dir, attn_impl="triton-invariant", max_model_len=4096),
            driver=DriverConfig(is_worker_proc_managed=True),
            cache=CacheConfig(max_cache_blocks=2048),
            scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
        )
    )
    chance = random.Random(1)

    async def load(count: int, tokens: int) -> float:
        requests = [
            DriverRequest(
                generation_config=GenerationConfig(max_new_tokens=tokens, max_length=4096, do_sample=False, top_p=1.0, temperature=1.0),
                input_ids_list=[chance.randrange(1000, 100000) for _ in range(prompt)],
            )
            for _ in range(count)
        ]
        start = time.perf_counter()
        done = await asyncio.gather(*(engine.generate(request, timeout=300) for request in requests))
        spent = time.perf_counter() - start
        return sum(len(d.new_token_ids) for d in done) / spent

    async def measure() -> dict[str, float]:
        found = {}
        for count in counts:
            await load(count, 8)
            found[str(count)] = await load(count, output)
        return found

    try:
        print(json.dumps(asyncio.run(measure())), flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), [int(a) for a in sys.argv[5:]])
