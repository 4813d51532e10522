"""Runs examples/trl_grpo.py with TRL's real trainer in a process of its own, and prints what the test needs as JSON.

Every row that TRL is given is compared with the gateway's record of that session: ids, mask and log-probabilities.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import trl_grpo

from tokentrue.integrations import trl as adapter
from tokentrue.integrations.rollouts import GatewayRollouts
from tokentrue.types import Sample

RECORDED: list[Sample] = []
GIVEN: list[dict[str, Any]] = []


def main(steps: int, out: str, rows: int) -> None:
    run, make = GatewayRollouts.run, adapter.rollout_func

    def recording(self: GatewayRollouts, tasks: Any, groups: Any, **more: Any) -> list[list[Sample]]:
        found = run(self, tasks, groups, **more)
        RECORDED.extend(sample for samples in found for sample in samples)
        return found

    def watched(*arguments: Any, **settings: Any) -> Any:
        inner = make(*arguments, **settings)

        def call(prompts: Any, trainer: Any) -> Any:
            columns = inner(prompts, trainer)
            GIVEN.extend({name: columns[name][i] for name in columns} for i in range(len(prompts)))
            return columns

        return call

    GatewayRollouts.run = recording  # type: ignore[method-assign]
    trl_grpo.rollout_func = watched
    log = trl_grpo.train(steps, out, rows)
    equal = [
        row["prompt_ids"] + row["completion_ids"] == list(sample.token_ids)
        and [0] * len(row["prompt_ids"]) + row["env_mask"] == list(sample.loss_mask)
        and [x for x, mask in zip(row["logprobs"], row["env_mask"], strict=True) if mask]
        == [x for x in sample.rollout_logprobs if x is not None]
        for row, sample in zip(GIVEN, RECORDED, strict=True)
    ]
    print("RESULT " + json.dumps({"log": log, "rows": len(equal), "equal": sum(equal)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
