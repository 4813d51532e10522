"""A sample as a trainer's row (`*_row`), and ids, mask and log-probabilities back (`*_columns`, which may omit a given
prefix).
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import groupby, pairwise

from tokentrue.errors import FileFormatError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue
from tokentrue.samples.recorded_turns import read_turns
from tokentrue.samples.shape import encode_bytes, spread_spans
from tokentrue.types import Sample

Columns = tuple[Sequence[JsonValue], Sequence[JsonValue], Sequence[JsonValue]]
"""As read from a file, unchecked."""


def refuse_images(sample: Sample, trainer: str) -> None:
    if sample.images:
        raise FileFormatError(
            f"sample {sample.sample_id} has {len(sample.images)} images, which rows for {trainer} do not carry; "
            "export jsonl, parquet, safetensors, verl or trl"
        )


def split(sample: Sample) -> tuple[list[int], list[int], list[int], list[float]]:
    """The prompt's ids, up to the first sampled token; ids, mask and log-probabilities of the response (0.0 where
    nothing was sampled)."""
    at = next((span.start for span in sample.spans if span.kind == "sampled"), None)
    if at is None:
        raise TokenContractError(f"sample {sample.sample_id} has no sampled token")
    if at > len(sample.token_ids):
        raise TokenContractError(f"sample {sample.sample_id}: a span starts at token {at} of {len(sample.token_ids)}")
    ids = list(sample.token_ids)
    return ids[:at], ids[at:], list(sample.loss_mask[at:]), fill_logprobs(sample.rollout_logprobs[at:])


def fill_logprobs(logprobs: Iterable[float | None]) -> list[float]:
    return [0.0 if value is None else value for value in logprobs]


def find_ranges(marks: Sequence[int]) -> list[tuple[int, int]]:
    """The runs `[start, end)` of marks that are not 0."""
    edges = [i for i, (before, mark) in enumerate(pairwise([0, *marks, 0])) if bool(before) != bool(mark)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def token_versions(sample: Sample, *, start: int = 0) -> list[int]:
    """-1 where nothing was sampled, or by no known version."""
    known = spread_spans(sample, lambda span: span.policy_version if span.kind == "sampled" else None, None)
    return [-1 if version is None else version for version in known[start:]]


def expert_table(sample: Sample) -> list[list[list[int]]] | None:
    """[positions, layers, top_k] of all inputs, from position 0; -1 if the engine did not report it."""
    routed = sample.routed_experts
    if routed is None:
        return None
    return import_module("numpy").frombuffer(routed.data, "<i2").reshape(routed.shape).tolist()


def verl_row(sample: Sample) -> JsonObject:
    """For `AgentLoopOutput(metrics=…, **row)`, images opened (`ImageFolder.open`). Kept ids are compressed rows, one
    per response token."""
    prompt, response, response_mask, logprobs = split(sample)
    versions = token_versions(sample, start=len(prompt))
    sampled = [version for version in versions if version >= 0]
    mask = None if sample.sampling_mask is None else sample.sampling_mask.cut(len(prompt), len(sample.token_ids))
    return {
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": response_mask,
        "response_logprobs": logprobs,
        "reward_score": sample.reward,
        "num_turns": 2 * (1 + max((span.turn for span in sample.spans), default=-1)),
        "uid": sample.group or sample.session_id,
        "routed_experts": expert_table(sample),
        "multi_modal_data": {"images": [run.sha256 for run in sample.images]} if sample.images else None,
        "extra_fields": {
            "min_global_steps": min(sampled, default=None),
            "max_global_steps": max(sampled, default=None),
            "policy_versions": versions,
            "sampling_mask_token_ids": None if mask is None else mask.token_ids.tolist(),
            "sampling_mask_offsets": None if mask is None else mask.offsets.tolist(),
        },
    }


def verl_columns(row: JsonMapping) -> Columns:
    return [*row["prompt_ids"], *row["response_ids"]], row["response_mask"], row["response_logprobs"]


def trl_row(sample: Sample) -> JsonObject:
    """The keys that a GRPO `rollout_func` returns; collect each key over the lines into a list."""
    columns = dict(zip(("prompt_ids", "completion_ids", "env_mask", "logprobs"), split(sample), strict=True))
    images: JsonObject = {"images": [run.sha256 for run in sample.images]} if sample.images else {}
    return {**columns, "reward": sample.reward, **images}


def trl_columns(row: JsonMapping) -> Columns:
    return [*row["prompt_ids"], *row["completion_ids"]], row["env_mask"], row["logprobs"]


def slime_row(sample: Sample) -> JsonObject:
    refuse_images(sample, "slime")
    prompt, response, loss_mask, logprobs = split(sample)
    versions = token_versions(sample, start=len(prompt))
    replay: JsonObject = {}
    if sample.routed_experts is not None:
        replay["rollout_routed_experts"] = expert_table(sample)
    if sample.sampling_mask is not None:
        mask = sample.sampling_mask.cut(len(prompt), len(sample.token_ids))
        replay["rollout_top_p_token_ids"] = mask.token_ids.tolist()
        replay["rollout_top_p_token_offsets"] = mask.offsets.tolist()
    return {
        "tokens": list(sample.token_ids),
        "response_length": len(response),
        "loss_mask": loss_mask,
        "rollout_log_probs": logprobs,
        "reward": sample.reward,
        "status": {"length": "truncated", "abort": "aborted"}.get(sample.finish_reason, "completed"),
        "weight_versions": [str(version) for version, _ in groupby(each for each in versions if each >= 0)],
        "session_id": sample.session_id,
        "metadata": {"sample_id": sample.sample_id, "group": sample.group, "policy_versions": versions},
        **replay,
    }


def slime_columns(row: JsonMapping) -> Columns:
    return row["tokens"], row["loss_mask"], row["rollout_log_probs"]


def prime_rl_row(sample: Sample) -> JsonObject:
    """The fields of `TrainingSample`. Replay columns are raw bytes (base64 in JSON), one row per token, the last
    without experts."""
    refuse_images(sample, "prime-rl")
    row: JsonObject = {
        "token_ids": list(sample.token_ids),
        "mask": [bool(bit) for bit in sample.loss_mask],
        "logprobs": fill_logprobs(sample.rollout_logprobs),
        "temperatures": sampled_temperatures(sample),
        "env_name": str(sample.metadata.get("env_name") or sample.group or "tokentrue"),
        "trace_id": sample.sample_id,
        "branch_index": 0,
    }
    if (routed := sample.routed_experts) is not None:
        _, layers, top_k = routed.shape
        row["routed_experts"] = {
            "data": encode_bytes(routed.data + b"\xff\xff" * (layers * top_k)),
            "shape": [len(sample.token_ids), layers, top_k],
            "dtype": "int16",
        }
    if (mask := sample.sampling_mask) is not None:
        counts = TokenIds(len(mask.row(index)) for index in range(len(mask)))
        row["sampling_mask"] = {"ids": encode_bytes(mask.token_ids.tobytes()), "counts": encode_bytes(counts.tobytes())}
    return row


def sampled_temperatures(sample: Sample) -> list[float]:
    found = [1.0] * len(sample.token_ids)
    turns, name = read_turns(sample), f"sample {sample.sample_id}"
    for turn in turns:
        if turn.row.temperature is None:
            raise TokenContractError(f"{name}: a turn without its temperature, which prime-rl needs")
        found[turn.start : turn.end] = [turn.row.temperature] * (turn.end - turn.start)
    if not turns:
        raise TokenContractError(f"{name}: metadata.tokentrue records no turns, and prime-rl needs their temperatures")
    return found


def prime_rl_columns(row: JsonMapping) -> Columns:
    return row["token_ids"], [int(bit is True) for bit in row["mask"]], row["logprobs"]


def tinker_row(sample: Sample) -> JsonObject:
    """A `Datum`: position i of the input predicts token i + 1, so every column is shifted by one. Add
    `loss_fn_inputs["advantages"]`, zero where `mask` is."""
    refuse_images(sample, "tinker")
    ids = list(sample.token_ids)

    def tensor(data: Sequence[float], dtype: str) -> JsonObject:
        return {"data": list(data), "dtype": dtype, "shape": [len(data)]}

    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": ids[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": tensor(ids[1:], "int64"),
            "logprobs": tensor(fill_logprobs(sample.rollout_logprobs)[1:], "float32"),
            "mask": tensor([float(bit) for bit in sample.loss_mask[1:]], "float32"),
        },
        "reward": sample.reward,
    }


def tinker_columns(row: JsonMapping) -> Columns:
    """The targets, with the first token prepended; the rest of `model_input` repeats the targets."""
    inputs = row["loss_fn_inputs"]
    ids = [*row["model_input"]["chunks"][0]["tokens"][:1], *inputs["target_tokens"]["data"]]
    return ids, [int(bit == 1) for bit in inputs["mask"]["data"]], inputs["logprobs"]["data"]
