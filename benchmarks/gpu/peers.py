"""Other engines in the GPU benchmark, each in a process of its own, on the same random weights and the same load.

    python -m benchmarks.gpu.peers {vllm,vllm-invariant,vexact} PLACE SHAPE OUTPUT COUNT [COUNT …]

PLACE of vLLM is a folder on the import path that holds it and what it imports beyond torch and transformers. It runs in
this process, with CUDA graphs and compilation, at temperature 1 with the log-probability of the sampled token, which is
compared with a forward of transformers (sdpa) over the same sequence; `vllm-invariant` sets VLLM_BATCH_INVARIANT=1.

PLACE of VeXact is a checkout that holds the package `vexact` and, under `deps`, what it imports beyond torch and
transformers (msgspec, pyzmq). Its dense path is used unchanged, greedy, with its Triton attention and CUDA graphs;
flash-attn's cross entropy, which it asks for, is stood in for by a log-softmax. Its bits are those of a trainer that it
patches itself; they are not compared.

Prints one JSON line for every count: {"count": …, "rate": tokens per second, "wrong": …, "total": …, "distance": mean
|difference|}.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PEERS = {"vllm": "TOKENTRUE_VLLM", "vllm-invariant": "TOKENTRUE_VLLM", "vexact": "TOKENTRUE_VEXACT"}
"""Peer → the variable that names its place."""
ROUNDS, COMPARED, ROWS = 3, 16, 4
TIMEOUT_S = 420

CROSS_ENTROPY = """
import torch

def cross_entropy_loss(logits, labels, inplace_backward=False):
    table = torch.log_softmax(logits.float(), dim=-1)
    return -table.gather(-1, labels.unsqueeze(-1)).squeeze(-1), None
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """A speed, and how many log-probabilities differ from a trainer's forward; `total` is 0 where they are not
    compared."""

    count: int
    rate: float
    wrong: int = 0
    total: int = 0
    distance: float = 0.0


def is_available(name: str) -> bool:
    return bool(os.environ.get(PEERS[name]))


def measure_peers(
    names: Sequence[str], shape: str, counts: Sequence[int], output: int
) -> dict[str, dict[int, PeerResult]]:
    """Results of each named peer, whose place is given; a peer that fails says why and is left out. Call it while the
    GPU is empty."""
    return {name: ask(name, os.environ[PEERS[name]], shape, counts, output) for name in names}


def ask(name: str, place: str, shape: str, counts: Sequence[int], output: int) -> dict[int, PeerResult]:
    module = "benchmarks.gpu.peers"
    command = [sys.executable, "-W", "ignore", "-m", module, name, place, shape, str(output), *map(str, counts)]
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=printed, stderr=said, timeout=TIMEOUT_S, check=False)
        printed.seek(0)
        said.seek(0)
        lines = printed.read().splitlines()
        results = [PeerResult(**json.loads(line)) for line in lines if line.startswith('{"count"')]
        if len(results) < len(counts):
            tail = "\n".join([*lines[-15:], said.read()[-3000:]])
            print(f"{name} at {shape}: {len(results)} of {len(counts)} loads ran\n{tail}", file=sys.stderr)
    for result in results:
        print(f"{name} {shape}: {result}", file=sys.stderr, flush=True)
    return {result.count: result for result in results}


def measure_vllm(place: str, shape: str, output: int, counts: list[int], *, invariant: bool) -> Iterator[PeerResult]:
    sys.path.insert(0, place)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.environ.get("PYTHONPATH", ""), place]
    )  # it inspects models in a process of its own
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import torch

    from benchmarks.gpu.random_models import PROMPT, model_of, prompts_of

    model = model_of(shape)
    from vllm import LLM, SamplingParams  # pyright: ignore
    from vllm.model_executor.model_loader import register_model_loader  # pyright: ignore
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # pyright: ignore

    @register_model_loader("in_memory")
    class InMemoryLoader(BaseModelLoader):
        """Copies the weights of `model`: a file of 60 GB would take minutes."""

        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(separate_experts(source))

    source = dict(model.named_parameters())
    config = model.config
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    free, total = torch.cuda.mem_get_info()
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        llm = LLM(
            model=folder, runner="generate", skip_tokenizer_init=True, load_format="in_memory", dtype="bfloat16", max_model_len=4096,
            max_num_seqs=256, enable_prefix_caching=False, gpu_memory_utilization=round(0.9 * free / total, 2),
            kv_cache_memory_bytes=token * max(counts) * (PROMPT + output + 64),
        )  # fmt: skip

        def generate(count: int, tokens: int, seed: int) -> tuple[float, list[list[int]], list[Any]]:
            prompts = prompts_of(count, PROMPT, seed)
            sampling = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
            torch.cuda.synchronize()
            start = time.perf_counter()
            found = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
            spent = time.perf_counter() - start
            return count * tokens / spent, prompts, [f.outputs[0] for f in found]

        for count in counts:
            generate(count, 20, 100 * count)
            runs = sorted((generate(count, output, 100 * count + 1 + i) for i in range(ROUNDS)), key=lambda run: run[0])
            rate, prompts, found = runs[ROUNDS // 2]
            wrong, total, distance = compare(model, prompts[:COMPARED], found[:COMPARED])
            yield PeerResult(count=count, rate=rate, wrong=wrong, total=total, distance=distance)


def separate_experts(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and tensors as checkpoints have them: each expert's three matrices by themselves."""
    for name, value in weights.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            yield name, value
            continue
        for expert, matrix in enumerate(value):
            parts = (
                zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
                if last == "gate_up_proj"
                else [(last, matrix)]
            )
            yield from ((f"{stem}.{expert}.{part}.weight", tensor) for part, tensor in parts)


def compare(model: Any, prompts: list[list[int]], found: list[Any]) -> tuple[int, int, float]:
    """(log-probabilities that differ from a plain forward of transformers, all of them, mean absolute difference)."""
    import torch

    ids = torch.tensor([[*p, *f.token_ids] for p, f in zip(prompts, found, strict=True)], device="cuda")
    sampled = torch.tensor(
        [[step[t].logprob for t, step in zip(f.token_ids, f.logprobs, strict=True)] for f in found], device="cuda"
    )
    parts = []
    with torch.no_grad():
        for rows in ids.split(ROWS):
            logits = model(input_ids=rows, use_cache=False, logits_to_keep=sampled.shape[1] + 1).logits[:, :-1]
            table = torch.log_softmax(logits.float(), dim=-1)
            parts.append(table.gather(-1, rows[:, -sampled.shape[1] :, None]).squeeze(-1))
    trainer = torch.cat(parts)
    wrong = int((trainer.view(torch.int32) != sampled.view(torch.int32)).sum())
    return wrong, sampled.numel(), float((trainer - sampled).abs().mean())


def measure_vexact(checkout: str, shape: str, output: int, counts: list[int]) -> Iterator[PeerResult]:
    import torch

    from benchmarks.gpu.random_models import PROMPT, model_of, prompts_of

    model = model_of(shape)
    folder = tempfile.TemporaryDirectory()
    model.save_pretrained(folder.name)
    del model
    gc.collect()
    torch.cuda.empty_cache()
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
            model=ModelConfig(model_path=folder.name, attn_impl="triton-invariant", max_model_len=4096),
            driver=DriverConfig(is_worker_proc_managed=True),
            cache=CacheConfig(max_cache_blocks=2048),
            scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
        )
    )

    async def generate(count: int, tokens: int, seed: int) -> float:
        wanted = GenerationConfig(max_new_tokens=tokens, max_length=4096, do_sample=False, top_p=1.0, temperature=1.0)
        requests = [
            DriverRequest(generation_config=wanted, input_ids_list=prompt) for prompt in prompts_of(count, PROMPT, seed)
        ]
        start = time.perf_counter()
        done = await asyncio.gather(*(engine.generate(request, timeout=300) for request in requests))
        spent = time.perf_counter() - start
        return sum(len(d.new_token_ids) for d in done) / spent

    async def measure() -> list[PeerResult]:
        results = []
        for count in counts:
            await generate(count, 8, 100 * count)
            rates = [await generate(count, output, 100 * count + 1 + i) for i in range(ROUNDS)]
            results.append(PeerResult(count=count, rate=statistics.median(rates)))
        return results

    try:
        yield from asyncio.run(measure())
    finally:
        engine.close()
        folder.cleanup()


def stand_in() -> str:
    """A folder with a `flash_attn.ops.triton.cross_entropy` of one function."""
    root = Path(tempfile.mkdtemp(prefix="flash-attn-stand-in-"))
    folder = root / "flash_attn" / "ops" / "triton"
    folder.mkdir(parents=True)
    for at in (folder, folder.parent, folder.parent.parent):
        (at / "__init__.py").write_text("")
    (folder / "cross_entropy.py").write_text(CROSS_ENTROPY)
    return str(root)


def main(name: str, place: str, shape: str, output: int, counts: list[int]) -> None:
    if name == "vexact":
        results = measure_vexact(place, shape, output, counts)
    else:
        results = measure_vllm(place, shape, output, counts, invariant=name == "vllm-invariant")
    for result in results:
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), [int(a) for a in sys.argv[5:]])
