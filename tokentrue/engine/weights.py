"""Loads a model from a directory, and new weights into a live model, in place, by name; all of them or none."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tokentrue.errors import ConfigError, EngineError, ExactnessError, FileFormatError
from tokentrue.hub import load_causal_model, load_config

Weights = Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")


def load_model(source: str | Path | nn.Module, *, device: torch.device, dtype: torch.dtype) -> Any:
    """In inference mode. A model object is used as it is, and the engine owns its weights from now on."""
    if isinstance(source, nn.Module):
        if hasattr(source, "peft_config"):
            raise ExactnessError(
                "the engine runs a base model: give it that, and the adapter by engine.load_adapter(name, directory)"
            )
        model = source.to(device=device, dtype=dtype)
    else:
        model = read_model(source, dtype).to(device)
    return model.eval().requires_grad_(False)


def read_model(source: str | Path, dtype: torch.dtype) -> Any:
    """On the host. MXFP4 experts (gpt-oss) are dequantised: a 4-bit value times a power of two."""
    from transformers.utils.quantization_config import Mxfp4Config

    options: dict[str, Any] = {}
    try:
        stored: Any = getattr(load_config(source), "quantization_config", None)
        if stored is not None:
            method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
            if method != "mxfp4":
                raise ExactnessError(
                    f"{source} is quantised ({method}): no exact form; give the engine the model in {dtype}, or MXFP4"
                )
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        model = load_causal_model(
            source, dtype=str(dtype).removeprefix("torch."), attn_implementation="eager", **options
        )
    except ConfigError as error:
        raise FileFormatError(str(error)) from error
    if options:  # transformers dequantises to bfloat16, whatever the dtype
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype) if ".experts." in name else parameter.data
    return model


def targets_of(model: nn.Module) -> dict[str, Tensor]:
    """Includes tied names."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def load_weights(model: nn.Module, source: Weights) -> None:
    """Checks a mapping or directory whole before the first copy, a stream as it arrives."""
    with torch.no_grad():
        for _, target, value in checked_weights(targets_of(model), source, model):
            target.data.copy_(value)


def checked_weights(targets: Mapping[str, Tensor], source: Weights, model: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, target, value) of every weight, checked against `targets`; raises at the end if some are missing."""
    if isinstance(source, str | Path):
        source = read_directory(Path(source), targets, model)
    if isinstance(source, Mapping):
        pairs = list(cast(Mapping[str, Any], source).items())
        require_all(targets, [target_of(targets, name, value) for name, value in pairs])
    else:
        pairs = source
    covered: list[Tensor] = []
    for name, value in pairs:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        covered.append(target_of(targets, name, value))
        yield name, covered[-1], value
    require_all(targets, covered)


def require_all(targets: Mapping[str, Tensor], covered: Iterable[Tensor]) -> None:
    """Tied weights are one tensor under two names: either suffices."""
    found = set(map(id, covered))
    missing = [name for name, target in targets.items() if id(target) not in found]
    if missing:
        raise EngineError(
            f"weights are missing {len(missing)} tensors, first {missing[0]!r}: publish the whole state dict"
        )


def plain_name(name: str) -> str:
    """Without the prefixes of torch.compile, checkpointing and FSDP."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def target_of(targets: Mapping[str, Tensor], name: str, value: Any) -> Tensor:
    target = targets.get(plain_name(name))
    if target is None:
        raise EngineError(f"weight {name!r} is not a parameter of this model; send the names of its own state_dict()")
    if tuple(target.shape) != tuple(value.shape):
        raise EngineError(f"weight {name!r} has shape {tuple(value.shape)}, the model needs {tuple(target.shape)}")
    return target


def read_directory(path: Path, targets: Mapping[str, Tensor], model: Any) -> Mapping[str, Any]:
    """Reads safetensors directly if the names are the model's, else through transformers' conversion."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileFormatError(f"{path} holds no *.safetensors")
    found: dict[str, Any] = {}
    for file in files:
        found.update(load_file(file))
    if set(found) <= set(targets):
        return found
    other = read_model(path, next(model.parameters()).dtype)
    if type(other) is not type(model):
        raise ExactnessError(f"{path} holds a {type(other).__name__}, the engine runs a {type(model).__name__}")
    return dict(other.state_dict())
