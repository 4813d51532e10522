"""One model over several processes: a driver, and stages with some of the layers and their caches each.

Several steps are in flight, one per stage, with different requests, so that all stages compute at once. Hidden states
travel from stage to stage by torch.distributed (nccl if every stage has its own GPU, else gloo through host memory).
Everything else comes over the pipe from the driver, as calls of the stage's methods. Calls run in the order of the
pipe, so no step overtakes another in any stage. The driver waits on the stages' pipes and processes: if a stage dies,
it raises at once and ends the others.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
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
from tokentrue.numerics.leaves import check_leaves
from tokentrue.numerics.ops import ModelShapes
from tokentrue.records import record

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
MOST_SENDS = 2  # hidden states in flight to the next stage; beyond that this stage waits
PATIENCE = timedelta(days=7)  # an idle stage waits for the one before it; the driver notices a dead one


@record
class StageSpec:
    """Everything a stage process starts with; its weights follow by name."""

    index: int
    stages: int
    layers: range
    model_class: type
    config: Any
    shapes: ModelShapes  # of the whole model, so that every stage checks the same shapes and falls back alike
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
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1


@dataclass(frozen=True, slots=True)
class StageFailed:
    """Last message of a stage that cannot continue."""

    text: str


def cut_layers(layers: int, stages: int) -> list[range]:
    """Contiguous and as even as possible."""
    if not 1 <= stages <= layers:
        raise ConfigError(f"pipeline={stages}: choose 1 to {layers}, the number of the model's layers")
    borders = [round(layers * i / stages) for i in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(borders)]


class WeightRoutes:
    """Name in the whole model -> (stage, name there); tied embeddings go to both ends."""

    def __init__(self, model: Any, layers: list[range]) -> None:
        check_shape(model)
        self.layers = layers
        self.tied = model.get_output_embeddings().weight is model.model.embed_tokens.weight

    def targets(self, name: str) -> list[tuple[int, str]]:
        last = len(self.layers) - 1
        if found := LAYER.fullmatch(name):
            number = int(found[1])
            stage = next(i for i, own in enumerate(self.layers) if number in own)
            return [(stage, f"model.layers.{number - self.layers[stage].start}.{found[2]}")]
        if self.tied and name in {"model.embed_tokens.weight", "lm_head.weight"}:
            return [(0, "model.embed_tokens.weight"), (last, "lm_head.weight")]
        if name.startswith("model.embed_tokens."):
            return [(0, name)]
        if name.startswith(("lm_head.", "model.norm.")):
            return [(last, name)]
        return [(stage, name) for stage in range(last + 1)]

    def part(self, stage: int, name: str, value: Tensor) -> Tensor:
        """What the stage gets of a tensor that it has under this name."""
        return value


def skeleton_of(model_class: Any, config: Any) -> Any:
    """The model without weights (on the meta device)."""
    with torch.device("meta"):
        return model_class(copy.deepcopy(config)).eval().requires_grad_(False)


def stage_model(spec: StageSpec) -> Any:
    """The model with only this stage's layers, on the meta device; the other parts pass hidden states through."""
    model = skeleton_of(spec.model_class, spec.config)
    body, config = model.model, model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    body.layers = nn.ModuleList(body.layers[spec.layers.start : spec.layers.stop])
    config.num_hidden_layers = len(spec.layers)
    if kinds is not None:
        config.layer_types = list(kinds[spec.layers.start : spec.layers.stop])
    if not spec.is_first:
        body.embed_tokens = nn.Identity()
        if hasattr(body, "embedding_multiplier"):
            body.embedding_multiplier = 1.0
    if not spec.is_last:
        body.norm = model.lm_head = nn.Identity()
        for name, neutral in (("logits_scaling", 1.0), ("final_logit_softcapping", None)):
            if hasattr(config, name):
                setattr(config, name, neutral)
    return model


@dataclass(slots=True)
class StageProcess:
    process: BaseProcess
    pipe: Connection
    answers: deque[Any] = field(default_factory=deque[Any])


class Pipeline:
    """A `Runner` over several processes with the layers of `model` (on the host); sends its weights by name and keeps
    none."""

    name, part = "the pipeline", "stage"

    def __init__(
        self, model: Any, *, stages: int, device: str, max_positions: int, kv_tokens: int | None, limits: ScheduleLimits,
        leaves: int = 1,
    ) -> None:  # fmt: skip
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._routes, kind, self.depth = self._cut(model, stages, leaves)
        gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
        shapes = shapes_of(model, leaves)
        self.model = skeleton_of(type(model), model.config)
        self.dead: str | None = None
        self._folder = tempfile.mkdtemp(prefix="tokentrue-pipeline-")
        self._wants: deque[StepWants] = deque()
        self._stages = [
            start_stage(kind, StageSpec(
                index=index, stages=stages, layers=own, model_class=type(model), config=model.config, shapes=shapes,
                device=f"cuda:{index % gpus}" if gpus else device, backend="nccl" if gpus >= stages else "gloo",
                share=min(1.0, max(gpus, 1) / stages), rendezvous=f"{self._folder}/store", threads=torch.get_num_threads(),
                max_positions=max_positions, kv_tokens=kv_tokens, limits=limits, leaves=leaves,
            ))
            for index, own in enumerate(self._routes.layers)
        ]  # fmt: skip
        try:
            self._build(model)
        except BaseException:
            self.close()
            raise

    def _cut(self, model: Any, stages: int, leaves: int) -> tuple[WeightRoutes, type[Stage], int]:
        """How weights are sent, what a process runs, and the number of steps in flight."""
        if leaves != 1:
            check_leaves(model, leaves)
        return WeightRoutes(model, cut_layers(len(model.model.layers), stages)), Stage, stages

    def _build(self, model: Any) -> None:
        every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, value in every:
            self._send_tensor(name, value)
        built: list[tuple[Contract, Sizes]] = self._ask_all("build")
        contracts, sizes = zip(*built, strict=True)
        if len({contract.fingerprint for contract in contracts}) != 1:
            differing = "; ".join(str(contract.operators) for contract in contracts)
            raise ExactnessError(f"the {self.part}s' operators differ: {differing}")
        self.contract = contracts[-1]
        self.sizes = replace(
            sizes[-1],
            num_blocks=min(size.num_blocks for size in sizes),
            num_states=next((size.num_states for size in sizes if size.num_states is not None), None),
        )
        self._tell_all("allocate", self.sizes.num_blocks)

    # ---- steps
    def start(self, inputs: StepInputs, wants: StepWants) -> None:
        self._tell_all("step", inputs, wants)
        self._wants.append(wants)

    def finish(self) -> StepResult:
        wants = self._wants.popleft()
        chosen = [self._hear(stage) for stage in self._stages] if wants.routing else []
        result: StepResult = self._hear(self._stages[-1])
        requests = zip(*(parts for parts in chosen if parts), strict=True)
        routes = [routes_from(*(np.concatenate(both, 1) for both in zip(*own, strict=True))) for own in requests]
        return replace(result, routes=routes)

    def prove(self, steps: Sequence[StepInputs]) -> None:
        self._ask_all("prove", steps)

    def clean(self) -> None:
        self._tell_all("clean")

    # ---- weights
    def load(self, weights: Weights) -> None:
        """Sends each stage its weights; checks a mapping or directory whole before the first is sent."""
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
        self._tell_all("unload_adapter", name)

    def _send_tensor(self, name: str, value: torch.Tensor) -> None:
        whole = value.detach().cpu()
        for stage, local in self._routes.targets(name):
            pipe, flat = self._stages[stage].pipe, self._routes.part(stage, local, whole).contiguous()
            self._tell(self._stages[stage], "put", (local, flat.dtype, tuple(flat.shape)))
            try:
                pipe.send_bytes(memoryview(flat.view(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
            except OSError:
                self._die()

    # ---- the stages' processes
    def _ask_all(self, method: str, *args: object) -> list[Any]:
        for stage in self._stages:
            self._tell(stage, method, args, answers=True)
        results = [self._hear(stage) for stage in self._stages]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def _tell_all(self, method: str, *args: object) -> None:
        for stage in self._stages:
            self._tell(stage, method, args)

    def _tell(self, stage: StageProcess, method: str, args: tuple[object, ...], *, answers: bool = False) -> None:
        if self.dead is not None:
            raise EngineError(self.dead)
        try:
            stage.pipe.send((method, args, answers))
        except OSError:
            self._die()

    def _hear(self, stage: StageProcess) -> Any:
        """Returns the stage's next result. Any stage that fails or dies meanwhile ends the pipeline."""
        while not stage.answers:
            if self.dead is not None:
                raise EngineError(self.dead)
            ready = wait([other for s in self._stages for other in (s.pipe, s.process.sentinel)])
            for each in self._stages:
                if each.pipe in ready:
                    self._receive(each)
            if not stage.answers and any(each.process.sentinel in ready for each in self._stages):
                self._die()
        return stage.answers.popleft()

    def _receive(self, stage: StageProcess) -> None:
        try:
            result = stage.pipe.recv()
        except (EOFError, OSError):
            self._die()
        if isinstance(result, StageFailed):
            self._die((self._stages.index(stage), result.text))
        stage.answers.append(result)

    def _die(self, failure: tuple[int, str] | None = None) -> NoReturn:
        """Ends every stage and names the cause: a killed stage rather than one that lost its neighbour."""
        deadline = time.monotonic() + 2.0
        killed: list[tuple[int, int]] = []
        while not killed and time.monotonic() < deadline:
            codes = [(index, stage.process.exitcode) for index, stage in enumerate(self._stages)]
            killed = [(index, code) for index, code in codes if code is not None and code not in (0, 1)]
            if any(code == 1 for _, code in codes) and failure is not None:
                break
            time.sleep(0.02)
        if killed:
            what = f"{self.part} {killed[0][0]} of {len(self._stages)} died (exit code {killed[0][1]})"
        elif failure is not None:
            what = f"{self.part} {failure[0]} of {len(self._stages)} failed: {failure[1]}"
        else:
            what = f"a {self.part} of {len(self._stages)} ended"
        self.dead = f"{self.name} is down: {what}; start the engine again"
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


def start_stage(kind: type[Stage], spec: StageSpec) -> StageProcess:
    """Spawns a clean process: no threads, locks or CUDA state of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here, there = context.Pipe()
    name = f"tokentrue-{kind.__name__.lower()}-{spec.index}"
    process = context.Process(target=run_stage, args=(kind, spec, there), name=name, daemon=True)
    process.start()
    there.close()
    return StageProcess(process, here)


# ---- in a stage process
def run_stage(kind: type[Stage], spec: StageSpec, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles it
    try:
        kind(spec, pipe).serve()
    except (EOFError, ConnectionError):
        os._exit(0)  # the driver is gone
    except Exception as error:
        pipe.send(StageFailed(f"{type(error).__name__}: {error}"))
        os._exit(1)


class Stage:
    """The driver calls the methods without an underscore."""

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
        self._sends: deque[tuple[Any, Tensor]] = deque()
        self._undo = ExitStack()

    def _make_model(self) -> Any:
        return stage_model(self._spec)

    def serve(self) -> None:
        """Runs (method, arguments, whether to send the result or error back) until the driver ends this process."""
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
                    f"weight {name!r} has shape {shape}, {made}: stages are built from the model's own class"
                )
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value

    def build(self) -> tuple[Contract, Sizes]:
        """Call after all tensors have arrived."""
        spec, model = self._spec, self._model
        targets = dict(model.state_dict(keep_vars=True))
        lost = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        if lost:
            raise EngineError(f"stage {spec.index} has no values for {lost[0]!r}")
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
        """On success, later steps may use the adapter."""
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
    def step(self, inputs: StepInputs, wants: StepWants) -> None:
        """The last stage sends a StepResult; before it, every stage sends its layers' experts if requested."""
        forward = self._forward
        if wants.routing:
            with forward.routes() as chosen:
                y = self._compute(inputs, self._enter(inputs))
                self._pipe.send([chosen(*part) for part in wants.routing] if forward.ops.routes else [])
        else:
            y = self._compute(inputs, self._enter(inputs))
        if self._spec.is_last:
            with torch.inference_mode():
                self._pipe.send(answer(forward, forward.logits_of_rows(y, wants.rows), wants))

    def _enter(self, inputs: StepInputs) -> Tensor:
        if self._spec.is_first:
            return self._forward.embed(inputs)
        x = torch.empty(inputs.rows, self._decoder.width, dtype=self._decoder.dtype, device=self._wire)
        dist.recv(x, self._spec.index - 1)
        return x.to(self._device)

    def _compute(self, inputs: StepInputs, x: Tensor) -> Tensor:
        """Output of this stage's layers; also sent to the next stage."""
        y = self._forward.compute(inputs, x)
        if not self._spec.is_last:
            while len(self._sends) >= MOST_SENDS:
                self._sends.popleft()[0].wait()
            sent = y.to(self._wire).contiguous()
            self._sends.append((dist.isend(sent, self._spec.index + 1), sent))
        return y

    def prove(self, steps: Sequence[StepInputs], adapter_name: str | None = None) -> None:
        """Compares this stage's paged layers with the model's own code on the same inputs."""
        forward, spec = self._forward, self._spec
        adapter = forward.bank.adapters[adapter_name] if adapter_name is not None else None
        found, inside = list[Tensor](), list[Tensor]()
        for step in steps:
            inside.append(self._enter(step))
            found.append(self._compute(step, inside[-1]))
        ids = [token for step in steps for token in step.ids]
        source = torch.tensor([ids], device=self._device) if spec.is_first else torch.cat(inside)[None]
        with torch.inference_mode():
            with nullcontext() if adapter is None else attach_adapter(self._model, forward.ops, adapter):
                wanted = logits_of(self._model, source)[0]
            hidden = torch.cat(found)
            reached = forward.logits(hidden) if spec.is_last else hidden
        if same_bits(reached, wanted):
            return
        token = int((reached != wanted).any(-1).nonzero()[0]) if bool((reached != wanted).any()) else 0
        what = f"{spec.model_class.__name__} has a part without an exact form"
        if adapter is not None:
            what = f"adapter {adapter.name!r}"
        at = f"token {token}, layers {spec.layers.start} to {spec.layers.stop - 1}"
        raise ExactnessError(f"{what}; first difference: {at}")
