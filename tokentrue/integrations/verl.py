"""verl: an agent loop whose rollouts go through a gateway (`rollout.agent.agent_loop_config_path`), or a manager of
such loops (`rollout.agent.agent_loop_manager_class`), which needs no file of loops.

`agent(client, row)` gets the dataset's row. The v1 trainer takes every sample of a rollout, the older one the sample
that trains most tokens.
"""

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from tokentrue.errors import ConfigError
from tokentrue.integrations.rollouts import (
    Agent,
    GatewayRollouts,
    group_name,
    open_images,
    scored_settings,
    take_largest,
)
from tokentrue.json_types import JsonObject
from tokentrue.samples.trainer_rows import verl_row
from tokentrue.types import Sample

AGENT_LOOPS = "verl.experimental.agent_loop.agent_loop"
AGENT_LOOPS_V1 = "verl.trainer.ppo.v1.agent_loop_tq"
NAME = "tokentrue"  # of the loop in verl's registry
FIELDS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score", "num_turns")


def agent_loop(agent: Agent, *, url: str, **settings: Any) -> type[Any]:
    """A class for verl's registry. `settings` are those of `GatewayRollouts`: `sampling`, `seed`, `timeout_s`."""
    base: Any = import_module(AGENT_LOOPS).AgentLoopBase
    rollouts = GatewayRollouts(url=url, agent=agent, **settings)

    class GatewayAgentLoop(base):
        async def run(self, sampling_params: JsonObject, **row: Any) -> Any:
            group = str(row["uid"]) if "uid" in row else group_name(row.get("index"), row.get("raw_prompt"))
            files: dict[str, bytes] = {}
            samples = await rollouts.run_rollout(
                row, group=group, index=row.get("session_id"), sampling=scored_settings(sampling_params), files=files
            )
            if "session_id" in row:  # the v1 trainer, which numbers the rollouts of a prompt
                return [output_of(sample, open_images(sample, files, self.processor)) for sample in samples]
            chosen, left_out = take_largest(samples)
            output = output_of(chosen, open_images(chosen, files, self.processor), tokens_left_out=left_out)
            for name, ids in (("prompt", output.prompt_ids), ("response", output.response_ids)):
                bound = getattr(self.rollout_config, f"{name}_length")
                if len(ids) > bound:  # the older trainer pads to fixed lengths, and fails later without a name
                    raise ConfigError(
                        f"sample {chosen.sample_id}: its {name} has {len(ids)} tokens; rollout.{name}_length is "
                        f"{bound}: raise it"
                    )
            return output

    return GatewayAgentLoop


def agent_loop_manager(agent: Agent, *, url: str, **settings: Any) -> type[Any]:
    """A class for verl's `agent_loop_manager_class`: verl's own manager and workers, every row of which runs `agent`,
    whatever loop the dataset names. `settings` as for `agent_loop`."""
    loop = agent_loop(agent, url=url, **settings)

    class GatewayAgentLoopManager:
        @staticmethod
        def create(config: Any, **clients: Any) -> Any:
            is_v1 = config.transfer_queue.enable  # which that trainer's runner sets
            verl: Any = import_module(AGENT_LOOPS_V1 if is_v1 else AGENT_LOOPS)
            base: Any = verl.AgentLoopManagerTQ if is_v1 else verl.AgentLoopManager
            worker: Any = verl.AgentLoopWorkerTQ.__ray_actor_class__ if is_v1 else verl.AgentLoopWorker

            class GatewayWorker(worker):
                async def _run_agent_loop(self, *arguments: Any, agent_name: str, **row: Any) -> Any:
                    # In the worker's process: verl finds loops by name in a table of its module, and hydra builds them
                    # from a path; it takes no class there, but hands objects on.
                    entry = {"_target_": f"{__name__}.build_loop", "of": SimpleNamespace(kind=loop)}
                    import_module(AGENT_LOOPS)._agent_loop_registry.setdefault(NAME, entry)
                    return await worker._run_agent_loop(self, *arguments, agent_name=NAME, **row)

            class Manager(base):
                def __init__(self, *arguments: Any, **named: Any) -> None:
                    base.__init__(self, *arguments, **named)
                    self.agent_loop_workers_class = import_module("ray").remote(GatewayWorker)

            return Manager.create(config=config, **clients)

    return GatewayAgentLoopManager


def build_loop(of: Any, **arguments: Any) -> Any:
    return of.kind(**arguments)


def output_of(sample: Sample, images: Sequence[Any] = (), **extra: Any) -> Any:
    """verl's `AgentLoopOutput`, with opened images, whose pixels verl computes; weight versions are the steps of its
    staleness control."""
    if len(images) != len(sample.images):
        raise ConfigError(f"sample {sample.sample_id} has {len(sample.images)} images, not {len(images)}")
    verl: Any = import_module(AGENT_LOOPS)
    row = verl_row(sample)
    steps = {name: row["extra_fields"][name] for name in ("min_global_steps", "max_global_steps")}
    extra_fields: JsonObject = {**extra, "reward_extra_info": {}, **steps, "sample_id": sample.sample_id}
    fields = {name: row[name] for name in FIELDS}
    if images:  # no settings beside those of the processor's directory, whatever data.mm_processor_kwargs says
        fields |= {"multi_modal_data": {"images": list(images)}, "mm_processor_kwargs": {}}
    if row["routed_experts"] is not None:  # verl pads an array, and takes no list
        fields["routed_experts"] = np.array(row["routed_experts"], np.int16)
    return verl.AgentLoopOutput(**fields, metrics=verl.AgentLoopMetrics(), extra_fields=extra_fields)
