"""Tinker: two groups of four rollouts as `Datum`s, for `forward_backward(data, "importance_sampling")`."""

from agent import run_groups

from tokentrue.integrations.tinker import datums


def make_datums():
    return datums(run_groups())
