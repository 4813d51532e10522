"""LoRA adapters beside the base weights, applied unmerged, in the order of operations that `exact` gives a peft model.

y = linear(x, W) + linear(linear(x, A), B) * scale, summed in the wider of both dtypes and rounded once. A field of
peft's LoraConfig (0.21) that is neither read nor ignored is refused by name, unless it is empty or has the default of
the installed peft: it may change the computation.
"""

import itertools
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tokentrue.engine.decoder import TARGETS, Decoder, linear_modules
from tokentrue.errors import ConfigError, EngineError, ExactnessError, FileFormatError
from tokentrue.json_types import JsonMapping
from tokentrue.numerics import LowRank, LowRankStack, Ops, RowSlots
from tokentrue.numerics.modules import replace_attribute, unguard
from tokentrue.numerics.ops import Linears
from tokentrue.records import record

AdapterConfig = JsonMapping
MOST = torch.finfo(torch.float32).max
Number = Annotated[float, msgspec.Meta(ge=-MOST, le=MOST)]

READ = frozenset({"peft_type", "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "init_lora_weights"})
IGNORED = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",  # where the adapter comes from
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",  # which layers: A and B are saved for these alone
    "lora_dropout", "runtime_config", "ensure_weight_tying",  # in training, on a device, and of embeddings alone
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core",  # details of another field
})  # fmt: skip
# Values of init_lora_weights that leave the base weights unchanged.
PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
MERGE = "merge it where it was trained (merge_and_unload) and load the merged model"
CONVERT = (
    "save it with save_pretrained(..., path_initial_model_for_weight_conversion=DIRECTORY_OF_THE_UNTRAINED_ADAPTER)"
)


class LoraSettings(msgspec.Struct):
    """What decides the factor of B·A. Patterns are peft's regular expressions for the names of modules."""

    r: Number | None = None
    rank_pattern: dict[str, Number] | None = None
    lora_alpha: Number | None = None
    alpha_pattern: dict[str, Number] | None = None
    use_rslora: bool | None = None

    def scale(self, where: str, module: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rslora; raises if `rank` differs from the configured one."""

        def find(patterns: Mapping[str, float] | None, default: float | None) -> float | None:
            matching = (value for text, value in (patterns or {}).items() if re.match(rf"(.*\.)?({text})$", module))
            return next(matching, default)

        try:
            wanted, alpha = find(self.rank_pattern, self.r), find(self.alpha_pattern, self.lora_alpha)
        except re.error as error:
            said = f"{error.pattern!r} in rank_pattern or alpha_pattern is no regular expression: {error}"
            raise ConfigError(f"{where}: {said}") from error
        if wanted is not None and wanted != rank:
            raise EngineError(f"{where}: r is {wanted:g} for {module}, but its lora_A has {rank} rows")
        if alpha is None:
            raise ConfigError(f"{where}: lora_alpha is missing")
        return alpha / (rank**0.5 if self.use_rslora else rank)


def read_settings(where: str, config: AdapterConfig) -> LoraSettings:
    """Raises unless the adapter computes W + scale·B·A over unchanged base weights."""
    kind = config.get("peft_type") or "LORA"
    if kind != "LORA":
        raise ExactnessError(
            f"{where}: peft_type is {getattr(kind, 'value', kind)!r}; the engine computes LORA alone: {MERGE}"
        )
    # A and B fit the base model only if training started from its unchanged weights.
    start = config.get("init_lora_weights")
    if start is not None and not isinstance(start, bool) and str(start).lower() not in PLAIN_STARTS:
        raise ExactnessError(
            f"{where}: init_lora_weights is {start!r}, which may have changed the base weights before training: "
            f"{CONVERT}, or {MERGE}; set it to true if it did not"
        )
    for field in sorted(config.keys() - READ - IGNORED, key=str):
        if config[field] and config[field] not in ("none", peft_default(field)):
            raise ExactnessError(
                f"{where} sets {field}, which has no exact form: {MERGE}, train plain LoRA, or remove the field if it "
                "changes nothing"
            )
    try:
        return msgspec.convert(dict(config), LoraSettings)
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`").partition("[")[0]
        raise ConfigError(f"{where}: {field} is {reprlib.repr(config[field])}; {expected}") from error


def peft_default(field: str) -> Any:
    try:
        from peft import LoraConfig
    except ImportError:
        return None
    return getattr(LoraConfig(), field, None)


# The merged products of a layer, and the projections side by side in each.
PRODUCTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
PRODUCT_OF = {name: product for product, names in PRODUCTS.items() for name in names}
NAME = re.compile(r"(?:(?:.+\.)?base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight$")
PLACE = re.compile(
    r"(?:(?:model|language_model|_orig_mod|_fsdp_wrapped_module|module)\.)*layers\.(\d+)\.(self_attn|mlp)\.(\w+)$"
)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}

AdapterSource = str | Path | JsonMapping
_loads = itertools.count(1)


@record
class Adapter:
    """`prefix` starts the names of its cache blocks, so that no other weights share them."""

    name: str
    config: AdapterConfig
    weights: Mapping[tuple[int, str], LowRank]  # (layer, projection)
    version: int | None
    prefix: bytes


def read_adapter(
    name: str, source: AdapterSource, config: AdapterConfig | None, *, version: int | None, device: torch.device
) -> Adapter:
    """A directory saved by peft, or a state dict with `config` (a dict or a peft LoraConfig)."""
    folder = Path(source) if isinstance(source, str | Path) else None
    if folder is not None:
        state, config = read_directory(folder)
    else:
        state = cast("JsonMapping", source)
    if config is None:
        raise EngineError(
            f"adapter {name!r}: a state dict needs config= with r and lora_alpha the first time it is loaded"
        )
    config = config.to_dict() if hasattr(config, "to_dict") else config  # type: ignore[union-attr]
    if not isinstance(config, Mapping):
        raise ConfigError(f"adapter {name!r}: config= is a {type(config).__name__}; give a dict or a peft LoraConfig")
    weights: dict[tuple[int, str], LowRank] = {}
    for module, low in read_pairs(name, state, config, folder).items():
        found = PLACE.match(module)
        if found is None or TARGETS.get(found[3]) != found[2]:
            raise ExactnessError(
                f"adapter {name!r}: {module} has no exact form; adapters may change {', '.join(TARGETS)} of a layer"
            )
        at = int(found[1]), found[3]
        if at in weights:
            raise EngineError(f"adapter {name!r}: two names stand for {at[1]} of layer {at[0]}, one of them {module}")
        weights[at] = LowRank(a=low.a.to(device).contiguous(), b=low.b.to(device).contiguous(), scale=low.scale)
    return Adapter(
        name=name, config=config, weights=weights, version=version, prefix=f"adapter {next(_loads)}".encode()
    )


def read_directory(path: Path) -> tuple[JsonMapping, AdapterConfig]:
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise FileFormatError(f"{path} holds no {CONFIG} and {WEIGHTS}, as peft's save_pretrained writes them")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path / CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        what = f"{path / CONFIG} holds a {type(config).__name__}"
        raise FileFormatError(f"{what}; an object with r, lora_alpha, … expected, as peft writes it")
    try:
        return load_file(path / WEIGHTS), cast("AdapterConfig", config)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise FileFormatError(f"{path / WEIGHTS} is not a safetensors file, or is damaged: {error}") from error


def read_pairs(name: str, state: JsonMapping, config: AdapterConfig, folder: Path | None = None) -> dict[str, LowRank]:
    """A and B of each adapted linear layer, by its name in the base model."""
    settings, tensors = (
        f"adapter {name!r}" if folder is None else f"adapter {name!r} ({folder / file})" for file in (CONFIG, WEIGHTS)
    )
    lora = read_settings(settings, config)
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        found = NAME.match(key)
        if found is None:
            raise ExactnessError(f"{tensors}: {key} has no exact form; it is not lora_A or lora_B of a linear layer")
        pair = pairs.setdefault(found[1], {})
        if found[2] in pair:
            raise EngineError(f"{tensors}: {key} is the second lora_{found[2]} of {found[1]}; give one adapter")
        pair[found[2]] = factor_from(f"{tensors}: {key}", value)
    if not pairs:
        raise EngineError(f"{tensors} holds no weights")
    for module, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise EngineError(f"{tensors}: {module} has lora_{'/'.join(pair)} alone; send A and B")
    return {
        module: LowRank(a=pair["A"], b=pair["B"], scale=lora.scale(settings, module, pair["A"].shape[0]))
        for module, pair in pairs.items()
    }


def factor_from(where: str, value: Any) -> Tensor:
    """A plain finite matrix: a NaN would spread to the cache and to other requests."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    if not isinstance(value, Tensor) or value.dim() != 2 or not value.numel() or value.dtype not in DTYPES:
        found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise EngineError(f"{where} is {found}; a matrix of float32, bfloat16 or float16 expected")
    if not torch.isfinite(value).all():
        raise EngineError(f"{where} holds NaN or infinity; save the adapter from a run whose weights are finite")
    return value.detach()


def merge_low_rank(weight: Tensor, low: LowRank) -> Tensor:
    """W + B·A·scale, rounded once to the dtype of W."""
    return (weight + (low.b.float() @ low.a.float()) * low.scale).to(weight.dtype)


def check_adapter(adapter: Adapter, decoder: Decoder, ops: Ops, first: int = 0) -> None:
    """Raises unless the adapter fits the model and its products are exact. `first`: the decoder's first layer in the
    whole model."""
    for (layer, projection), low in adapter.weights.items():
        module = decoder.linears.get((layer, projection))
        if module is None:
            raise ExactnessError(
                f"adapter {adapter.name!r}: layer {first + layer} has no plain {projection}; it cannot be adapted exactly"
            )
        wanted, found = (module.in_features, module.out_features), (low.a.shape[1], low.b.shape[0])
        if wanted != found or low.a.shape[0] != low.b.shape[1]:
            where = f"layer {first + layer} {projection}"
            raise EngineError(f"adapter {adapter.name!r}: {where} maps {found[0]} to {found[1]}, the model {wanted}")
    check_products(adapter, ops)


def check_products(adapter: Adapter, ops: Ops) -> None:
    shapes: dict[torch.dtype, Linears] = {}
    for low in adapter.weights.values():
        for factor in (low.a, low.b):
            shapes.setdefault(factor.dtype, set()).add((factor.shape[1], factor.shape[0], False))
    for dtype, linears in shapes.items():
        ops.self_test(linears=linears, heads=set(), dtype=dtype)


@contextmanager
def attach_adapter(model: Any, ops: Ops, adapter: Adapter) -> Iterator[None]:
    """While the block runs, the model's own forward applies the adapter, as a peft model under `exact`."""
    check_products(adapter, ops)
    modules = linear_modules(model)

    def forward_of(module: nn.Linear, low: LowRank) -> Any:
        return unguard(lambda x: ops.add_low_rank(ops.linear(x, module.weight, module.bias), x, low))

    with ExitStack() as undo:
        for at, low in adapter.weights.items():
            replace_attribute(modules[at], "forward", forward_of(modules[at], low), undo)
        yield


class AdapterBank:
    """The loaded adapters, each in a slot; `stacks` has all parts of each merged product. `generation` increases when
    captured steps that read the stacks become invalid."""

    def __init__(self, decoder: Decoder, ops: Ops) -> None:
        self._decoder, self._ops = decoder, ops
        self.adapters: dict[str, Adapter] = {}
        self.slots: dict[str, int] = {}
        self.stacks: dict[tuple[int, str], LowRankStack] = {}
        self.count = 0  # slots, a power of two
        self.generation = 0

    def set(self, adapter: Adapter) -> None:
        self.adapters[adapter.name] = adapter
        if adapter.name not in self.slots:
            self.slots[adapter.name] = min(set(range(len(self.slots) + 1)) - set(self.slots.values()))
        self._fill()

    def remove(self, name: str) -> None:
        if self.adapters.pop(name, None) is not None:
            del self.slots[name]
            self._fill()

    @property
    def is_packed(self) -> bool:
        """Whether steps with adapters can be captured: they read no row numbers on the host."""
        return all(stack.packed is not None for stack in self.stacks.values())

    def rows_of(self, names: Sequence[str | None], counts: Sequence[int], device: torch.device) -> RowSlots | None:
        """None if no request uses an adapter."""
        if not any(names):
            return None
        slots = self.slots_of(names).repeat_interleave(torch.tensor(counts))
        used = sorted({self.slots[name] for name in names if name is not None})
        by_slot = {slot: (slots == slot).nonzero()[:, 0].to(device) for slot in used}
        return RowSlots(slots=slots.to(device), count=self.count, by_slot=by_slot)

    def slots_of(self, names: Sequence[str | None]) -> Tensor:
        return torch.tensor([self.count if name is None else self.slots[name] for name in names], dtype=torch.int64)

    def _fill(self) -> None:
        count = 1 << max(0, max(self.slots.values(), default=0)).bit_length()
        changed = {(layer, PRODUCT_OF[name]) for one in self.adapters.values() for layer, name in one.weights}
        before = {at: stack.packed for at, stack in self.stacks.items()}
        for layer, product in changed - self.stacks.keys():
            sizes = (self._decoder.linears[layer, name].out_features for name in PRODUCTS[product])
            self.stacks[layer, product] = LowRankStack(tuple(itertools.accumulate(sizes)))
        self.stacks = {at: self.stacks[at] for at in sorted(changed)}
        for (layer, product), stack in self.stacks.items():
            stack.parts = {
                self.slots[one.name]: tuple(one.weights.get((layer, name)) for name in PRODUCTS[product])
                for one in self.adapters.values()
            }
            self._ops.pack_low_ranks(stack, count)
        after = {at: stack.packed for at, stack in self.stacks.items()}
        if count != self.count or before.keys() != after.keys() or any(before[at] is not after[at] for at in after):
            self.generation += 1
        self.count = count
