"""One stage of a pipeline, in a process of its own: some layers, their caches, and hidden states from the stage before
to the one after.

Hidden states travel by torch.distributed (nccl where every stage has a GPU of its own, else gloo through host memory);
everything else comes over the pipe to the driver. Steps are computed in the order of the pipe, so no step overtakes
another in any stage.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tokentrue.engine.pipeline.messages as say
from tokentrue.engine.execute import answer, read_experts
from tokentrue.engine.model.adapters import Adapter, attach_adapter
from tokentrue.engine.model.decoder import read_decoder
from tokentrue.engine.model.forward import Forward
from tokentrue.engine.model.sizing import blocks_for
from tokentrue.engine.model.step import StepInputs
from tokentrue.engine.pipeline.plan import StageSpec, stage_model
from tokentrue.engine.runner import check_adapter, states_for
from tokentrue.errors import EngineError, ExactnessError, TokenTrueError
from tokentrue.numerics import exact, logits_of, ops_for, same_bits
from tokentrue.numerics.fingerprint import contract_for

MOST_SENDS = 2
"""Hidden states on their way to the next stage; beyond that this stage waits."""
PATIENCE = timedelta(days=7)
"""A stage waits for the one before it as long as nobody asks for anything; the driver notices a dead one."""


def run_stage(spec: StageSpec, pipe: Connection) -> None:
    """The process's main function; ends with the driver."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles it
    try:
        Stage(spec, pipe).serve()
    except (EOFError, ConnectionError):
        os._exit(0)  # the driver is gone
    except Exception as error:
        pipe.send(say.Failed(f"{type(error).__name__}: {error}"))
        os._exit(1)


class Stage:
    def __init__(self, spec: StageSpec, pipe: Connection) -> None:
        torch.set_num_threads(spec.threads)
        self.spec = spec
        self.pipe = pipe
        self.device = torch.device(spec.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.model = stage_model(spec)
        self.wire = self.device if spec.backend == "nccl" else torch.device("cpu")
        self.forward: Forward | None = None
        self.targets: dict[str, torch.Tensor] | None = None
        self.sends: deque[tuple[Any, torch.Tensor]] = deque()
        self.undo = ExitStack()

    def serve(self) -> None:
        while not isinstance(message := self.pipe.recv(), say.Stop):
            self.handle(message)
        self.undo.close()

    def handle(self, message: Any) -> None:
        match message:
            case say.Tensor():
                self.put(message, self.pipe.recv_bytes())
            case say.Build():
                try:
                    self.pipe.send(self.build())
                except TokenTrueError as error:
                    self.pipe.send(say.Outcome(error))
            case say.Allocate():
                assert self.forward is not None
                decoder, ops = self.forward.decoder, self.forward.ops
                self.forward = Forward(
                    decoder, ops, num_blocks=message.num_blocks, num_states=states_for(decoder, self.spec.limits)
                )
            case say.Step():
                self.step(message)
            case say.Prove():
                self.pipe.send(say.Outcome(self.prove(message)))
            case say.Refresh():
                self.ready.refresh()
                self.pipe.send(say.Outcome(None))
            case say.Clean():
                self.ready.clean()
            case say.CheckAdapter():
                self.pipe.send(say.Outcome(self.take_adapter(message.adapter)))
            case say.UnloadAdapter():
                self.ready.bank.remove(message.name)
            case _:
                raise EngineError(f"a stage cannot do {type(message).__name__}")

    @property
    def ready(self) -> Forward:
        assert self.forward is not None, "the stage is built first"
        return self.forward

    # ---- weights --------------------------------------------------------------------------------------------------------------------
    def put(self, header: say.Tensor, data: bytes) -> None:
        value = torch.empty(header.shape, dtype=header.dtype)
        if data:
            value.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if self.targets is not None:
            with torch.no_grad():
                self.targets[header.name].data.copy_(value)
            return
        path, _, leaf = header.name.rpartition(".")
        module, value = self.model.get_submodule(path), value.to(self.device)
        if (own := module._parameters.get(leaf)) is not None:
            if own.shape != value.shape:
                made = f"{self.spec.model_class.__name__}(config) makes {tuple(own.shape)}"
                raise EngineError(
                    f"weight {header.name!r} has shape {header.shape}, {made}: stages are built from the model's own class"
                )
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value

    def build(self) -> say.Built:
        spec = self.spec
        tensors = dict(self.model.state_dict(keep_vars=True))
        lost = [
            name for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()) if tensor.is_meta
        ]
        if lost:
            raise EngineError(f"stage {spec.index} has no values for {lost[0]!r}")
        ops = ops_for(self.device)
        self.undo.enter_context(exact(self.model, ops=ops))
        contract = contract_for(spec.shapes, ops, self.device)
        decoder = read_decoder(self.model, ops, max_positions=spec.max_positions)
        self.targets = tensors
        blocks = blocks_for(
            decoder, ops, limits=spec.limits, kv_tokens=spec.kv_tokens, device=self.device, share=spec.share
        )
        self.forward = Forward(decoder, ops, num_blocks=1, num_states=states_for(decoder, spec.limits))
        dist.init_process_group(
            spec.backend,
            init_method=f"file://{spec.rendezvous}",
            rank=spec.index,
            world_size=spec.stages,
            timeout=PATIENCE,
        )
        return say.Built(contract, blocks, states_for(decoder, spec.limits), ops.block_size)

    # ---- steps ----------------------------------------------------------------------------------------------------------------------
    def step(self, message: say.Step) -> None:
        forward, wants = self.ready, message.wants
        if wants.routing:
            with forward.routes() as chosen:
                y = self.compute(message.inputs)
                self.pipe.send(
                    say.Chosen([read_experts(chosen, part) for part in wants.routing] if forward.ops.routes else [])
                )
        else:
            y = self.compute(message.inputs)
        if self.spec.is_last:
            with torch.inference_mode():
                self.pipe.send(answer(forward, forward.logits_of_rows(y, wants.rows), wants))

    def compute(self, inputs: StepInputs) -> torch.Tensor:
        """What comes out of this stage's layers; the next stage gets it, too."""
        return self.compute_from(inputs, self.entering(inputs))

    def entering(self, inputs: StepInputs) -> torch.Tensor:
        if self.spec.is_first:
            return self.ready.embed(inputs)
        decoder = self.ready.decoder
        x = torch.empty(inputs.rows, decoder.width, dtype=decoder.dtype, device=self.wire)
        dist.recv(x, self.spec.index - 1)
        return x.to(self.device)

    def compute_from(self, inputs: StepInputs, x: torch.Tensor) -> torch.Tensor:
        y = self.ready.compute(inputs, x)
        if not self.spec.is_last:
            while len(self.sends) >= MOST_SENDS:
                self.sends.popleft()[0].wait()
            sent = y.to(self.wire).contiguous()
            self.sends.append((dist.isend(sent, self.spec.index + 1), sent))
        return y

    # ---- proof ----------------------------------------------------------------------------------------------------------------------
    def prove(self, message: say.Prove) -> Exception | None:
        """This stage's layers over pages, against the model's own code over the same inputs."""
        adapter = self.ready.bank.adapters[message.adapter] if message.adapter is not None else None
        found, inside = list[torch.Tensor](), list[torch.Tensor]()
        for step in message.steps:
            inside.append(self.entering(step))
            found.append(self.compute_from(step, inside[-1]))
        ids = [token for step in message.steps for token in step.ids]
        source = torch.tensor([ids], device=self.device) if self.spec.is_first else torch.cat(inside)[None]
        with torch.inference_mode():
            with nullcontext() if adapter is None else attach_adapter(self.model, self.ready.ops, adapter):
                wanted = logits_of(self.model, source)[0]
            hidden = torch.cat(found)
            reached = self.ready.logits(hidden) if self.spec.is_last else hidden
        if same_bits(reached, wanted):
            return None
        token = int((reached != wanted).any(-1).nonzero()[0]) if bool((reached != wanted).any()) else 0
        what = (
            f"adapter {adapter.name!r}"
            if adapter is not None
            else f"{self.spec.model_class.__name__} has a part without an exact form"
        )
        return ExactnessError(
            f"{what}; first difference: token {token}, layers {self.spec.layers.start} to {self.spec.layers.stop - 1}"
        )

    def take_adapter(self, adapter: Adapter) -> Exception | None:
        own, first = self.spec.layers, self.spec.layers.start
        weights = {
            (layer - first, projection): replace(low, a=low.a.to(self.device), b=low.b.to(self.device))
            for (layer, projection), low in adapter.weights.items() if layer in own
        }  # fmt: skip
        local = replace(adapter, weights=weights)
        try:
            check_adapter(local, self.model, self.ready, first)
        except TokenTrueError as error:
            return error
        self.ready.bank.set(local)
        return None
