"""The driver of a pipeline: starts the stages, sends them weights and steps, and collects what the last one samples.

Several steps are in flight, one for each stage; each holds other requests, so that all stages compute at once. The
driver waits on the stages' pipes and on their processes, so a stage that dies is an error at once, and the others are
ended with it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

import tokentrue.engine.pipeline.messages as say
from tokentrue.engine.execute import StepResult, StepWants, routes_from
from tokentrue.engine.model.adapters import Adapter
from tokentrue.engine.model.step import StepInputs
from tokentrue.engine.model.weights import Weights, checked_weights, plain_name, targets_of
from tokentrue.engine.pipeline.plan import PipelinePlan, StageSpec, WeightRoutes, cut_layers, skeleton_of
from tokentrue.engine.pipeline.stage import run_stage
from tokentrue.engine.runner import Sizes
from tokentrue.errors import EngineError, ExactnessError
from tokentrue.numerics.fingerprint import shapes_of

Answer = TypeVar("Answer")


@dataclass(slots=True)
class StageProcess:
    process: Any
    pipe: Connection
    answers: deque[Any] = field(default_factory=deque[Any])


def start_pipeline(model: Any, plan: PipelinePlan) -> Pipeline:
    """Stages with the layers of `model` (on the host); its weights are sent by name, so nothing of it is kept here."""
    layers = cut_layers(len(model.model.layers), plan.stages)
    pipeline = Pipeline(
        skeleton_of(type(model), model.config), WeightRoutes(model, layers), stage_specs(model, plan, layers)
    )
    try:
        pipeline.build(model, plan)
    except BaseException:
        pipeline.close()
        raise
    return pipeline


def stage_specs(model: Any, plan: PipelinePlan, layers: list[range]) -> list[StageSpec]:
    gpus = torch.cuda.device_count() if plan.device.startswith("cuda") else 0
    folder = tempfile.mkdtemp(prefix="tokentrue-pipeline-")
    return [
        StageSpec(
            index=index, stages=plan.stages, layers=own, model_class=type(model), config=model.config, shapes=shapes_of(model),
            device=f"cuda:{index % gpus}" if gpus else plan.device, backend="nccl" if gpus >= plan.stages else "gloo",
            share=min(1.0, max(gpus, 1) / plan.stages), rendezvous=str(Path(folder) / "store"), threads=torch.get_num_threads(),
            max_positions=plan.max_positions, kv_tokens=plan.kv_tokens, limits=plan.limits,
        )
        for index, own in enumerate(layers)
    ]  # fmt: skip


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

    def build(self, model: Any, plan: PipelinePlan) -> None:
        every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, value in every:
            self._send_tensor(name, value)
        answers = self._ask_all(say.Build(), object)
        self._raise_first(answer for answer in answers if isinstance(answer, say.Outcome))
        built = [answer for answer in answers if isinstance(answer, say.Built)]
        if len({answer.contract.fingerprint for answer in built}) != 1:
            raise ExactnessError(
                "the stages' operators differ: " + "; ".join(str(answer.contract.operators) for answer in built)
            )
        num_blocks, states = (
            min(answer.num_blocks for answer in built),
            [a.num_states for a in built if a.num_states is not None],
        )
        self._tell_all(say.Allocate(num_blocks))
        self.contract = built[0].contract
        self.sizes = Sizes(
            vocabulary=model.get_output_embeddings().weight.shape[0], max_positions=plan.max_positions, block_size=built[0].block_size,
            num_blocks=num_blocks, num_states=states[0] if states else None,
        )  # fmt: skip

    # ---- steps ----------------------------------------------------------------------------------------------------------------------
    def start(self, inputs: StepInputs, wants: StepWants) -> None:
        self._tell_all(say.Step(inputs, wants))
        self._wants.append(wants)

    def finish(self) -> StepResult:
        wants = self._wants.popleft()
        chosen = [self._hear(stage, say.Chosen).parts for stage in self._stages] if wants.routing else []
        result = self._hear(self._stages[-1], StepResult)
        requests = zip(*(parts for parts in chosen if parts), strict=True)
        return replace(
            result,
            routes=[routes_from(*(np.concatenate(both, 1) for both in zip(*own, strict=True))) for own in requests],
        )

    def prove(self, steps: Sequence[StepInputs]) -> None:
        self._raise_first(self._ask_all(say.Prove(steps), say.Outcome))

    def clean(self) -> None:
        self._tell_all(say.Clean())

    # ---- weights --------------------------------------------------------------------------------------------------------------------
    def load(self, weights: Weights) -> None:
        """To each stage its own; a mapping or directory is checked whole before the first is sent."""
        for name, _, value in checked_weights(targets_of(self.model), weights, self.model):
            self._send_tensor(plain_name(name), value)
        self._raise_first(self._ask_all(say.Refresh(), say.Outcome))

    def set_adapter(self, adapter: Adapter, proof_steps: Sequence[StepInputs]) -> None:
        try:
            self._raise_first(self._ask_all(say.CheckAdapter(adapter), say.Outcome))
            self._raise_first(self._ask_all(say.Prove(proof_steps, adapter.name), say.Outcome))
        except (ExactnessError, EngineError):
            if self.dead is None:
                self.unload_adapter(adapter.name)
            raise

    def unload_adapter(self, name: str) -> None:
        self._tell_all(say.UnloadAdapter(name))

    def _send_tensor(self, name: str, value: torch.Tensor) -> None:
        flat = value.detach().cpu().contiguous()
        for stage, local in self._routes.targets(name):
            pipe = self._stages[stage].pipe
            self._tell(self._stages[stage], say.Tensor(local, flat.dtype, tuple(flat.shape)))
            try:
                pipe.send_bytes(memoryview(flat.view(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
            except OSError:
                self._die()

    # ---- the stages' processes
    # ------------------------------------------------------------------------------------------------------
    def _ask_all(self, message: Any, kind: type[Answer]) -> list[Answer]:
        self._tell_all(message)
        return [self._hear(stage, kind) for stage in self._stages]

    def _tell_all(self, message: Any) -> None:
        for stage in self._stages:
            self._tell(stage, message)

    def _tell(self, stage: StageProcess, message: Any) -> None:
        if self.dead is not None:
            raise EngineError(self.dead)
        try:
            stage.pipe.send(message)
        except OSError:
            self._die()

    def _hear(self, stage: StageProcess, kind: type[Answer]) -> Answer:
        """The stage's next answer. Any stage that fails or dies meanwhile ends the pipeline."""
        while not stage.answers:
            if self.dead is not None:
                raise EngineError(self.dead)
            ready = wait([other for s in self._stages for other in (s.pipe, s.process.sentinel)])
            for each in self._stages:
                if each.pipe in ready:
                    self._receive(each)
            if not stage.answers and any(each.process.sentinel in ready for each in self._stages):
                self._die()
        answer = stage.answers.popleft()
        assert isinstance(answer, kind), f"expected {kind.__name__}, got {type(answer).__name__}"
        return answer

    def _receive(self, stage: StageProcess) -> None:
        try:
            answer = stage.pipe.recv()
        except (EOFError, OSError):
            self._die()
        if isinstance(answer, say.Failed):
            self._die((self._stages.index(stage), answer.text))
        stage.answers.append(answer)

    def _die(self, failure: tuple[int, str] | None = None) -> NoReturn:
        """End every stage, and say which one was the cause: one that was killed, before one that lost its neighbour."""
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

    def _raise_first(self, outcomes: Iterable[say.Outcome]) -> None:
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error


def start_stage(spec: StageSpec) -> StageProcess:
    """A clean process: none of this one's threads, locks or CUDA state."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_stage.__module__])
    here, there = context.Pipe()
    process = context.Process(target=run_stage, args=(spec, there), name=f"tokentrue-stage-{spec.index}", daemon=True)
    process.start()
    there.close()
    return StageProcess(process, here)
