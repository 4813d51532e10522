"""Other engines in the GPU benchmark, each in a process of its own, on the same random weights and the same load.

    python -m benchmarks.gpu.peers {vllm,vllm-invariant,vexact} PLACE SHAPE KIND [KIND …]

KIND is plain, lora or agents. The process loads and compiles, prints `ready`, waits for a line and measures: several can
be prepared at the same time, and one runs at a time.

PLACE of vLLM is a folder on the import path that holds it and what it imports beyond torch and transformers. It runs in
its process with CUDA graphs and compilation, at temperature 1 with the log-probability of the sampled token, which is
compared with a forward of transformers over the same sequence; `vllm-invariant` sets VLLM_BATCH_INVARIANT=1. Prefix
caching is on for agents alone. Gated delta rules run in its Triton kernels (flashinfer would compile its own at start).

PLACE of VeXact is a checkout that holds the package `vexact` and, under `deps`, what it imports beyond torch and
transformers (msgspec, pyzmq). Its dense path is used unchanged, greedy, with its Triton attention and CUDA graphs;
flash-attn's cross entropy, which it asks for, is stood in for by a log-softmax. Its bits are those of a trainer that it
patches itself; they are not compared.

Then prints one JSON line for every result: {"kind": …, "count": …, "rate": tokens per second, "wrong": …, "total": …,
"distance": mean |difference|}.
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
import threading
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

    kind: str
    count: int
    rate: float
    wrong: int = 0
    total: int = 0
    distance: float = 0.0


def is_available(name: str) -> bool:
    return bool(os.environ.get(PEERS[name]))


def is_agents(kind: str) -> bool:
    return kind.endswith("agents")


class Peer:
    """A process that prepares one engine for one shape; one that fails says why and has no results."""

    def __init__(self, name: str, shape: str, kinds: Sequence[str]) -> None:
        self.name, self.shape = name, shape
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 — open as long as the process
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.gpu.peers",
                name,
                os.environ[PEERS[name]],
                shape,
                *kinds,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.timer = threading.Timer(TIMEOUT_S, self.process.kill)
        self.timer.start()

    def wait_until_ready(self) -> None:
        assert self.process.stdout
        self.process.stdout.readline()  # empty if it failed

    def results(self) -> Iterator[PeerResult]:
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.close()
        for line in self.process.stdout:
            yield PeerResult(**json.loads(line))
        if self.process.wait():
            self.log.seek(0)
            print(f"{self.name} at {self.shape} failed:\n{self.log.read()[-3000:]}", file=sys.stderr, flush=True)
        self.timer.cancel()


def measure_vllm(place: str, shape: str, kinds: Sequence[str], *, invariant: bool) -> Iterator[PeerResult | None]:
    """None once it is prepared, then the results."""
    sys.path.insert(0, place)
    # It inspects models in a process of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join([place, os.environ.get("PYTHONPATH", "")])
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import torch

    from benchmarks.gpu.random_models import AGENT_LENGTH, AGENT_TOKENS, PROMPT, counts_of, model_of, prompts_of

    model = model_of(shape).requires_grad_(False)
    from vllm import LLM, SamplingParams  # pyright: ignore

    register_loader(model)
    counts, output = counts_of(shape)
    config = model.config
    hybrid = "linear_attention" in (getattr(config, "layer_types", None) or ())
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    sessions = [kind for kind in kinds if is_agents(kind)]
    held = AGENT_TOKENS if sessions else max(counts) * (PROMPT + output + 64)
    options: dict[str, Any] = {"max_model_len": AGENT_LENGTH if sessions else 4096}
    adapted = any("lora" in kind for kind in kinds)
    if adapted:
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16}
    if hybrid:  # states in float32, as the configuration of Qwen3.5 asks and the exact engine has them
        options |= {"additional_config": {"gdn_prefill_backend": "triton"}, "mamba_ssm_cache_dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        llm = LLM(
            model=folder, runner="generate", skip_tokenizer_init=True, load_format="in_memory", dtype="bfloat16", max_num_seqs=256,
            enable_prefix_caching=bool(sessions), gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=12 * 2**30 if hybrid else token * held, **options,
        )  # fmt: skip
        adapter = {"lora_request": write_adapter(model, folder)} if adapted else {}
        yield None

        def sampling(tokens: int) -> Any:
            return SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)

        def generate(count: int, tokens: int, seed: int) -> tuple[float, list[list[int]], list[Any]]:
            prompts = prompts_of(count, PROMPT, seed)
            torch.cuda.synchronize()
            start = time.perf_counter()
            found = llm.generate(
                [{"prompt_token_ids": p} for p in prompts], sampling(tokens), use_tqdm=False, **adapter
            )
            spent = time.perf_counter() - start
            return count * tokens / spent, prompts, [f.outputs[0] for f in found]

        for kind in sorted(set(kinds) - set(sessions)):
            for count in counts:
                generate(count, 20, 100 * count)
                runs = sorted((generate(count, output, 100 * count + 1 + i) for i in range(ROUNDS)), key=lambda r: r[0])
                rate, prompts, found = runs[ROUNDS // 2]
                yield PeerResult(
                    kind=kind, count=count, rate=rate, **compare(model, prompts[:COMPARED], found[:COMPARED])
                )
        for kind in sessions:
            generate(32, 20, 5)
            for state in ("cold", "warm"):
                rate, turns = run_sessions(llm.llm_engine, sampling, state, adapter)
                last = sorted(turns, key=lambda turn: -len(turn[0]))[:ROWS]
                found = compare(model, [p for p, _ in last], [c for _, c in last], rows=1)
                yield PeerResult(kind=f"{kind}, {state}", count=32, rate=rate, **found)


def register_loader(model: Any) -> None:
    """A load format that copies the weights of `model` (a file of 60 GB would take minutes), and Qwen3.5 without images,
    which vLLM knows as a part of the model with images only."""
    import torch
    from vllm import ModelRegistry  # pyright: ignore
    from vllm.model_executor.model_loader import register_model_loader  # pyright: ignore
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # pyright: ignore

    source = dict(model.named_parameters())

    @register_model_loader("in_memory")
    class InMemoryLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None:
            one = "gpt_oss" in type(model).__module__  # it reads all experts of a layer as one tensor
            model.load_weights(source.items() if one else separate_experts(source))
            share_experts(source, model)
            torch.cuda.empty_cache()

    if type(model).__name__ == "Qwen3_5ForCausalLM":
        from vllm.model_executor.models.interfaces import IsHybrid  # pyright: ignore
        from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM  # pyright: ignore
        from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM  # pyright: ignore

        states = ("get_mamba_state_dtype_from_config", "get_mamba_state_shape_from_config", "get_mamba_state_copy_func")
        found = {name: classmethod(getattr(Qwen3NextForCausalLM, name).__func__) for name in states}
        text = type("TextOnly", (Qwen3_5ForCausalLM, IsHybrid), found)
        ModelRegistry.register_model("Qwen3_5ForCausalLM", text)


def share_experts(source: dict[str, Any], model: Any) -> None:
    """Lets the experts of transformers be vLLM's, where both have one layout: a mixture of 60 GB fits once, not twice."""
    import torch

    theirs = dict(model.named_parameters())
    for name, parameter in source.items():
        stem, _, last = name.rpartition(".")
        part = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}.get(last)
        for at in (f"{stem}.{part}", f"{stem}.routed_experts.{part}"):
            same = theirs.get(at) if part else None
            if same is not None and same.shape == parameter.shape and torch.equal(same, parameter):
                parameter.data = same.data


def write_adapter(model: Any, folder: str) -> Any:
    """The adapter of the exact engine's row as files for vLLM, and as hooks on `model` for the comparison."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest  # pyright: ignore

    from benchmarks.gpu.random_models import ALPHA, RANK, TARGETS, adapter_state

    state = adapter_state(model, 0)
    place = Path(folder) / "adapter"
    place.mkdir()
    save_file({name: tensor.cpu() for name, tensor in state.items()}, place / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none"}
    (place / "adapter_config.json").write_text(json.dumps(config))

    def add(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        down, up = module.adapter
        return output + (inputs[0] @ down.T) @ up.T * (ALPHA / RANK)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            module.adapter = [state[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB"]
            module.register_forward_hook(add)
    return LoRARequest("a0", 1, str(place))


def run_sessions(
    engine: Any, sampling: Any, state: str, adapter: dict[str, Any]
) -> tuple[float, list[tuple[list[int], Any]]]:
    """Tokens per second, and the prompt and the output of every turn: each session's next turn follows its last one."""
    from benchmarks.gpu.random_models import GIVEN, GROUPS, OPENING, SAMPLED, SESSIONS, TURNS, prompts_of

    histories = [list(prompts_of(GROUPS, OPENING, seed=6)[i % GROUPS]) for i in range(SESSIONS)]
    given = [[prompts_of(1, GIVEN, seed=1000 * i + turn)[0] for turn in range(TURNS)] for i in range(SESSIONS)]
    turns = list[tuple[list[int], Any]]()
    start = time.perf_counter()

    def ask(session: int, turn: int) -> None:
        histories[session] += given[session][turn]
        prompt = {"prompt_token_ids": list(histories[session])}
        engine.add_request(f"{state} {session} {turn}", prompt, sampling(SAMPLED), **adapter)

    for session in range(SESSIONS):
        ask(session, 0)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                session, turn = map(int, output.request_id.split()[1:])
                turns.append((list(histories[session]), output.outputs[0]))
                histories[session] += output.outputs[0].token_ids
                if turn + 1 < TURNS:
                    ask(session, turn + 1)
    return SESSIONS * TURNS * SAMPLED / (time.perf_counter() - start), turns


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


def compare(model: Any, prompts: list[list[int]], found: list[Any], rows: int = ROWS) -> dict[str, Any]:
    """Log-probabilities that differ from a plain forward of transformers, all of them, mean absolute difference."""
    import torch

    ids = torch.tensor([[*p, *f.token_ids] for p, f in zip(prompts, found, strict=True)], device="cuda")
    sampled = torch.tensor(
        [[step[t].logprob for t, step in zip(f.token_ids, f.logprobs, strict=True)] for f in found], device="cuda"
    )
    parts = []
    with torch.no_grad():
        for part in ids.split(rows):
            logits = model(input_ids=part, use_cache=False, logits_to_keep=sampled.shape[1] + 1).logits[:, :-1]
            table = torch.log_softmax(logits.float(), dim=-1)
            parts.append(table.gather(-1, part[:, -sampled.shape[1] :, None]).squeeze(-1))
    trainer = torch.cat(parts)
    wrong = int((trainer.view(torch.int32) != sampled.view(torch.int32)).sum())
    return {"wrong": wrong, "total": sampled.numel(), "distance": float((trainer - sampled).abs().mean())}


def measure_vexact(checkout: str, shape: str, kinds: Sequence[str]) -> Iterator[PeerResult | None]:
    import torch

    from benchmarks.gpu.random_models import PROMPT, SHAPES, counts_of, model_of, prompts_of

    if "plain" not in kinds or "num_experts" in SHAPES.get(shape, {"num_experts": 0}):
        yield None  # its dense path alone is run
        return
    counts, output = counts_of(shape)
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
            results.append(PeerResult(kind="plain", count=count, rate=statistics.median(rates)))
        return results

    try:
        yield None
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


def main(name: str, place: str, shape: str, kinds: list[str]) -> None:
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log
    results = (
        measure_vexact(place, shape, kinds)
        if name == "vexact"
        else measure_vllm(place, shape, kinds, invariant=name == "vllm-invariant")
    )
    next(results)
    print("ready", file=reports, flush=True)
    sys.stdin.readline()
    for result in results:
        assert result
        print(json.dumps(asdict(result)), file=reports, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
