"""A rollout's files, `samples.jsonl` and `rollouts.jsonl`: whole groups only, so that missing ones can be run later.
A group is done when each of its rollouts has a line; its samples are written first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokentrue.environments import Plan, Rollout
from tokentrue.json_types import JsonObject
from tokentrue.plain_json import dumps, loads, read_numbered_lines


class Recorder:
    """Writes whole groups, in the order in which they end."""

    def __init__(self, out: Path, plans: Sequence[Plan]) -> None:
        self._sizes = Counter(plan.group for plan in plans)
        self._groups: dict[str, list[Rollout]] = {}
        self._samples = (out / "samples.jsonl").open("ab")
        self._rollouts = (out / "rollouts.jsonl").open("ab")

    def __call__(self, rollout: Rollout) -> None:
        group = self._groups.setdefault(rollout.plan.group, [])
        group.append(rollout)
        if len(group) == self._sizes[rollout.plan.group]:
            self._write(sorted(self._groups.pop(rollout.plan.group), key=lambda r: r.plan.index))

    def _write(self, group: Sequence[Rollout]) -> None:
        for rollout in group:
            self._samples.writelines(dumps(sample) + b"\n" for sample in rollout.samples)
        self._samples.flush()
        for rollout in group:
            self._rollouts.write(dumps(describe_rollout(rollout)) + b"\n")
        self._rollouts.flush()

    def close(self) -> None:
        self._samples.close()
        self._rollouts.close()


def describe_rollout(rollout: Rollout) -> JsonObject:
    return {
        "rollout": rollout.plan.key,
        "group": rollout.plan.group,
        "index": rollout.plan.index,
        "session_id": rollout.session_id,
        "reward": rollout.reward,
        "error": rollout.error,
        "note": rollout.note,
        "seconds": round(rollout.seconds, 4),
        "samples": len(rollout.samples),
        "sampled": rollout.coverage.get("sampled", 0),
        "trained": rollout.coverage.get("trained", 0),
    }


def read_whole_lines(path: Path) -> list[JsonObject]:
    """Up to the first incomplete line."""
    found: list[JsonObject] = []
    for _, line in read_numbered_lines(path) if path.exists() else ():
        try:
            found.append(loads(line))
        except ValueError:
            break
    return found


def trim_to_whole_groups(out: Path, plans: Sequence[Plan], *, again: bool = False) -> set[str]:
    """Truncates both files to groups that are done (with `again`, also without failures) and returns those."""
    sizes = Counter(plan.group for plan in plans)
    lines = read_whole_lines(out / "rollouts.jsonl")
    counts = Counter(line["group"] for line in lines)
    failed = {line["group"] for line in lines if line["error"] is not None} if again else set[str]()
    done = {group for group, count in counts.items() if count == sizes[group]} - failed
    kept = [line for line in lines if line["group"] in done]
    sessions = {line["session_id"] for line in kept}
    samples = [sample for sample in read_whole_lines(out / "samples.jsonl") if sample["session_id"] in sessions]
    for name, rows in (("rollouts.jsonl", kept), ("samples.jsonl", samples)):
        rewrite(out / name, rows)
    return done


def rewrite(path: Path, rows: Sequence[JsonObject]) -> None:
    """Atomic: a crash leaves the old file."""
    beside = path.with_suffix(".partial")
    beside.write_bytes(b"".join(dumps(row) + b"\n" for row in rows))
    beside.replace(path)
