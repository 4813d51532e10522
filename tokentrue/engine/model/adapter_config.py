"""The settings of a LoRA adapter: which of them the engine computes with, and which it refuses because they compute
something else.

The engine computes linear(x, W) + linear(linear(x, A), B) * scale and nothing else. Each field of peft's LoraConfig
(0.21) is in one of three tables. A field in none of them, of a later peft or of another program, is refused by name
unless it is empty or has the default of
the installed peft: it may change the computation, and an adapter that is computed wrongly is worse than one that is
refused.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from numbers import Real
from typing import Any, cast

import torch

from tokentrue.errors import ConfigError, EngineError, ExactnessError
from tokentrue.json_types import JsonMapping

AdapterConfig = JsonMapping

READ = frozenset({"peft_type", "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "init_lora_weights"})
IGNORED = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",  # where the adapter comes from
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",  # which layers: A and B are saved for these alone
    "lora_dropout", "runtime_config", "ensure_weight_tying",  # in training, on a device, and of embeddings alone
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core",  # details of another field
})  # fmt: skip
REFUSED = {
    "use_dora": "DoRA", "use_qalora": "QA-LoRA", "use_bdlora": "BD-LoRA", "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow routing", "kasa_config": "KaSA", "monteclora_config": "MonteCLoRA", "velora_config": "VeLoRA",
    "lora_bias": "biases in B", "bias": "trained biases", "modules_to_save": "modules trained in full",
    "trainable_token_indices": "trained token embeddings", "target_parameters": "adapted parameters",
    "layer_replication": "replicated layers", "fan_in_fan_out": "transposed weights", "megatron_config": "Megatron layers",
}  # fmt: skip
UNMERGEABLE = frozenset(
    {"use_qalora", "alora_invocation_tokens", "arrow_config", "lora_bias"}
)  # lora_bias: where the layer has no bias

# Values of init_lora_weights: first values of A and B over the base model as it is, and those that take a part out of
# the base weights.
PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
CONVERTIBLE_STARTS = ("pissa", "corda", "olora", "lora_ga")
MERGE = "merge it where it was trained (merge_and_unload) and load the merged model"
RETRAIN = "train plain LoRA instead"
CONVERT = (
    "save it with save_pretrained(..., path_initial_model_for_weight_conversion=DIRECTORY_OF_THE_UNTRAINED_ADAPTER)"
)


def check_config(where: str, config: AdapterConfig) -> None:
    """Raise unless the adapter computes W + scale·B·A over the base model's own weights. `where` starts the
    messages."""
    kind = config.get("peft_type") or "LORA"
    if kind != "LORA":
        raise ExactnessError(
            f"{where}: peft_type is {getattr(kind, 'value', kind)!r}; the engine computes LORA alone: {MERGE}"
        )
    for field, what in REFUSED.items():
        if config.get(field) and config[field] != "none":
            raise ExactnessError(
                f"{where} uses {what} ({field}), which has no exact form: {RETRAIN if field in UNMERGEABLE else MERGE}"
            )
    check_start(where, config.get("init_lora_weights"))
    for field in sorted(config.keys() - READ - IGNORED - REFUSED.keys(), key=str):
        if config[field] and config[field] != peft_default(field):
            raise ExactnessError(
                f"{where}: {field} is unknown and may change the computation; remove it if it does not, or {MERGE}"
            )
    if not isinstance(config.get("use_rslora", False), bool | None):
        raise ConfigError(f"{where}: use_rslora is {config['use_rslora']!r}; true or false expected")


def check_start(where: str, start: Any) -> None:
    """A and B fit the base model only if training began from its own weights."""
    if start is None or isinstance(start, bool) or str(start).lower() in PLAIN_STARTS:
        return
    said = f"{where}: init_lora_weights is {start!r}"
    if str(start).lower().startswith(CONVERTIBLE_STARTS):
        raise ExactnessError(f"{said}, which changed the base weights before training: {CONVERT}, or {MERGE}")
    if start == "loftq":
        raise ExactnessError(f"{said}, which quantised the base weights before training: {MERGE}")
    raise ExactnessError(
        f"{said}, which is unknown and may change the base weights: set it to true if it does not, or {MERGE}"
    )


def peft_default(field: str) -> Any:
    """Of the installed peft; None where that is missing or has no such field."""
    try:
        from peft import LoraConfig
    except ImportError:
        return None
    return getattr(LoraConfig(), field, None)


def scale_of(where: str, config: AdapterConfig, module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) under rslora; raises where `rank` is not the configured one."""
    wanted = setting_of(where, config, "r", "rank_pattern", module)
    if wanted is not None and wanted != rank:
        raise EngineError(f"{where}: r is {wanted} for {module}, but its lora_A has {rank} rows")
    alpha = setting_of(where, config, "lora_alpha", "alpha_pattern", module)
    if alpha is None:
        raise ConfigError(f"{where}: lora_alpha is missing")
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def setting_of(where: str, config: AdapterConfig, field: str, pattern_field: str, module: str) -> Any:
    """By the first key of peft's pattern that matches the module's name, else the field itself; None where it is not
    set."""
    patterns = config.get(pattern_field) or {}
    if not isinstance(patterns, Mapping):
        raise ConfigError(f"{where}: {pattern_field} is {patterns!r}; an object of patterns and numbers expected")
    value = config.get(field)
    for pattern, number in cast(JsonMapping, patterns).items():
        if matches(f"{where}: {pattern_field}", pattern, module):
            field, value = f"{pattern_field}[{pattern!r}]", number
            break
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not is_float32(value)):
        raise ConfigError(f"{where}: {field} is {reprlib.repr(value)}; a finite number expected")
    return value


def matches(where: str, pattern: str, module: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise ConfigError(f"{where}: {pattern!r} is no regular expression: {error}") from error


def is_float32(value: Any) -> bool:
    """Neither NaN nor infinity, there either."""
    return bool(abs(value) <= torch.finfo(torch.float32).max)
