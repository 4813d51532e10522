"""The environment protocol, its registry, and the configuration of rollouts. An environment lists tasks and runs one
with an OpenAI client, or an object with the same `chat.completions.create`. It never sees tokens, sessions or the
trainer, and sets no sampling values: the session pins them."""

import hashlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import field
from importlib import import_module
from typing import Any, Literal, Protocol

from tokentrue.errors import ConfigError, SamplingError
from tokentrue.hub import SMALL_MODEL as SMALL_MODEL
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import find_plugins
from tokentrue.records import record
from tokentrue.types import AtLeastOne, Count, NotNegative, Positive, Sampling, Share, check_fields

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 1 / 16
ENVIRONMENTS: Mapping[str, str] = {
    "calculator": "tokentrue.environments.word_problems:Calculator",
    "agent": "tokentrue.environments.agents:CommandLineAgent",
    "verifiers": "tokentrue.integrations.verifiers:VerifiersEnvironment",
}
# Tracebacks of user code; `tokentrue rollout` and `train` write them to rollouts.log.
LOG = logging.getLogger("tokentrue.rollouts")
LOG.addHandler(logging.NullHandler())


@record
class Task:
    """`task_id` is stable: the same text has the same id in every process."""

    task_id: str
    prompt: str
    answer: int | None = None
    data: JsonMapping = field(default_factory=JsonObject)


@record
class Outcome:
    reward: float
    note: str | None = None


class Environment(Protocol):
    name: str

    def tasks(self, count: int, *, seed: int = 0, split: Split = "train") -> Sequence[Task]: ...

    async def run(self, client: Any, task: Task) -> float | Outcome: ...


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def choose_split(text: str) -> Split:
    return "heldout" if int(digest(text)[:8], 16) < HELDOUT_SHARE * 16**8 else "train"


def load_environment(name: str, options: JsonMapping | None = None) -> Environment:
    """`name` is one of `ENVIRONMENTS`, an entry point of `tokentrue.environments`, or `package.module:Class`."""
    plugins = {} if name in ENVIRONMENTS or ":" in name else find_plugins("environments")
    address = plugins[name].value if name in plugins else ENVIRONMENTS.get(name, name)
    module_name, _, attribute = address.partition(":")
    if not attribute:
        known = ", ".join([*ENVIRONMENTS, *plugins])
        raise ConfigError(f"environment: no {name!r}; one of {known}, or package.module:Class")
    if name not in ENVIRONMENTS and os.getcwd() not in sys.path:
        # The script `tokentrue` has the folder of programs on its path, not the user's.
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(import_module(module_name), attribute)(**(options or {}))
    except ConfigError:  # an environment that reports what is wrong with its options
        raise
    except Exception as error:  # the module is the user's: it may raise anything
        LOG.error("environment %s cannot be loaded", address, exc_info=True)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if len(frames) > 1 else ""
        said = f"{type(error).__name__}: {error}{place}"
        raise ConfigError(f"environment: {address} cannot be loaded: {said}") from error
    missing = [part for part in ("name", "tasks", "run") if not hasattr(made, part)]
    if missing:
        raise ConfigError(f"environment: {address} has no {', '.join(missing)}; see tokentrue.environments.Environment")
    return made


@record
class RolloutConfig:
    """`tasks` groups of `group_size` rollouts each. `sampling` values are pinned on every session and override the
    agent's."""

    environment: str = "calculator"
    options: JsonMapping = field(default_factory=JsonObject)
    split: Split = "train"
    tasks: AtLeastOne = 8
    group_size: AtLeastOne = 8
    temperature: NotNegative = 1.0
    max_tokens: AtLeastOne = 64
    # ("system",) keeps each conversation's first system prompt; None: the gateway decides
    pin: tuple[Literal["system"], ...] | None = None
    side_requests: Literal["leave_out", "train"] | None = None  # None: the gateway decides
    concurrency: AtLeastOne = 64
    timeout_s: Positive = 120.0
    max_failed: Share = 0.5  # of a training round's rollouts that may fail; beyond it the run stops
    resample: Count = 0  # per training round: how often groups with equal rewards are replaced by other tasks
    seed: int = 0
    top_logprobs: int = 0  # the sampler's most likely ids, recorded with each token (score centering)

    def __post_init__(self) -> None:
        check_fields(self, "rollout")
        if any(name != "system" for name in self.pin or ()):
            raise ConfigError(f'rollout.pin: {list(self.pin or ())!r} must be ["system"] or []')
        try:
            Sampling(**self.sampling)
        except SamplingError as error:
            raise ConfigError(f"rollout.{error}") from error

    @property
    def sampling(self) -> JsonMapping:
        """Filters are pinned off: agents request them, and log-probabilities would then be of another distribution."""
        pinned = {"temperature": self.temperature, "max_tokens": self.max_tokens, "top_p": 1.0, "top_k": 0}
        return {**pinned, "top_logprobs": self.top_logprobs} if self.top_logprobs else pinned
