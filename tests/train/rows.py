"""Samples for the trainer's tests: random ids, scored by the shipped model itself with the exact operators, as an exact
engine would."""

from __future__ import annotations

import random

import torch
from transformers import AutoModelForCausalLM

from tokentrue.environments import SMALL_MODEL
from tokentrue.numerics import score
from tokentrue.types import Certificate, Sample, Span


def small_model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)


def sample_of(
    ids: list[int], given: list[bool], logprobs: list[float], *, name: str, group: str, reward: float, version: int = 0
) -> Sample:
    spans: list[Span] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or given[end] != given[start]:
            kind = "given" if given[start] else "sampled"
            spans.append(
                Span(
                    start=start,
                    end=end,
                    kind=kind,
                    role="user" if given[start] else "assistant",
                    turn=len(spans) // 2,
                    policy_version=None if given[start] else version,
                    trainable=not given[start],
                    why="prompt" if given[start] else "sampled",
                )
            )
            start = end
    return Sample(
        sample_id=f"{name}/0",
        session_id=name,
        group=group,
        token_ids=ids,
        loss_mask=[int(not g) for g in given],
        rollout_logprobs=[None if g else value for g, value in zip(given, logprobs, strict=True)],
        spans=tuple(spans),
        reward=reward,
        finish_reason="stop",
        metadata={},
        certificate=Certificate(chain="sha256:0", template="sha256:0", tokenizer="sha256:0"),
    )


def groups_for(
    model: torch.nn.Module, *, groups: int = 3, size: int = 4, seed: int = 0, version: int = 0
) -> list[list[Sample]]:
    """Groups with mixed rewards, lengths 6 to 60, two given runs each; log-probabilities are the model's own at this
    moment."""
    rng = random.Random(seed)
    made: list[list[Sample]] = []
    for g in range(groups):
        group: list[Sample] = []
        for i in range(size):
            length = rng.randint(6, 60)
            ids = [rng.randrange(300) for _ in range(length)]
            middle = length // 2
            given = [t < 3 or t == middle for t in range(length)]
            with torch.no_grad():
                values = [0.0, *score(model, torch.tensor([ids]))[0].tolist()]
            reward = float(rng.random() < 0.5) if i > 1 else float(i)
            group.append(
                sample_of(ids, given, values, name=f"s{seed}-{g}-{i}", group=f"g{g}", reward=reward, version=version)
            )
        made.append(group)
    return made
