"""Exporters by name. Adding a trainer is one file with `row` and its columns, one line here, and the column by which
`samples/files.format_of` recognises its rows."""

from __future__ import annotations

from tokentrue.samples.exporters import prime_rl, slime, tinker, trl, verl
from tokentrue.samples.exporters.base import ExportedSample, Exporter
from tokentrue.samples.exporters.lines import JsonLines, TrainerLines
from tokentrue.samples.exporters.parquet import Parquet, TrainerParquet
from tokentrue.samples.exporters.tensors import Tensors

_VERL_TYPES = {
    "prompt_ids": "int32s", "response_ids": "int32s", "response_mask": "int8s", "response_logprobs": "doubles",
    "reward_score": "double", "num_turns": "int64", "uid": "string",
    "routed_experts": "int16 tables", "extra_fields": "replay",
}  # fmt: skip

EXPORTERS: dict[str, Exporter] = {
    exporter.name: exporter
    for exporter in (
        JsonLines(),
        Parquet(),
        Tensors(),
        TrainerParquet(
            name="verl",
            follows="verl 0.9.1, AgentLoopOutput",
            row=verl.row,
            columns=verl.VerlColumns,
            types=_VERL_TYPES,
        ),
        TrainerLines(name="trl", follows="trl 1.16.0, GRPOTrainer rollout_func", row=trl.row, columns=trl.TrlColumns),
        TrainerLines(
            name="slime", follows="slime, Sample.from_dict (September 2026)", row=slime.row, columns=slime.SlimeColumns
        ),
        TrainerLines(
            name="prime-rl",
            follows="prime-rl, TrainingSample (September 2026)",
            row=prime_rl.row,
            columns=prime_rl.PrimeRlColumns,
        ),
        TrainerLines(
            name="tinker",
            follows="tinker, Datum with a policy loss",
            row=tinker.row,
            columns=tinker.TinkerColumns,
            added=frozenset({"loss_fn_inputs.advantages"}),
        ),
    )
}

__all__ = ["EXPORTERS", "ExportedSample", "Exporter"]
