"""A sixth set: faults beside every way to a name that is not a fit of weights (draws, meaning, stability), and forward
passes that nothing simulates. It looks for wrong names: `unknown` is right everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.doctor.fifth_set import Kept, own_attention, plain_mixing
from tests.doctor.fourth_set import changed_logprobs
from tests.doctor.reported import Engine, Seeded, engined, mlps, simple
from tests.doctor.third_set import hooked, raw_report
from tokentrue.types import Completion, Ids, Sampling

Change = Callable[[torch.Tensor, list[int], int], torch.Tensor]


def in_draws_alone(change: Change, *names: str) -> Callable[[Any, str, random.Random], Seeded]:
    """Reports are of temperature 1, and without the change."""

    def apply(engine: Engine, rng: random.Random) -> None:
        engine.on_logits = change
        raw_report(engine)

    return engined("unknown", "raw_logprobs", *names)(apply)


def likeliest_left_out(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    """XTC: half of the time all tokens above 0.1 but the least likely of them are removed."""
    above = (rows.softmax(0) > 0.1).nonzero().flatten()
    if len(above) < 2 or random.Random(len(ids)).random() < 0.5:
        return rows
    return rows.index_fill(0, above[rows[above].argsort(descending=True)][:-1], -torch.inf)


def entropy_temperature(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    """Dynamic temperature: 0.5 where the model is sure, 1.5 where it is not."""
    logp = rows.log_softmax(0)
    return rows / (0.5 + min(1.0, float(-(logp.exp() * logp).sum()) / 3))


def quadratic(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    """Smoothing factor 0.3."""
    return rows.max() - 0.3 * (rows.max() - rows) ** 2


def near_the_best(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    """Top-n-sigma at 1."""
    return rows.masked_fill(rows < rows.max() - rows.std(), -torch.inf)


def penalised_in_draws(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    seen, out = torch.tensor(sorted(set(ids))), rows.clone()
    out[seen] = torch.where(out[seen] > 0, out[seen] / 1.3, out[seen] * 1.3)
    return out


def newline_favoured(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    return rows + 3 * (torch.arange(len(rows)) % 5 == 0)


class NoisyBatch(Engine):
    """A data race that only other requests in flight bring out, and not each time."""

    in_flight = 0
    count = 0

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        self.in_flight += 1
        try:
            found = await super().generate(prompt_ids, sampling)
            self.count += 1
            if self.in_flight < 2 or self.count % 3:
                return found
            return changed_logprobs(found, lambda at, token, value: value * 1.05)
        finally:
            self.in_flight -= 1


class SeldomOff(Engine):
    """Every ninth answer is off."""

    count = 0

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(prompt_ids, sampling)
        self.count += 1
        return found if self.count % 9 else changed_logprobs(found, lambda at, token, value: value * 1.05)


class FirstOfTwo(Kept):
    """Every other report is that of the likeliest token."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(prompt_ids, sampling)
        sent, ids = [*prompt_ids], [*found.token_ids]

        def best(at: int, token: int, value: float) -> float:
            return value if at % 2 else float(self.row([*sent, *ids[:at]], sampling).max())

        return changed_logprobs(found, best)


def values_of_the_layer_before(model: Any, rng: random.Random) -> None:
    """The value cache is written to the next layer's place."""
    held: list[torch.Tensor] = []
    hooked(model.model.embed_tokens, lambda inputs, out: (held.clear(), out)[1])
    for layer in model.model.layers:
        hooked(layer.self_attn.v_proj, lambda inputs, out: (held.append(out), held.pop(0) if len(held) > 1 else out)[1])


def scores_clipped(model: Any, rng: random.Random) -> None:
    own_attention(model, lambda scores, values, old: plain_mixing(scores.clamp(-1e30, 2.0), values, old))


def gate_clipped(model: Any, rng: random.Random) -> None:
    for mlp in mlps(model):
        hooked(mlp.gate_proj, lambda inputs, out: out.clamp(max=0.5))


def half_of_the_dimensions_scaled(model: Any, rng: random.Random) -> None:
    hooked(
        model.model.embed_tokens, lambda inputs, out: out * torch.where(torch.arange(out.shape[-1]) % 2 == 0, 1.1, 1)
    )


def noise_in_a_layer(model: Any, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(99))
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data += 0.05 * weight.data.std() * torch.randn_like(weight)


def mean_of_two_layers(model: Any, rng: random.Random) -> None:
    """A merge of checkpoints went into one layer."""
    one, other = model.model.layers[0], model.model.layers[1]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        a.data = (a.data + b.data) / 2


def cold_for_short_answers(engine: Engine, rng: random.Random) -> None:
    """Another temperature for the first ten tokens."""
    engine.on_logits = lambda rows, ids, sent: rows / 0.8 if len(ids) - sent < 10 else rows


def built(kind: type[Engine], *names: str) -> Callable[[Any, str, random.Random], Seeded]:
    return lambda model, dtype, rng: Seeded(engine=kind(model, dtype), names=frozenset({"unknown", *names}))


FAULTS: dict[str, Callable[[Any, str, random.Random], Seeded]] = {
    "likeliest tokens left out of draws": in_draws_alone(likeliest_left_out),
    "temperature by entropy in draws": in_draws_alone(entropy_temperature, "temperature_ignored"),
    "smoothed draws": in_draws_alone(quadratic),
    "draws near the best": in_draws_alone(near_the_best, "sampled_filters"),
    "penalty in draws alone": in_draws_alone(penalised_in_draws, "sampled_penalty"),
    "bias in draws alone": in_draws_alone(newline_favoured, "logit_bias"),
    "races in batches": built(NoisyBatch, "batch_variant", "unstable"),
    "every ninth answer off": built(SeldomOff, "unstable"),
    "every other report of the likeliest": built(FirstOfTwo, "bad_logprobs"),
    "values of the layer before": simple("unknown")(values_of_the_layer_before),
    "scores clipped": simple("unknown")(scores_clipped),
    "gates clipped": simple("unknown", "activation")(gate_clipped),
    "every other dimension scaled": simple("unknown", "embedding_scale")(half_of_the_dimensions_scaled),
    "noise in a layer": simple("unknown")(noise_in_a_layer),
    "mean of two layers": simple("unknown")(mean_of_two_layers),
    "cold for ten tokens": engined("unknown", "sampled_temperature")(cold_for_short_answers),
}


def copied(model: Any, dtype: str, rng: random.Random) -> Seeded:
    engine = Engine(model, dtype)
    engine.report = lambda found, sent: replace(found)
    return Seeded(engine=engine, names=frozenset())


HEALTHY: dict[str, Callable[[Any, str, random.Random], Seeded]] = {"reports copied": copied}
