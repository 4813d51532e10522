"""Pipeline driver: starts the stages, sends them weights and steps, and collects what the last one samples.

Several steps are in flight, one per stage, with different requests, so that all stages compute at once. The driver
waits on the stages' pipes and processes: if a stage dies, it raises at once and ends the others.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from tokentrue.engine.adapters import Adapter
from tokentrue.engine.pipeline.stage import (
    BuiltStage,
    StageFailed,
    StageSpec,
    WeightRoutes,
    cut_layers,
    run_stage,
    skeleton_of,
)
from tokentrue.engine.request import StepInputs
from tokentrue.engine.runner import Sizes, StepResult, StepWants, routes_from
from tokentrue.engine.schedule import ScheduleLimits
from tokentrue.engine.weights import Weights, checked_weights, plain_name, targets_of
from tokentrue.errors import EngineError, ExactnessError
from tokentrue.numerics.exact import shapes_of


@dataclass(slots=True)
class StageProcess:
    process: Any
    pipe: Connection
    answers: deque[Any] = field(default_factory=deque[Any])


def start_pipeline(
    model: Any, *, stages: int, device: str, max_positions: int, kv_tokens: int | None, limits: ScheduleLimits
) -> Pipeline:
    """Starts stages with the layers of `model` (on the host); sends its weights by name and keeps none."""
    layers = cut_layers(len(model.model.layers), stages)
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    routes, shapes = WeightRoutes(model, layers), shapes_of(model)
    rendezvous = str(Path(tempfile.mkdtemp(prefix="tokentrue-pipeline-")) / "store")
    specs = [
        StageSpec(
            index=index, stages=stages, layers=own, model_class=type(model), config=model.config, shapes=shapes,
            device=f"cuda:{index % gpus}" if gpus else device, backend="nccl" if gpus >= stages else "gloo",
            share=min(1.0, max(gpus, 1) / stages), rendezvous=rendezvous, threads=torch.get_num_threads(),
            max_positions=max_positions, kv_tokens=kv_tokens, limits=limits,
        )
        for index, own in enumerate(layers)
    ]  # fmt: skip
    pipeline = Pipeline(skeleton_of(type(model), model.config), routes, specs)
    try:
        pipeline.build(model, max_positions)
    except BaseException:
        pipeline.close()
        raise
    return pipeline


class Pipeline:
    """A `Runner` over several processes."""

    def __init__(self, skeleton: Any, routes: WeightRoutes, specs: Sequence[StageSpec]) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.model = skeleton
        self.depth = len(specs)
        self.dead: str | None = None
        self._routes = routes
        self._rendezvous = specs[0].rendezvous
        self._wants: deque[StepWants] = deque()
        self._stages = [start_stage(spec) for spec in specs]

    def build(self, model: Any, max_positions: int) -> None:
        every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, value in every:
            self._send_tensor(name, value)
        built: list[BuiltStage] = self._ask_all("build")
        if len({stage.contract.fingerprint for stage in built}) != 1:
            raise ExactnessError(
                "the stages' operators differ: " + "; ".join(str(stage.contract.operators) for stage in built)
            )
        num_blocks = min(stage.num_blocks for stage in built)
        self._tell_all("allocate", num_blocks)
        self.contract = built[0].contract
        self.sizes = Sizes(
            vocabulary=model.get_output_embeddings().weight.shape[0],
            max_positions=max_positions,
            block_size=built[0].block_size,
            num_blocks=num_blocks,
            num_states=next((stage.num_states for stage in built if stage.num_states is not None), None),
        )

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
        flat = value.detach().cpu().contiguous()
        for stage, local in self._routes.targets(name):
            pipe = self._stages[stage].pipe
            self._tell(self._stages[stage], "put", (local, flat.dtype, tuple(flat.shape)))
            try:
                pipe.send_bytes(memoryview(flat.view(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
            except OSError:
                self._die()

    # ---- the stages' processes
    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        for stage in self._stages:
            self._tell(stage, method, args, answers=True)
        answers = [self._hear(stage) for stage in self._stages]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _tell_all(self, method: str, *args: Any) -> None:
        for stage in self._stages:
            self._tell(stage, method, args)

    def _tell(self, stage: StageProcess, method: str, args: tuple[Any, ...], *, answers: bool = False) -> None:
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
            answer = stage.pipe.recv()
        except (EOFError, OSError):
            self._die()
        if isinstance(answer, StageFailed):
            self._die((self._stages.index(stage), answer.text))
        stage.answers.append(answer)

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
            what = f"stage {killed[0][0]} of {self.depth} died (exit code {killed[0][1]})"
        elif failure is not None:
            what = f"stage {failure[0]} of {self.depth} failed: {failure[1]}"
        else:
            what = f"a stage of {self.depth} ended"
        self.dead = f"the pipeline is down: {what}; start the engine again"
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
        shutil.rmtree(Path(self._rendezvous).parent, ignore_errors=True)

    def close(self) -> None:
        if self.dead is None:
            self.dead = "the engine was closed"
            self._end()


def start_stage(spec: StageSpec) -> StageProcess:
    """Spawns a clean process: no threads, locks or CUDA state of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_stage.__module__])
    here, there = context.Pipe()
    process = context.Process(target=run_stage, args=(spec, there), name=f"tokentrue-stage-{spec.index}", daemon=True)
    process.start()
    there.close()
    return StageProcess(process, here)
