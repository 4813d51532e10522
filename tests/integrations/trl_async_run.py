"""Runs examples/trl_async_grpo.py with TRL's real asynchronous trainer, and prints what the test needs as JSON.

TRL's attention is a CUDA kernel from the hub; here the same function is computed in plain torch, and everything else is
TRL's. Every row that TRL takes from the queue is compared with the gateway's record of that session.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import torch
import trl_async_grpo
from trl.experimental.async_grpo import async_grpo_trainer, packing

from tokentrue.integrations import trl as adapter
from tokentrue.types import Sample

RECORDED: dict[tuple[int, ...], list[Sample]] = {}  # rollouts may repeat each other
TAKEN: list[dict[str, Any]] = []
VERSIONS: list[tuple[int, int]] = []  # of a row in the queue, and of its record


def attend(
    query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float | None, **__: Any
) -> Any:
    """FlashAttention's variable-length function: causal, aligned at the ends of query and keys."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    parts = []
    for i in range(len(starts_q) - 1):
        q = query[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
        k, v = (x[starts_k[i] : starts_k[i + 1]].transpose(0, 1) for x in (key, value))
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=softmax_scale)
        parts.append(scores.transpose(0, 1))
    return torch.cat(parts)


def is_equal(row: dict[str, Any], sample: Sample) -> bool:
    given = [float(torch.tensor(x, dtype=torch.float32)) for x in sample.rollout_logprobs if x is not None]
    kept = [x for x, y in zip(row["old_log_probs"].tolist(), sample.rollout_logprobs, strict=True) if y is not None]
    return row["completion_mask"].tolist() == list(sample.loss_mask) and kept == given


def main(steps: int, out: str, rows: int) -> None:
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks CUDA for the name of the GPU
    build, take = adapter.rows_from_group, async_grpo_trainer.RolloutQueueDataset.__iter__

    def recording(samples: Any, **more: Any) -> Any:
        for sample in samples:
            RECORDED.setdefault(tuple(sample.token_ids), []).append(sample)
        rows = build(samples, **more)
        for row, sample in zip(rows, samples, strict=True):
            oldest = min(span.policy_version for span in sample.spans if span.kind == "sampled")
            VERSIONS.append((row.model_version, oldest))
        return rows

    def watched(self: Any) -> Any:
        for row in take(self):
            TAKEN.append(row)
            yield row

    adapter.rows_from_group = recording
    async_grpo_trainer.RolloutQueueDataset.__iter__ = watched
    log = trl_async_grpo.train(steps, out, rows, use_cpu=True)
    equal = sum(any(is_equal(row, sample) for sample in RECORDED[tuple(row["input_ids"].tolist())]) for row in TAKEN)
    print("RESULT " + json.dumps({"log": log, "rows": len(TAKEN), "equal": equal, "versions": VERSIONS}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
