"""A training run from its configuration: trainer, store, source of batches."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentrue.app.background import Embedded, embedded_gateway
from tokentrue.app.configuration import NONE, Checks, build
from tokentrue.app.libraries import read_vocabulary_size, require_dtype, require_samples_of
from tokentrue.app.rollouts import RolloutRounds, RoundImages, Share, evaluate, sessions_on
from tokentrue.app.wiring import EngineConfig, ModelConfig, ServeConfig, ServerConfig, check_gateway
from tokentrue.environments import SMALL_MODEL, RolloutConfig, load_environment
from tokentrue.errors import ConfigError, FileFormatError
from tokentrue.hub import find_directory, load_causal_model
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.providers.registry import REMOTE, find_address
from tokentrue.records import record
from tokentrue.samples.files import read_sound_samples
from tokentrue.samples.groups import group_of
from tokentrue.samples.images import ImageFolder
from tokentrue.train.config import EvaluationConfig, LoggerName, OptimConfig, TrainConfig, config_hash, plain_settings
from tokentrue.types import AtLeastOne, Sample

if TYPE_CHECKING:
    from tokentrue.mismatch import LossConfig
    from tokentrue.providers.pool import Pool
    from tokentrue.train import Publisher, Ranks, Rounds, Store, Trainer
    from tokentrue.train.loop import Evaluator


@record
class LossSpec:
    """`options` override fields of the `LossConfig` named. `correction`: a preset, or a table of `Correction` fields
    that override those of the loss or of its `preset`."""

    name: str = "dapo"
    options: JsonMapping = field(default_factory=JsonObject)
    correction: str | JsonMapping | None = None


@record
class TrainRun:
    """`samples` trains from a file; without it rounds are sampled live by the `rollout` section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossSpec = field(default_factory=LossSpec)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    samples: Path | None = None
    out: Path = Path("out/train")
    device: str = "cpu"
    dtype: str = "float32"
    threads: AtLeastOne = 2
    log: tuple[LoggerName, ...] = ("tensorboard",)  # besides metrics.jsonl

    def __post_init__(self) -> None:
        for name in ("temperature", "seed"):
            wanted, default = getattr(self.rollout, name), TrainConfig.__dataclass_fields__[name].default
            if getattr(self.train, name) not in (default, wanted):
                raise ConfigError(f"train.{name}: set rollout.{name}, which rollouts and trainer both use")
        require_dtype(self.dtype)
        if self.samples is not None:
            # Settings of engine and rollouts are allowed: one file serves `tokentrue rollout` and this.
            for key in (each.name for each in fields(EvaluationConfig)):
                if getattr(self.evaluation, key) != getattr(EvaluationConfig(), key):
                    raise ConfigError(
                        f"evaluation.{key}: has no effect with samples, which train from a file; leave one of them out"
                    )
        elif self.train.exact and self.engine.name != "exact":
            find_address(self.engine.name)
            cure = "set train.exact=false, or use the exact engine"
            raise ConfigError(f"train.exact: engine {self.engine.name!r} is not exact; {cure}")

    @property
    def model_path(self) -> str:
        return self.model.path or str(SMALL_MODEL)


def check_run(checks: Checks, settings: TrainRun) -> None:
    path = settings.model_path
    if settings.samples is None:
        checks(load_environment, settings.rollout.environment, settings.rollout.options)
        store = settings.out / "sessions.sqlite"  # created by the run: a refused one leaves no files
        check_gateway(checks, settings.model, engine_for(settings), f"sqlite:{store}" if store.is_file() else None)
    else:
        checks.require(settings.samples.is_file(), f"samples: there is no file {str(settings.samples)!r}")
        checks(find_directory, path)
    for name in settings.log:
        extra = "train" if name == "tensorboard" else name
        cure = f"pip install 'tokentrue[{extra}]', or leave it out of log"
        checks.require(find_spec(name) is not None, f"log: {name} is not installed: {cure}")
    needs_peft = settings.train.lora_rank > 0 and find_spec("peft") is None
    checks.require(not needs_peft, "train.lora_rank: needs peft: pip install 'tokentrue[lora]'")


def loss_for(spec: LossSpec) -> "LossConfig":
    from tokentrue.mismatch import LOSSES, PRESETS, loss_named

    if spec.name not in LOSSES:
        raise ConfigError(f"loss.name: no loss {spec.name!r}; choose one of {', '.join(LOSSES)}")
    if "correction" in spec.options:
        raise ConfigError("loss.options.correction: belongs to loss.correction")
    base = loss_named(spec.name)
    table: JsonObject = dict(spec.correction) if isinstance(spec.correction, Mapping) else {"preset": spec.correction}
    preset = table.pop("preset", None)
    if preset is not None and preset not in list(PRESETS):  # a list, say, cannot be a key
        raise ConfigError(f"loss.correction: no preset {preset!r}; choose one of {', '.join(PRESETS)}")
    correction = base.correction if preset is None else PRESETS[preset]
    if table:
        surrogate = spec.options.get("surrogate", base.surrogate)
        implied = {} if surrogate in (None, NONE) else {"surrogate": surrogate}
        correction = build(type(correction), {**implied, **table}, path="loss.correction", base=correction)
    return build(type(base), {**spec.options, "correction": correction}, path="loss.options", base=base)


def trainer_for(settings: TrainRun, ranks: "Ranks") -> "tuple[Trainer, JsonMapping]":
    from tokentrue.numerics.leaves import leaves_for
    from tokentrue.train import ExactScorer, Trainer, shard

    config = replace(settings.train, temperature=settings.rollout.temperature, seed=settings.rollout.seed)
    if settings.samples is not None:  # the same rows repeat: waiting cannot help
        config = replace(config, max_idle_steps=0, offline=True)
    optim, loss = settings.optim, loss_for(settings.loss)

    def load() -> Any:
        return load_causal_model(settings.model_path, dtype=settings.dtype).to(settings.device)

    model = load()
    if config.lora_rank:
        if ranks.world > 1:
            raise ConfigError("train.lora_rank: an adapter is trained by one rank; start one process")
        model = add_adapter(model, config.lora_rank)
    if config.checkpoint_activations:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wants_reference = loss.penalty is not None and loss.penalty.against == "reference"
    reference = shard(load().requires_grad_(False), ranks) if wants_reference else None
    options: JsonMapping = settings.engine.options if settings.engine.name == "exact" else {}
    leaves = leaves_for(options.get("tensor"), options.get("leaves"))
    file, played = settings.samples, RoundImages(settings.out)

    def read_image(sha256: str) -> bytes:  # the round of a step has the number of the weights that it trains
        return (played.folder(trainer.version) if file is None else ImageFolder(file)).read(sha256)[0]

    trainer = Trainer(
        shard(model, ranks), config=config, optim=optim, loss=loss, ranks=ranks, reference=reference, images=read_image,
        scorer=ExactScorer(leaves=leaves, tree=config.tree) if config.exact and leaves > 1 else None,
    )  # fmt: skip
    facts = {
        "dtype": settings.dtype,
        "device": settings.device.partition(":")[0],
        "engine": ("" if file is not None else settings.engine.name) + (f" leaves={leaves}" if leaves > 1 else ""),
        "samples": "" if file is None else f"{file.name} {file.stat().st_size if file.is_file() else 0}",
    }
    rollout = replace(settings.rollout, concurrency=1, timeout_s=1.0, max_failed=1.0)
    made_from = plain_settings(
        train=identity(config, optim), optim=trainer.optim, loss=loss, rollout=rollout, model=settings.model
    )
    return trainer, {**made_from, **facts}


def add_adapter(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def identity(config: TrainConfig, optim: OptimConfig) -> TrainConfig:
    """What results depend on; with a constant rate `steps` may grow."""
    steps = 1 if optim.schedule == "constant" else config.steps
    alike: JsonObject = {
        "checkpoint_every": 0, "checkpoint_minutes": 0.0, "keep_checkpoints": 1, "shard_checkpoint_gib": 0.0,
        "max_idle_steps": 0, "max_skipped_updates": 0,
    }  # fmt: skip
    return replace(config, steps=steps, **alike)


def store_for(settings: TrainRun, made_from: JsonMapping) -> "tuple[Store, int]":
    """The checkpoint store, and the step to resume at."""
    from tokentrue.train.checkpoint import Store, file_digest, latest, read_state

    store = Store(
        directory=settings.out / "checkpoints",
        run_hash=config_hash(made_from),
        model=settings.model_path,
        samples_digest="" if settings.samples is None else file_digest(settings.samples),
        made_from=made_from,
        on_kept=RoundImages(settings.out).drop_before,
    )
    newest = latest(store.directory)
    return store, 0 if newest is None else read_state(newest, store)["version"]


class SampleFile:
    """A file's groups, in the order of their first sample, without samples that have no reward (`notes` counts them)."""

    def __init__(self, path: Path, settings: TrainRun, *, trust: bool) -> None:
        samples = read_sound_samples(path, trust=trust)
        require_samples_of(samples, settings.model_path)
        rewarded = [sample for sample in samples if sample.reward is not None]
        if not rewarded:
            raise FileFormatError(f"{path}: all {len(samples)} samples are without reward; score their sessions first")
        self._groups: dict[str, list[Sample]] = {}
        for sample in rewarded:
            self._groups.setdefault(group_of(sample), []).append(sample)
        count = len(self._groups)
        self.notes = [f"{len(rewarded)} samples in {count} groups from {path}"]
        if len(rewarded) < len(samples):
            self.notes.append(f"left out: {len(samples) - len(rewarded)} samples without reward")
        alone = sum(len({sample.session_id for sample in group}) == 1 for group in self._groups.values())
        if alone:
            self.notes.append(f"{alone} groups have one session: a group baseline gives them advantage 0")
        wanted = settings.train.groups_per_step
        if count < wanted:
            self.notes.append(f"train.groups_per_step is {wanted}: each step trains on all {count} groups")

    def groups(self) -> Iterator[list[Sample]]:
        yield from self._groups.values()


@asynccontextmanager
async def source_for(
    settings: TrainRun, ranks: "Ranks", file: SampleFile | None
) -> "AsyncGenerator[tuple[Rounds, Publisher, Evaluator]]":
    """With embedded engines every rank has a gateway and an engine; otherwise rank 0 alone reads the file or calls
    servers."""
    from tokentrue.train import Publisher, SourceRounds
    from tokentrue.train.loop import Evaluator, NoRounds

    is_remote = settings.engine.name in REMOTE
    if file is not None:
        rounds = SourceRounds(file, settings.train.groups_per_step) if ranks.first else NoRounds()
        yield rounds, Publisher(), Evaluator()
    elif is_remote and not ranks.first:
        yield NoRounds(), publisher_for(settings, None), evaluator_for(settings, None, ranks, Share())
    else:
        share = Share() if is_remote else Share(rank=ranks.rank, world=ranks.world)
        store = f"sqlite:{settings.out / ('sessions.sqlite' if ranks.first else f'sessions-{ranks.rank}.sqlite')}"
        server = ServerConfig(port=0, store=store)
        serve = ServeConfig(model=settings.model, engine=engine_for(settings), server=server)
        async with (
            embedded_gateway(serve) as here,
            sessions_on(here.base_url, settings.rollout, here.admin_key, purge=True) as sessions,
        ):
            rounds = RolloutRounds(settings.rollout, sessions, share=share, images=RoundImages(settings.out))
            yield rounds, publisher_for(settings, here.provider), evaluator_for(settings, here, ranks, share)


def engine_for(settings: TrainRun) -> EngineConfig:
    """Embedded on the trainer's device, or remote, with a shared folder for weights."""
    options = dict(settings.engine.options)
    if settings.engine.name == "exact":
        options = {"device": settings.device, "dtype": settings.dtype, **options}
    elif settings.engine.name in REMOTE:
        options = {"weights_dir": str((settings.out / "published").absolute()), **options}
    return replace(settings.engine, options=options)


def publisher_for(settings: TrainRun, pool: "Pool | None") -> "Publisher":
    """Remote engines are probed after every publication; the exact engine is compared at every token of every step."""
    from tokentrue.train import Publisher
    from tokentrue.train.publishing import Probe

    probe = None
    if settings.engine.name in REMOTE:
        probe = Probe(lambda: [] if pool is None else pool.in_use, vocabulary=read_vocabulary_size(settings.model_path))
    return Publisher(*([] if pool is None else [pool]), probe=probe)


def evaluator_for(settings: TrainRun, here: Embedded | None, ranks: "Ranks", share: Share) -> "Evaluator":
    from tokentrue.train.loop import Evaluator

    wanted = settings.evaluation
    rollout = replace(settings.rollout, temperature=wanted.temperature)

    async def play() -> list[list[float]]:
        if here is None:
            return []
        async with sessions_on(here.base_url, rollout, here.admin_key, purge=True) as sessions:
            return await evaluate(rollout, sessions, tasks=wanted.tasks, attempts=wanted.attempts, share=share)

    return Evaluator(wanted, play, ranks)
