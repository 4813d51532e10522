"""prime-rl: recorded rollouts as its own `TrainingSample`s, through its own msgpack wire and its own
`prepare_batch`."""

from __future__ import annotations

import msgspec
from common import GATEWAY, TASKS, logprobs_of, sampled, solve_twice, tell
from prime_rl.transports.rollouts.types import TrainingSample

from tokentrue.integrations.prime_rl import training_samples
from tokentrue.integrations.rollouts import GatewayRollouts


def main() -> None:
    prompts = [prompt for prompt in list(TASKS)[:2] for _ in range(4)]
    found = GatewayRollouts(agent=solve_twice, seed=2, **GATEWAY).run(prompts, prompts)
    samples = [sample for rollout in found for sample in rollout]
    made = training_samples(samples)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=list[TrainingSample])
    equal = 0
    for row, sample in zip(read, samples, strict=True):
        outside = sampled(row.advantages, [1 - bit for bit in sample.loss_mask])
        equal += (
            row.token_ids == list(sample.token_ids)
            and sampled(row.logprobs, row.mask) == logprobs_of(sample)
            and not any(outside)
        )
    tell(rows=len(read), equal=equal)


if __name__ == "__main__":
    main()
