"""ExactEngine: the facade. One thread owns the core; calls from asyncio tasks and other threads are batched."""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from tokentrue.engine.adapters import MERGE, AdapterSource, read_adapter
from tokentrue.engine.core import Core
from tokentrue.engine.decoder import read_decoder
from tokentrue.engine.forward import blocks_for
from tokentrue.engine.images import RequestImages
from tokentrue.engine.processes import Processes
from tokentrue.engine.runner import LocalRunner
from tokentrue.engine.sample import child_seed
from tokentrue.engine.schedule import Request, ScheduleLimits
from tokentrue.engine.weights import Weights, load_model
from tokentrue.errors import (
    ConfigError,
    EngineError,
    EngineRejected,
    ExactnessError,
    LimitExceeded,
    PromptTooLong,
    SamplingError,
)
from tokentrue.numerics import Contract, Ops, exact, on_device
from tokentrue.numerics.exact import STATE, ops_for
from tokentrue.numerics.leaves import leaves_for
from tokentrue.numerics.modules import is_experts
from tokentrue.numerics.vision import merge_size
from tokentrue.pixels import PixelReader, check_runs
from tokentrue.types import UNVERSIONED, Chunk, Completion, Ids, PromptImage, Sampling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A GPU wants long steps: a few hundred tokens do not fill it.
GPU_LIMITS = ScheduleLimits(step_tokens=16384, chunk_tokens=4096)
# Keys of Sampling.extra that the engine understands; any other is refused.
EXTRAS = {"adapter", "ignore_eos", "prompt_logprobs", "routed_experts"}


class ExactEngine:
    def __init__(
        self, model_dir: str | Path | nn.Module, device: str = "cpu", dtype: str = "float32", pipeline: int = 1, tensor: int = 1, *,
        leaves: int | None = None, limits: ScheduleLimits | None = None, max_len: int | None = None, kv_tokens: int | None = None, version: int = UNVERSIONED,
        read: Callable[[Sequence[int]], str] | None = None, ops: Ops | None = None,
    ) -> None:  # fmt: skip
        """`read` (ids -> text) is needed only for stop strings. `kv_tokens`: cache size; None sizes it by memory.
        `tensor`: processes that share every layer. `leaves` decide the bits, whatever `tensor` is; None: LEAVES if it is
        above 1, else none (1)."""
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if pipeline > 1 and tensor != 1:
            raise ConfigError(f"pipeline={pipeline} and tensor={tensor}: one of them must be 1")
        self.leaves = leaves_for(tensor, leaves)
        where = torch.device(device)
        self._undo = ExitStack()
        self.limits = limits or (GPU_LIMITS if where.type == "cuda" else ScheduleLimits())
        self._host = where if pipeline == tensor == 1 else torch.device("cpu")
        self.model = load_model(model_dir, device=self._host, dtype=DTYPES[dtype])
        self.reader = PixelReader(self.model.config.name_or_path)
        self.eos_ids = eos_of(self.model)
        positions = max_len or getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if positions is None:
            raise ExactnessError(
                f"{type(self.model).__name__} has no positions (max_position_embeddings): recurrent layers have no "
                "exact form; serve it with vllm or sglang, and train with train.exact = false"
            )
        with on_device(self._host):
            if pipeline == tensor == 1:
                runner: LocalRunner | Processes = self._local_runner(ops, positions, kv_tokens)
            elif self.sees:
                raise ExactnessError(f"{type(self.model).__name__} has a vision tower, which runs in one process only")
            else:
                runner = Processes(
                    self.model, pipeline=pipeline, tensor=tensor, device=device, max_positions=positions, kv_tokens=kv_tokens,
                    limits=self.limits, leaves=self.leaves,
                )  # fmt: skip
                self.model = runner.model  # its weights are in the stages
            self.contract: Contract = runner.contract
            self.core = Core(runner, limits=self.limits, version=version, read=read)
            self._prove()
        self._state = threading.Condition()
        self._inbox: list[Request] = []
        self._stepping = False
        self._pauses = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def _local_runner(self, ops: Ops | None, positions: int, kv_tokens: int | None) -> LocalRunner:
        # Fresh operators: they keep another form of the weights, which a trainer of the same model would change.
        contract = self._undo.enter_context(exact(self.model, ops=ops or ops_for(self._host, self.leaves)))
        used: Ops = self.model.__dict__[STATE].ops
        decoder = read_decoder(self.model, used, max_positions=positions)
        num_blocks = blocks_for(decoder, used, limits=self.limits, kv_tokens=kv_tokens)
        return LocalRunner(self.model, decoder, used, contract, num_blocks=num_blocks, limits=self.limits)

    def _prove(self) -> None:
        """If the proof fails, restores the model and leaves no process running."""
        try:
            self.core.prove()
        except BaseException:
            self.core.close()
            self._undo.close()
            raise

    # ---- asking
    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, adapter: str | None = None, images: Sequence[PromptImage] = ()
    ) -> Completion:  # fmt: skip
        """Samples until a stop, the limit or cancellation of this task (which cancels the generation).

        `adapter` (or `sampling.extra["adapter"]`) names a loaded LoRA adapter; requests with different adapters share
        batches. `images`: those of the prompt, in order.
        """
        async with aclosing(self.stream(prompt_ids, sampling, adapter=adapter, whole=True, images=images)) as chunks:
            return [chunk.final async for chunk in chunks if chunk.final is not None][-1]

    async def generate_n(self, prompt_ids: Ids, sampling: Sampling, n: int) -> list[Completion]:
        """n samples of one prompt, which is computed once. Sample i has the seed `child_seed(seed, i)`."""
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        each = (self.generate(prompt_ids, replace(sampling, seed=child_seed(seed, i))) for i in range(n))
        return list(await asyncio.gather(*each))

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, adapter: str | None = None, whole: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> AsyncGenerator[Chunk]:  # fmt: skip
        """Yields chunks of the tokens as they are sampled, then one with the whole completion. `whole`: all tokens at
        the end. Closing the iterator cancels."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def notify(request: Request) -> None:
            if not whole or request.finish is not None:
                with contextlib.suppress(RuntimeError):  # the caller's loop may be gone
                    loop.call_soon_threadsafe(changed.set)

        for image in images:  # not in the caller's loop
            await asyncio.to_thread(self.reader.read, image)
        request = self.request(prompt_ids, sampling, notify, adapter=adapter, images=images)
        self._submit(request)
        sent, ended = 0, False
        try:
            while not ended:
                await changed.wait()
                changed.clear()
                ended = request.finish is not None  # before the tokens are counted, so that none is left behind
                for chunk in request.chunks(sent):
                    sent += len(chunk.token_ids)
                    yield chunk
            yield Chunk(final=self.result(request))
        finally:
            request.cancelled = True
            with self._state:
                self._state.notify_all()

    def _submit(self, request: Request) -> None:
        with self._state:
            if self._closed:
                raise EngineError("the engine is closed")
            if len(self._inbox) + len(self.core.scheduler.waiting) >= self.limits.max_waiting:
                raise LimitExceeded(
                    f"{self.limits.max_waiting} requests are waiting already; try again later", retry_after_s=1.0
                )
            self._inbox.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="exact-engine", daemon=True)
                self._thread.start()
            self._state.notify_all()

    def request(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        listener: Callable[[Request], None] | None = None,
        *,
        adapter: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Request:
        """Validates here, so that no caller's input can fail the loop."""
        ids = tuple(map(int, prompt_ids))
        vocabulary, capacity = self.core.runner.sizes.vocabulary, self.core.capacity
        if not ids:
            raise EngineRejected("prompt_ids is empty; a decoder needs at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocabulary:
            raise EngineRejected(f"prompt_ids holds {low if low < 0 else high}, outside the vocabulary of {vocabulary}")
        if len(ids) >= capacity:
            raise PromptTooLong(
                f"prompt is too long: {len(ids)} tokens; this engine holds {capacity - 1} and one more to sample"
            )
        check_runs(ids, images, self.model.config)
        extra = sampling.extra
        if unknown := sorted(set(extra) - EXTRAS):
            raise SamplingError(f"extra {unknown} unknown to the exact engine; it knows {sorted(EXTRAS)}")
        adapter = adapter or extra.get("adapter")
        if adapter is not None and adapter not in self.core.adapters:
            raise EngineRejected(f"adapter {adapter!r} is not loaded; loaded: {sorted(self.core.adapters)}")
        if extra.get("routed_experts") and not has_experts(self.model):
            raise SamplingError("extra routed_experts: this model is no mixture of experts; leave it out")
        if sampling.stop and self.core.read is None:
            raise SamplingError(
                "stop strings need a reader of tokens: ExactEngine(..., read=renderer.decode); or use stop_token_ids"
            )
        stops = set(sampling.stop_token_ids) | (set() if extra.get("ignore_eos") else set(self.eos_ids))
        room = capacity - len(ids)
        return Request(
            prompt_ids=ids, sampling=sampling, seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            stop_ids=frozenset(stops), adapter=adapter, max_tokens=min(sampling.max_tokens or room, room),
            wants_prompt=bool(extra.get("prompt_logprobs")), wants_routes=bool(extra.get("routed_experts")),
            listener=listener, images=RequestImages.read(images, self.reader, merge_size(self.model)) if images else None,
        )  # fmt: skip

    def result(self, request: Request) -> Completion:
        if request.error is not None:
            raise request.error
        return request.completion(self.fingerprint)

    # ---- weights
    def load_weights(self, weights: Weights, version: int) -> None:
        """Live on return: every later token is sampled from these weights, also in running requests."""
        with self.paused():
            self.core.load(weights, version)

    def load_adapter(self, name: str, source: AdapterSource, *, config: Any = None, version: int | None = None) -> None:
        """Loads or replaces a LoRA adapter: a directory saved by peft, or its state dict with `config` (kept for later
        loads of the name).

        Live on return. Its completions have `version`, or the engine's version if None.
        """
        if self.leaves > 1:
            raise ExactnessError(
                f"adapter {name!r}: adapters have no form with leaves or tensor parallelism yet: {MERGE}"
            )
        known = self.core.adapters.get(name)
        adapter = read_adapter(name, source, config or (known and known.config), version=version, device=self._host)
        with self.paused():
            self.core.set_adapter(adapter)

    def unload_adapter(self, name: str) -> None:
        """Requests that use it fail."""
        with self.paused():
            self.core.unload_adapter(name)

    @property
    def adapters(self) -> list[str]:
        return sorted(self.core.adapters)

    async def publish(self, weights: Iterable[tuple[str, Any]] | Mapping[str, Any], *, version: int) -> None:
        await asyncio.to_thread(self.load_weights, weights, version)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Waits for the current step; none starts until the block ends."""
        with self._state:
            self._pauses += 1
            while self._stepping:
                self._state.wait()
        try:
            with on_device(self._host):
                yield
        finally:
            with self._state:
                self._pauses -= 1
                self._state.notify_all()

    # ---- the loop
    def _run(self) -> None:
        with on_device(self._host):
            while self._admit():
                self.core.step()

    def _admit(self) -> bool:
        """Waits for work and passes it to the core; False if the engine was closed."""
        with self._state:
            self._stepping = False
            self._state.notify_all()
            while not self._closed and (self._pauses or not (self._inbox or self.core.busy)):
                self._state.wait()
            for request in self._inbox:
                self.core.add(request)
            self._inbox.clear()
            if self._closed:
                self.core.fail_all(EngineError("the engine was closed"))
            self._stepping = not self._closed
            return self._stepping

    def metrics(self) -> dict[str, float]:
        report = self.core.meter.report(self.core.scheduler, self.core.version)
        report["requests_waiting"] += len(self._inbox)
        return report

    @property
    def sees(self) -> bool:
        return hasattr(self.model.config, "vision_config")

    @property
    def version(self) -> int:
        return self.core.version

    @property
    def fingerprint(self) -> str:
        return self.contract.fingerprint

    def close(self) -> None:
        """Fails pending requests; restores the model to its original state."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=30)
        self.core.close()
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def has_experts(model: nn.Module) -> bool:
    return any(map(is_experts, model.modules()))


def eos_of(model: Any) -> tuple[int, ...]:
    """Of all the model's configurations; each may have one id or a list."""
    found: list[int] = []
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        found += ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))
