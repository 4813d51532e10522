"""Harbor's trajectories (ATIF) beside what tokentrue recorded."""

from tokentrue_harbor.atif import compare_trajectories, trajectory_from_tree

__all__ = ["compare_trajectories", "trajectory_from_tree"]
