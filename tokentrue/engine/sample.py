"""Logits to tokens: Gumbel-max with counter-based noise, so that a request's tokens do not depend on the batch.

token = argmax(scaled logits + noise), the noise a float64 hash of (seed, position, token id). Temperature 0 takes the
argmax, and reports log-probabilities at temperature 1.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tokentrue.engine.schedule import Request, Sampled
from tokentrue.errors import EngineError
from tokentrue.numerics import Ops, filter_logits, scale_logits
from tokentrue.records import record
from tokentrue.types import Sampling

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(value: int) -> int:
    """Finaliser of splitmix64."""
    value = ((value ^ (value >> 30)) * MIX[0]) & MASK
    value = ((value ^ (value >> 27)) * MIX[1]) & MASK
    return value ^ (value >> 31)


def stream_key(seed: int, position: int) -> int:
    return mix((mix((seed * GOLDEN + 1) & MASK) + position * GOLDEN) & MASK)


def child_seed(seed: int, index: int) -> int:
    """Index 0 keeps the seed. Seeds equal modulo 2^64 sample alike."""
    return seed if index == 0 else to_signed(mix((seed ^ (index * GOLDEN)) & MASK))


def to_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


@lru_cache(maxsize=8)
def counters(vocabulary: int, device: torch.device) -> Tensor:
    """Token t's counter in every stream. Read-only."""
    return torch.arange(1, vocabulary + 1, device=device)[None, :] * to_signed(GOLDEN)


def gumbel(seeds: list[int], positions: list[int], vocabulary: int, device: torch.device) -> Tensor:
    """float64 [R,V]: -log(-log(u)), u in (0,1) from 53 bits of the hash (`mix` on int64, so shifts are masked)."""
    keys = torch.tensor([to_signed(stream_key(s, p)) for s, p in zip(seeds, positions, strict=True)], device=device)
    z = keys[:, None] + counters(vocabulary, device)
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(to_signed(MIX[0]))
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(to_signed(MIX[1]))
    z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
    uniform = z.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


@record
class SamplingRow:
    sampling: Sampling
    seed: int
    position: int  # of the token to sample
    prompt_length: int
    tokens: tuple[int, ...] | None  # prompt and output, for penalties
    shaped: bool


def sampling_row(request: Request) -> SamplingRow:
    s = request.sampling
    is_penalised = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
    return SamplingRow(
        sampling=s, seed=request.seed, position=len(request.tokens), prompt_length=len(request.prompt_ids),
        tokens=tuple(request.tokens) if is_penalised else None, shaped=request.shaped,
    )  # fmt: skip


def sample(ops: Ops, logits_RV: Tensor, requests: Sequence[SamplingRow]) -> list[Sampled | Exception]:
    temperatures = [r.sampling.temperature or 1.0 for r in requests]
    shaped = [i for i, r in enumerate(requests) if r.shaped]
    penalised = penalties(logits_RV, requests) if shaped else {}
    even = all(t == 1.0 for t in temperatures)
    per_row = torch.tensor(temperatures, dtype=torch.float32, device=logits_RV.device) if shaped or not even else None
    raw_scaled = scale_logits(logits_RV, 1.0 if even or per_row is None else per_row)
    raw_table = ops.log_softmax(raw_scaled)
    scaled, table = raw_scaled, raw_table
    if per_row is not None and shaped:
        scaled, table = raw_scaled.clone(), raw_table.clone()
        for i in shaped:
            s = requests[i].sampling
            row = scale_logits(penalised[i][None], per_row[i : i + 1])[0] if i in penalised else raw_scaled[i]
            scaled[i] = filter_logits(row, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)
            table[i] = ops.log_softmax(scaled[i : i + 1])[0]
    chosen = choose(scaled, requests)
    at = chosen[:, None]
    raws = raw_table.gather(-1, at).squeeze(-1).tolist()
    logprobs = table.gather(-1, at).squeeze(-1).tolist() if shaped else raws
    results: list[Sampled | Exception] = []
    for i, (request, token) in enumerate(zip(requests, chosen.tolist(), strict=True)):
        if not math.isfinite(raws[i]):  # a NaN or infinity anywhere in the row shows in its normaliser
            results.append(not_finite())
            continue
        top = None
        if request.sampling.top_logprobs:  # the sampled one is always among them
            top = {**top_logprobs(table[i], request.sampling.top_logprobs), token: logprobs[i]}
        kept = kept_ids(scaled[i]) if request.shaped else b""
        results.append(Sampled(token_id=token, logprob=logprobs[i], raw_logprob=raws[i], top=top, kept=kept))
    return results


def kept_ids(filtered_V: Tensor) -> bytes:
    """Ascending, little-endian int32; empty if no id was removed."""
    kept = (filtered_V > -torch.inf).nonzero().squeeze(-1)
    return b"" if len(kept) == len(filtered_V) else kept.to(torch.int32).cpu().numpy().astype("<i4").tobytes()


def not_finite() -> EngineError:
    return EngineError(
        "the model's logits are not finite: the weights hold NaN or infinity; load good weights and ask again"
    )


def choose(scaled_RV: Tensor, requests: Sequence[SamplingRow]) -> Tensor:
    noisy = [i for i, r in enumerate(requests) if r.sampling.temperature > 0]
    if not noisy:
        return scaled_RV.argmax(-1)
    noise = gumbel(
        [requests[i].seed for i in noisy], [requests[i].position for i in noisy], scaled_RV.shape[-1], scaled_RV.device
    )
    if len(noisy) == len(requests):
        return noise.add_(scaled_RV).argmax(-1)
    chosen = scaled_RV.argmax(-1)
    rows = torch.tensor(noisy, device=scaled_RV.device)
    chosen[rows] = noise.add_(scaled_RV[rows]).argmax(-1)
    return chosen


def top_logprobs(table_V: Tensor, count: int) -> dict[int, float]:
    values, ids = torch.topk(table_V, min(count, table_V.shape[-1]))
    return {i: v for i, v in zip(ids.tolist(), values.tolist(), strict=True) if v > -torch.inf}


def penalties(logits_RV: Tensor, requests: Sequence[SamplingRow]) -> dict[int, Tensor]:
    """Rows with repetition (prompt and output), presence and frequency (output) penalties, in float32."""
    rows: dict[int, Tensor] = {}
    for i, request in enumerate(requests):
        s = request.sampling
        if request.tokens is None:
            continue
        row = logits_RV[i].float().clone()
        if s.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(request.tokens)), device=row.device)
            values = row[seen]
            row[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        output = torch.tensor(request.tokens[request.prompt_length :], dtype=torch.int64, device=row.device)
        counts = torch.bincount(output, minlength=row.shape[0])
        rows[i] = row - s.frequency_penalty * counts - s.presence_penalty * (counts > 0)
    return rows
