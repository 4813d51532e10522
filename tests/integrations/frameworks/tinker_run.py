"""Tinker 0.36.0: recorded rollouts as its own `Datum`s. The service itself cannot be reached; nothing is sent."""

from __future__ import annotations

import tinker
from common import GATEWAY, TASKS, logprobs_of, sampled, solve_twice, tell

from tokentrue.integrations.rollouts import GatewayRollouts
from tokentrue.integrations.tinker import datums


def main() -> None:
    prompts = [prompt for prompt in list(TASKS)[:2] for _ in range(4)]
    found = GatewayRollouts(agent=solve_twice, seed=2, **GATEWAY).run(prompts, prompts)
    samples = [sample for rollout in found for sample in rollout]
    made = datums(samples)
    equal = 0
    sums: dict[str, float] = {}
    for datum, sample in zip(made, samples, strict=True):
        assert isinstance(datum, tinker.Datum)
        columns = {name: datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "logprobs", "advantages")}
        ids = [*datum.model_input.to_ints(), columns["target_tokens"][-1]]
        mask = sample.loss_mask[1:]
        advantages = columns["advantages"]
        inside, outside = sampled(advantages, mask), sampled(advantages, [1 - bit for bit in mask])
        equal += ids == list(sample.token_ids) and sampled(columns["logprobs"], mask) == logprobs_of(sample)
        equal -= any(outside) or len(set(inside)) != 1
        sums[sample.session_id] = inside[0]
    tell(rows=len(made), equal=equal, rollouts=len(sums), sum=sum(sums.values()))


if __name__ == "__main__":
    main()
