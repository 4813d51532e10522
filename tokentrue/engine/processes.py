"""One model in several processes: each has some of the layers (pipeline) or a part of every layer (tensor and expert
parallelism, `numerics.leaves`).

The driver sends every step to all processes, which run it together and answer one by one. Hidden states, logits and
sums travel by torch.distributed (nccl if every process has a GPU, else gloo through host memory); all else comes over
the pipe from the driver, as calls of the process's methods, in order. If a process dies, the driver raises at once and
ends the others.
"""

import copy
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tokentrue.engine.adapters import Adapter, attach_adapter, check_adapter
from tokentrue.engine.decoder import Decoder, check_shape, read_decoder
from tokentrue.engine.forward import Forward, blocks_for
from tokentrue.engine.runner import Sizes, StepResult, StepWants, answer, routes_from, states_for
from tokentrue.engine.schedule import ScheduleLimits, StepInputs
from tokentrue.engine.weights import Weights, checked_weights, plain_name, targets_of
from tokentrue.errors import ConfigError, EngineError, ExactnessError, TokenTrueError
from tokentrue.numerics import Contract, Ops, exact, logits_of, ops_for, same_bits
from tokentrue.numerics.exact import shapes_of
from tokentrue.numerics.leaves import COLUMNS, check_leaves, check_ranks, cut_evenly, cut_key_heads
from tokentrue.numerics.modules import is_experts
from tokentrue.numerics.ops import ModelShapes, Ranks
from tokentrue.records import record

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
# Of a rank's part of a tensor: cut along dimension 0, along dimension 1, or by key heads.
FIRST = re.compile(r".*\.((q|gate|up)_proj\.(weight|bias)|experts\.(gate_up|down)_proj)")
SECOND = re.compile(r".*\.(o|down)_proj\.weight")
KEYS = re.compile(r".*\.[kv]_proj\.(weight|bias)")
PATIENCE = timedelta(days=7)  # an idle process waits for the others; the driver notices a dead one


@record
class StageSpec:
    """Everything a process starts with; its weights follow by name."""

    index: int
    stages: int
    cuts: tuple[range, ...]  # the layers of each process
    model_class: type
    config: Any
    shapes: ModelShapes  # of the whole model, so that all check the same shapes and fall back alike
    device: str
    backend: str
    share: float  # share of the device's free memory
    rendezvous: str
    threads: int
    max_positions: int
    kv_tokens: int | None
    limits: ScheduleLimits
    leaves: int

    @property
    def layers(self) -> range:
        return self.cuts[self.index]


@dataclass(frozen=True, slots=True)
class StageFailed:
    """Last message of a process that cannot continue."""

    text: str


def cut_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Contiguous and as even as possible."""
    if not 1 <= stages <= layers:
        raise ConfigError(f"pipeline={stages}: choose 1 to {layers}, the number of the model's layers")
    borders = [round(layers * i / stages) for i in range(stages + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(borders))


def skeleton_of(model_class: Any, config: Any) -> Any:
    """The model without weights (on the meta device)."""
    with torch.device("meta"):
        return model_class(copy.deepcopy(config)).eval().requires_grad_(False)


@dataclass(slots=True)
class StageProcess:
    process: BaseProcess
    pipe: Connection
    answers: deque[Any] = field(default_factory=deque[Any])


class Processes:
    """Computes steps as `LocalRunner`. Sends the weights of `model` (on the host) by name and keeps none."""

    def __init__(
        self, model: Any, *, pipeline: int, tensor: int, device: str, max_positions: int, kv_tokens: int | None, limits: ScheduleLimits,
        leaves: int = 1,
    ) -> None:  # fmt: skip
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._kind: type[Stage]
        if tensor != 1:
            check_ranks(model, tensor, leaves)
            self._kind, stages, cuts = Rank, tensor, (range(len(model.model.layers)),) * tensor
        else:
            check_shape(model)
            if leaves != 1:
                check_leaves(model, leaves)
            self._kind, stages, cuts = Stage, pipeline, cut_layers(len(model.model.layers), pipeline)
        gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
        shapes = shapes_of(model, leaves)
        self._tied = model.get_output_embeddings().weight is model.model.embed_tokens.weight
        self.model = skeleton_of(type(model), model.config)
        self.dead: str | None = None
        self._folder = tempfile.mkdtemp(prefix="tokentrue-processes-")
        self._specs = [
            StageSpec(
                index=index, stages=stages, cuts=cuts, model_class=type(model), config=model.config, shapes=shapes,
                device=f"cuda:{index % gpus}" if gpus else device, backend="nccl" if gpus >= stages else "gloo",
                share=min(1.0, max(gpus, 1) / stages), rendezvous=f"{self._folder}/store", threads=torch.get_num_threads(),
                max_positions=max_positions, kv_tokens=kv_tokens, limits=limits, leaves=leaves,
            )
            for index in range(stages)
        ]  # fmt: skip
        self._stages = [start_stage(self._kind, spec) for spec in self._specs]
        try:
            self._build(model)
        except BaseException:
            self.close()
            raise

    def _build(self, model: Any) -> None:
        every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, value in every:
            self._send_tensor(name, value)
        built: list[tuple[Contract, Sizes]] = self._ask_all("build")
        contracts, sizes = zip(*built, strict=True)
        if len({contract.fingerprint for contract in contracts}) != 1:
            differing = "; ".join(str(contract.operators) for contract in contracts)
            raise ExactnessError(f"the {self._kind.part}s' operators differ: {differing}")
        self.contract = contracts[0]
        self.sizes = replace(
            sizes[0],
            vocabulary=model.get_output_embeddings().weight.shape[0],
            num_blocks=min(size.num_blocks for size in sizes),
            num_states=next((size.num_states for size in sizes if size.num_states is not None), None),
        )
        self._ask_all("allocate", self.sizes.num_blocks)

    def step(self, inputs: StepInputs, wants: StepWants) -> StepResult:
        found: list[tuple[StepResult, list[Any]]] = self._ask_all("step", inputs, wants)
        requests = zip(*(chosen for _, chosen in found if chosen), strict=True)
        routes = [routes_from(*(np.concatenate(both, 1) for both in zip(*own, strict=True))) for own in requests]
        return replace(found[0][0], routes=routes)

    def prove(self, steps: Sequence[StepInputs]) -> None:
        self._ask_all("prove", steps)

    def clean(self) -> None:
        self._ask_all("clean")

    # ---- weights
    def load(self, weights: Weights) -> None:
        """Checks a mapping or directory whole before the first is sent."""
        for name, _, value in checked_weights(targets_of(self.model), weights, self.model):
            self._send_tensor(plain_name(name), value)
        self._ask_all("refresh")

    def set_adapter(self, adapter: Adapter, proof_steps: Sequence[StepInputs]) -> None:
        try:
            self._ask_all("set_adapter", adapter)
            self._ask_all("prove", proof_steps, adapter.name)
        except (ExactnessError, EngineError):
            if self.dead is None:
                self.unload_adapter(adapter.name)
            raise

    def unload_adapter(self, name: str) -> None:
        self._ask_all("unload_adapter", name)

    def _send_tensor(self, name: str, value: torch.Tensor) -> None:
        whole = value.detach().cpu()
        for stage, spec in zip(self._stages, self._specs, strict=True):
            for each in EMBEDDINGS if self._tied and name in EMBEDDINGS else (name,):
                if (found := self._kind.part_of(spec, each, whole)) is not None:
                    local, part = found[0], found[1].contiguous()
                    self._tell(stage, "put", (local, part.dtype, tuple(part.shape)), answers=False)
                    try:
                        stage.pipe.send_bytes(memoryview(part.view(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
                    except OSError:
                        self._die()

    # ---- the processes
    def _ask_all(self, method: str, *args: object) -> list[Any]:
        for stage in self._stages:
            self._tell(stage, method, args)
        results = [self._hear(stage) for stage in self._stages]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def _tell(self, stage: StageProcess, method: str, args: tuple[object, ...], *, answers: bool = True) -> None:
        if self.dead is not None:
            raise EngineError(self.dead)
        try:
            stage.pipe.send((method, args, answers))
        except OSError:
            self._die()

    def _hear(self, stage: StageProcess) -> Any:
        """Returns the process's next result. Any that fails or dies meanwhile ends all."""
        while not stage.answers:
            ready = wait([other for s in self._stages for other in (s.pipe, s.process.sentinel)])
            for index, each in enumerate(self._stages):
                if each.pipe in ready:
                    try:
                        each.answers.append(each.pipe.recv())
                    except (EOFError, OSError):
                        self._die()
                    if isinstance(each.answers[-1], StageFailed):
                        self._die(f"{self._kind.part} {index} of {len(self._stages)} failed: {each.answers[-1].text}")
            if not stage.answers and any(each.process.sentinel in ready for each in self._stages):
                self._die()
        return stage.answers.popleft()

    def _die(self, said: str | None = None) -> NoReturn:
        """Ends every process and names the cause: one that was killed rather than those that lost it."""
        for index, stage in enumerate(self._stages):
            stage.process.join(0.5)
            if stage.process.exitcode not in (None, 0, 1):
                said = f"{self._kind.part} {index} of {len(self._stages)} died (exit code {stage.process.exitcode})"
                break
        what = said or f"a {self._kind.part} of {len(self._stages)} ended"
        self.dead = f"{self._kind.name} is down: {what}; start the engine again"
        self._end()
        raise EngineError(self.dead)

    def _end(self) -> None:
        for stage in self._stages:
            stage.process.terminate()
        for stage in self._stages:
            stage.process.join(5)
            if stage.process.is_alive():
                stage.process.kill()
            stage.pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        if self.dead is None:
            self.dead = "the engine was closed"
            self._end()


def start_stage(kind: "type[Stage]", spec: StageSpec) -> StageProcess:
    """A clean process: no threads, locks or CUDA state of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here, there = context.Pipe()
    name = f"tokentrue-{kind.part}-{spec.index}"
    process = context.Process(target=run_stage, args=(kind, spec, there), name=name, daemon=True)
    process.start()
    there.close()
    return StageProcess(process, here)


# ---- in a process
def run_stage(kind: "type[Stage]", spec: StageSpec, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles it
    try:
        kind(spec, pipe).serve()
    except (EOFError, ConnectionError):
        os._exit(0)  # the driver is gone
    except Exception as error:
        pipe.send(StageFailed(f"{type(error).__name__}: {error}"))
        os._exit(1)


class Stage:
    """Some of the layers; embedding, last norm and head are everywhere. The driver calls the methods without an
    underscore."""

    name, part = "the pipeline", "stage"

    def __init__(self, spec: StageSpec, pipe: Connection) -> None:
        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._pipe = pipe
        self._device = torch.device(spec.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._model = self._make_model()
        self._wire = self._device if spec.backend == "nccl" else torch.device("cpu")
        self._ops: Ops = ops_for(self._device, spec.leaves)
        self._decoder: Decoder
        self._forward: Forward
        self._targets: dict[str, Tensor] | None = None
        self._undo = ExitStack()

    @staticmethod
    def part_of(spec: StageSpec, name: str, value: Tensor) -> tuple[str, Tensor] | None:
        """Of a tensor of the model, its name and value in this process."""
        found = LAYER.fullmatch(name)
        if found is None:
            return name, value
        number = int(found[1])
        return (f"model.layers.{spec.layers.index(number)}.{found[2]}", value) if number in spec.layers else None

    def _make_model(self) -> Any:
        spec = self._spec
        model = skeleton_of(spec.model_class, spec.config)
        body, config = model.model, model.config.get_text_config()
        body.layers = nn.ModuleList(body.layers[spec.layers.start : spec.layers.stop])
        config.num_hidden_layers = len(spec.layers)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = list(config.layer_types[spec.layers.start : spec.layers.stop])
        if spec.layers.start and hasattr(body, "embedding_multiplier"):
            body.embedding_multiplier = 1.0  # its proof starts from hidden states
        return model

    def serve(self) -> None:
        """Runs (method, arguments, whether to answer) until the driver ends this process."""
        while True:
            method, args, answers = self._pipe.recv()
            try:
                result = getattr(self, method)(*args)
            except TokenTrueError as error:
                if not answers:
                    raise
                result = error
            if answers:
                self._pipe.send(result)

    # ---- weights
    def put(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """The tensor's bytes follow. Before `build` it replaces the weight or buffer; later it is copied into it."""
        data = self._pipe.recv_bytes()
        value = torch.empty(shape, dtype=dtype)
        if data:
            value.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if self._targets is not None:
            with torch.no_grad():
                self._targets[name].data.copy_(value)
            return
        path, _, leaf = name.rpartition(".")
        module, value = self._model.get_submodule(path), value.to(self._device)
        if (own := module._parameters.get(leaf)) is not None:
            if own.shape != value.shape:
                made = f"{self._spec.model_class.__name__}(config) makes {tuple(own.shape)}"
                raise EngineError(
                    f"weight {name!r} has shape {shape}, {made}: {self.part}s are built from the model's own class"
                )
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value

    def build(self) -> tuple[Contract, Sizes]:
        """After all tensors have arrived."""
        spec, model = self._spec, self._model
        targets = dict(model.state_dict(keep_vars=True))
        lost = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        if lost:
            raise EngineError(f"{self.part} {spec.index} has no values for {lost[0]!r}")
        ops = self._ops
        contract = self._undo.enter_context(exact(model, ops=ops, shapes=spec.shapes))
        self._decoder = decoder = read_decoder(model, ops, max_positions=spec.max_positions)
        self._targets = targets
        blocks = blocks_for(decoder, ops, limits=spec.limits, kv_tokens=spec.kv_tokens, share=spec.share)
        return contract, Sizes.of(decoder, ops, num_blocks=blocks, limits=spec.limits)

    def _connect(self) -> None:
        """Waits for all others, so it comes after what may fail in one alone."""
        spec, url = self._spec, f"file://{self._spec.rendezvous}"
        dist.init_process_group(
            spec.backend, init_method=url, rank=spec.index, world_size=spec.stages, timeout=PATIENCE
        )

    def allocate(self, num_blocks: int) -> None:
        self._connect()
        states = states_for(self._decoder, self._spec.limits)
        self._forward = Forward(self._decoder, self._ops, num_blocks=num_blocks, num_states=states)

    def refresh(self) -> None:
        self._forward.refresh()

    def clean(self) -> None:
        self._forward.clean()

    def set_adapter(self, adapter: Adapter) -> None:
        own, first = self._spec.layers, self._spec.layers.start
        weights = {
            (layer - first, projection): replace(low, a=low.a.to(self._device), b=low.b.to(self._device))
            for (layer, projection), low in adapter.weights.items()
            if layer in own
        }
        local = replace(adapter, weights=weights)
        check_adapter(local, self._decoder, self._ops, first)
        self._forward.bank.set(local)

    def unload_adapter(self, name: str) -> None:
        self._forward.bank.remove(name)

    # ---- steps
    @torch.inference_mode()
    def step(self, inputs: StepInputs, wants: StepWants) -> tuple[StepResult | None, list[Any]]:
        """The first process answers; each that has layers of its own adds their experts if requested."""
        forward, chosen = self._forward, []
        with forward.routes() if wants.routing else nullcontext() as read:
            hidden = self._compute(inputs)[2]
            if read is not None and forward.ops.routes and self._has_own_layers:
                chosen = [read(*part) for part in wants.routing]
        logits = self._logits(hidden, wants.rows)
        return (answer(forward, logits, wants) if self._spec.index == 0 else None), chosen

    @property
    def _has_own_layers(self) -> bool:
        return True

    def _compute(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [T,K] before and after this process's layers, and after all layers."""
        x = before = after = self._forward.embed(inputs)
        for index in range(self._spec.stages):
            if index == self._spec.index:
                before, x = x, self._forward.compute(inputs, x)
                after = x
            sent = x.to(self._wire, copy=True)
            dist.broadcast(sent, index)
            x = sent.to(self._device)
        return before, after, x

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        return self._forward.logits_of_rows(hidden, rows)

    @torch.inference_mode()
    def prove(self, steps: Sequence[StepInputs], adapter_name: str | None = None) -> None:
        """This process's paged layers, and the head, against the model's own code on the same inputs."""
        forward, spec = self._forward, self._spec
        adapter = forward.bank.adapters[adapter_name] if adapter_name is not None else None
        before, after, _ = (torch.cat(parts) for parts in zip(*map(self._compute, steps), strict=True))
        ids = [token for step in steps for token in step.ids]
        source = before[None] if spec.layers.start else torch.tensor([ids], device=self._device)
        with nullcontext() if adapter is None else attach_adapter(self._model, forward.ops, adapter):
            wanted = logits_of(self._model, source)[0]
        if not same_bits(forward.logits(after), wanted):
            what = (
                f"{spec.model_class.__name__} has a part without an exact form"
                if adapter is None
                else f"adapter {adapter.name!r}"
            )
            where = f"layers {spec.layers.start} to {spec.layers.stop - 1} differ from the model's own"
            raise ExactnessError(f"{what}: {where}; an engine of one process names the first difference")


class Rank(Stage):
    """A part of every layer: of the heads (and their pages), of the MLP's values, of the experts and of the vocabulary;
    the rest is whole everywhere. All gather where `numerics.leaves` joins their parts."""

    name, part = "tensor parallelism", "rank"

    @staticmethod
    def part_of(spec: StageSpec, name: str, value: Tensor) -> tuple[str, Tensor] | None:
        size, heads = spec.stages, spec.config.num_key_value_heads
        if FIRST.fullmatch(name):
            value = value.chunk(size)[spec.index]
        elif SECOND.fullmatch(name):
            value = value.chunk(size, 1)[spec.index]
        elif KEYS.fullmatch(name):
            own = cut_key_heads(heads, size)[spec.index]
            value = value.unflatten(0, (heads, -1))[own.start : own.stop].flatten(0, 1)
        elif name.startswith("lm_head."):
            own = cut_evenly(len(value), size, COLUMNS)[spec.index]
            value = value[own.start : own.stop]
        return name, value

    def _make_model(self) -> Any:
        spec = self._spec
        config, size, index = copy.deepcopy(spec.config), spec.stages, spec.index
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        config.num_key_value_heads = len(cut_key_heads(config.num_key_value_heads, size)[index])
        config.num_attention_heads //= size
        config.intermediate_size //= size
        model = skeleton_of(spec.model_class, config)
        self._columns = cut_evenly(config.vocab_size, size, COLUMNS)
        with torch.device("meta"):
            bias = model.lm_head.bias is not None
            model.lm_head = nn.Linear(config.hidden_size, len(self._columns[index]), bias=bias)
        for module in model.modules():
            if is_experts(module):
                for name, value in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(value.chunk(size)[index], requires_grad=False))
        return model

    def _connect(self) -> None:
        super()._connect()
        self._ops.ranks = Ranks(index=self._spec.index, size=self._spec.stages, gather=self._gather)

    def _gather(self, value: Tensor) -> list[Tensor]:
        sent = value.to(self._wire).contiguous().view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self._spec.stages)]
        dist.all_gather(parts, sent)
        return [part.view(value.dtype).to(self._device) for part in parts]

    @property
    def _has_own_layers(self) -> bool:
        return self._spec.index == 0

    def _compute(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        before = self._forward.embed(inputs)
        after = self._forward.compute(inputs, before)
        return before, after, after

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Some ranks have a few columns more than others."""
        own, widest = super()._logits(hidden, rows), max(map(len, self._columns))
        parts = self._gather(F.pad(own, (0, widest - own.shape[1]))) if len(own) else [own] * len(self._columns)
        return torch.cat([part[:, : len(columns)] for part, columns in zip(parts, self._columns, strict=True)], -1)
