"""TRL: rows that are the gateway's record, for both of its GRPO trainers.

`rollout_func` is for `GRPOTrainer`, which takes one row per rollout: the sample that trains most tokens;
`tokens_left_out` counts the others. `rollout_worker` is for `AsyncGRPOTrainer`: every sample is a row, with the oldest
policy version of its trained tokens.
"""

import asyncio
import itertools
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokentrue.client import Client
from tokentrue.errors import ConfigError, GatewayError
from tokentrue.integrations.rollouts import (
    Agent,
    GatewayRollouts,
    group_name,
    open_images,
    require_reward,
    take_largest,
)
from tokentrue.json_types import JsonMapping
from tokentrue.samples.groups import group_sessions
from tokentrue.samples.trainer_rows import token_versions, trl_row
from tokentrue.types import Sample

CARRIES = "_tokentrue_carries_images"  # an attribute of trainers that train on images
COLUMNS = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "reward")


def rollout_func(
    agent: Agent, *, url: str, sampling: JsonMapping | None = None, **settings: Any
) -> Callable[[Sequence[Any], Any], dict[str, list[Any]]]:
    """`rollout_func(prompts, trainer)` for TRL: each prompt is one task for `agent(client, prompt)`.

    `settings` are those of `GatewayRollouts`. The temperature is pinned to the trainer's, because TRL scores
    completions at `args.temperature`.
    """

    def run(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        pinned = {"temperature": trainer.args.temperature, **(sampling or {})}
        rollouts = GatewayRollouts(url=url, agent=agent, sampling=pinned, **settings)
        groups = [f"step-{trainer.state.global_step}/{group_name(prompt)}" for prompt in prompts]
        # TRL deals the rollouts of one prompt to all processes, each with as many prompts as the others.
        files: dict[str, bytes] | None = {} if hasattr(trainer, CARRIES) else None
        found = rollouts.run(prompts, groups, first=trainer.accelerator.process_index * len(prompts), files=files)
        chosen = [take_largest(samples) for samples in found]
        rows = [trl_row(sample) for sample, _ in chosen]
        columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in COLUMNS}
        if files:
            columns["images"] = [open_images(sample, files, trainer.processing_class) for sample, _ in chosen]
        return columns | {"tokens_left_out": [left_out for _, left_out in chosen]}

    return run


def reward_from_rollout(completions: Sequence[Any], reward: Sequence[float | None], **_: Any) -> list[float]:
    """A reward function that returns what each agent returned, or what was posted to its session."""
    missing = [index for index, value in enumerate(reward) if value is None]
    if missing:
        raise ConfigError(
            f"rollouts {missing} have no reward: return a number from the agent, or use reward functions of your own"
        )
    return [float(value) for value in reward if value is not None]


def correct_with_gateway_logprobs(trainer: Any, publish: Callable[[Any, int], None]) -> None:
    """Lets TRL's importance-sampling correction read the gateway's log-probabilities, and publishes before each
    generation.

    TRL corrects only where it believes that vLLM sampled; this sets the three attributes that it looks at.
    `publish(model, step)` returns when the engine has these weights.
    """
    if not trainer.vllm_importance_sampling_correction:
        raise ConfigError("GRPOConfig.vllm_importance_sampling_correction is off; switch it on, or do not call this")

    class Publisher:
        def sync_weights(self) -> None:
            publish(trainer.accelerator.unwrap_model(trainer.model), trainer.state.global_step)

    trainer.vllm_generation = Publisher()
    trainer._last_loaded_step = -1
    trainer.use_vllm = True


def carry_images(trainer: Any) -> None:
    """Lets `GRPOTrainer` train on the images that `rollout_func` returns.

    TRL sees images of its dataset's prompts, and those that its own tool loop collects. This hands images on as if that
    loop had: `trainer.tools` is true only while TRL looks whether it ran.
    """
    if trainer.tools or trainer._image_pad_token_id is None:
        raise ConfigError("TRL takes images of rollouts for Qwen's vision models alone, without tools of the trainer")
    generate, score = trainer._generate, trainer._generate_and_score_completions

    def generate_with_images(prompts: Any) -> tuple[Any, ...]:
        *found, extra, _, _ = generate(prompts)
        images = extra.pop("images", None)
        if images is None:
            return *found, extra, None, []
        trainer.tools = [carry_images]
        return *found, extra, images, images

    def score_with_images(inputs: Any) -> Any:
        try:
            return score(inputs)
        finally:
            trainer.tools = []

    trainer._generate, trainer._generate_and_score_completions = generate_with_images, score_with_images
    setattr(trainer, CARRIES, True)


MOST_FAILURES = 3  # groups in a row without two rollouts to compare: the worker gives up
FILTERS_OFF: Mapping[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
}


def rollout_worker(
    agent: Agent,
    tasks: Sequence[Any],
    args: Any,
    *,
    url: str,
    sampling: JsonMapping | None = None,
    announce_versions: bool = False,
    **settings: Any,
) -> "RolloutWorker":
    """`rollout_worker=` of `AsyncGRPOTrainer`: groups of `args.num_generations` rollouts of each task, over and over.

    `args`: the trainer's `AsyncGRPOConfig`; its temperature is pinned, because TRL scores with it. `settings`: of
    `GatewayRollouts`. `announce_versions` tells the gateway each version, for an engine that TRL's own weight transfer
    updates; `WeightTransfer` publishes the version itself.
    """
    if filters := [name for name, off in FILTERS_OFF.items() if getattr(args, name, None) not in off]:
        raise ConfigError(f"AsyncGRPOConfig.{filters[0]}: TRL scores without it; switch it off")
    if not tasks:
        raise ConfigError("rollout_worker: needs at least one task")
    pinned = {"temperature": args.temperature, **(sampling or {})}
    rollouts = GatewayRollouts(url=url, agent=agent, sampling=pinned, **settings)
    return RolloutWorker(rollouts, tasks, args, announce_versions=announce_versions)


class RolloutWorker:
    """TRL's `RolloutWorkerProtocol`: a thread that runs rollouts while the trainer trains. Pauses while rows of
    `args.max_staleness` steps wait: more would be stale."""

    def __init__(self, rollouts: GatewayRollouts, tasks: Sequence[Any], args: Any, *, announce_versions: bool) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._rollouts, self._tasks, self._num_generations = rollouts, tasks, int(args.num_generations)
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._most_waiting = min(max(args.max_staleness, 1) * per_step, args.queue_maxsize)
        self._announces = announce_versions
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._last_error: BaseException | None = None
        self._last_sign = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tokentrue-rollouts", daemon=True)

    def start(self) -> None:
        self._last_sign = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        if self._announces:
            with Client(self._rollouts.url, self._rollouts.admin_key) as client:
                client.call("POST", "/admin/version", {"version": model_version})

    def check_health(self, stale_after_s: float) -> None:
        if self._failure is not None:
            raise GatewayError(f"rollouts stopped: {self._failure}") from self._failure
        silent_s = time.monotonic() - self._last_sign
        if silent_s > stale_after_s:
            raise GatewayError(f"no rollout ended for {silent_s:.0f} s; is the gateway's engine generating?")

    def _run(self) -> None:
        try:
            asyncio.run(self._run_groups())
        except Exception as error:  # reported by `check_health`, in the trainer's thread
            self._failure = error

    async def _run_groups(self) -> None:
        at_once = max(1, self._rollouts.concurrency // self._num_generations)
        running: set[asyncio.Task[bool]] = set()
        number = failures = 0
        try:
            while not self._stopped.is_set():
                while len(running) < at_once and self.rollout_buffer.qsize() < self._most_waiting:
                    running.add(asyncio.create_task(self._run_group(number)))
                    number += 1
                if not running:
                    self._last_sign = time.monotonic()  # it waits for the trainer
                    await asyncio.sleep(0.05)
                    continue
                done, running = await asyncio.wait(running, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    failures = 0 if task.result() else failures + 1
                if failures >= MOST_FAILURES:
                    raise GatewayError(f"{failures} groups in a row failed, the last with: {self._last_error}")
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_group(self, number: int) -> bool:
        """True if the group has rows: at least two of its rollouts succeeded."""
        task = self._tasks[number % len(self._tasks)]
        name = f"group-{number}"
        runs = [self._rollouts.run_rollout(task, group=name, index=index) for index in range(self._num_generations)]
        found = await asyncio.gather(*runs, return_exceptions=True)
        self._last_sign = time.monotonic()
        errors = [error for error in found if isinstance(error, BaseException)]
        done = [samples for samples in found if not isinstance(samples, BaseException)]
        self.metrics_queue.put({"rollouts/failed": (float(len(errors)), float(len(found)))})
        if errors and len(done) < 2:
            self._last_error = errors[0]
            return False
        for row in rows_from_group([sample for samples in done for sample in samples], group_id=number, task=task):
            self.rollout_buffer.put(row)
        return True


def rows_from_group(samples: Sequence[Sample], *, group_id: int, task: Any) -> list[Any]:
    """`RolloutSample`s. A session counts once in the group, and its rows share its advantage."""
    import numpy as np
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    sessions = group_sessions((str(group_id), sample.session_id, require_reward(sample)) for sample in samples)
    mean, std = statistics.fmean(sessions.rewards), statistics.pstdev(sessions.rewards)
    advantages = sessions.advantages(lambda rewards: [(reward - mean) / (std + 1e-8) for reward in rewards])
    return [
        RolloutSample(
            prompt=[{"role": "user", "content": str(task)}],
            completion=[],
            input_ids=np.asarray(sample.token_ids, dtype=np.int64),
            completion_mask=np.asarray(sample.loss_mask, dtype=np.int64),
            old_log_probs=np.asarray([value or 0.0 for value in sample.rollout_logprobs], dtype=np.float32),
            advantage=advantage,
            model_version=min(itertools.compress(token_versions(sample), sample.loss_mask)),  # of trained tokens
            group_id=group_id,
            metrics={"reward": require_reward(sample), "reward_std": std},
            enqueued_at=time.time(),
        )
        for sample, advantage in zip(samples, advantages, strict=True)
    ]


class WeightTransfer:
    """TRL's `WeightTransferProtocol`: `publish(state_dict, version)` returns when the engine has the weights. The n-th
    transfer is version n, as TRL counts."""

    def __init__(self, publish: Callable[[Mapping[str, Any], int], None]) -> None:
        self._publish, self.version = publish, 0

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self.version += 1
        self._publish({name: tensor.detach().clone() for name, tensor in iterator}, self.version)

    def resume(self) -> None:
        pass

    def destroy(self) -> None:
        pass
