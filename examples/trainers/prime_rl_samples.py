"""prime-rl: two groups of four rollouts as its own `TrainingSample`s."""

from agent import run_groups

from tokentrue.integrations.prime_rl import training_samples


def make_samples():
    return training_samples(run_groups())
