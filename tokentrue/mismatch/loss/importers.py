"""Policy losses from the configuration of other frameworks: the loss alone; what corrects the mismatch is
`Correction.from_…`.

Only losses whose formula and gradient were compared with the framework's are read; any other is refused by name.
"""

from __future__ import annotations

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.mismatch.loss.config import LossConfig, SapoTemperatures, VespoKernel, loss_named

TRL_KEYS = {
    "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": None,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}  # fmt: skip
VERL_KEYS = {
    "loss_mode": "vanilla",
    "clip_ratio": 0.2,
    "clip_ratio_low": None,
    "clip_ratio_high": None,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
}


def loss_from_trl(config: JsonMapping) -> LossConfig:
    """TRL's `GRPOConfig`: loss_type grpo, dapo, sapo or vespo, with its own defaults."""
    given = _given("trl", config, TRL_KEYS)
    kind = given["loss_type"]
    if kind in ("grpo", "dapo"):
        high = given["epsilon"] if given["epsilon_high"] is None else given["epsilon_high"]
        return loss_named(kind, clip_low=given["epsilon"], clip_high=high)
    if kind == "sapo":
        return loss_named(
            kind, sapo=SapoTemperatures(positive=given["sapo_temperature_pos"], negative=given["sapo_temperature_neg"])
        )
    if kind == "vespo":
        kernel = VespoKernel(
            k_positive=given["vespo_k_pos"], lambda_positive=given["vespo_lambda_pos"],
            k_negative=given["vespo_k_neg"], lambda_negative=given["vespo_lambda_neg"],
        )  # fmt: skip
        return loss_named(kind, vespo=kernel)
    raise ConfigError(f"trl.loss_type: {kind!r} is not one of grpo, dapo, sapo, vespo; write its LossConfig by hand")


def loss_from_verl(config: JsonMapping) -> LossConfig:
    """verl's `actor_rollout_ref.actor.policy_loss` and clip ratios: loss_mode vanilla or sapo."""
    given = _given("verl", config, VERL_KEYS)
    if given["loss_mode"] == "sapo":
        return loss_named("sapo", sapo=SapoTemperatures(positive=given["tau_pos"], negative=given["tau_neg"]))
    if given["loss_mode"] == "vanilla":
        low, high = (
            given["clip_ratio"] if given[name] is None else given[name]
            for name in ("clip_ratio_low", "clip_ratio_high")
        )
        return loss_named("ppo", clip_low=low, clip_high=high, dual_clip=3.0)
    raise ConfigError(
        f"verl.loss_mode: {given['loss_mode']!r} is not one of vanilla, sapo; write its LossConfig by hand"
    )


def _given(framework: str, config: JsonMapping, keys: JsonMapping) -> JsonObject:
    unknown = sorted(set(config) - set(keys))
    if unknown:
        raise ConfigError(f"{framework}: no key {unknown[0]!r} of a policy loss; known: {', '.join(keys)}")
    return {**keys, **config}
