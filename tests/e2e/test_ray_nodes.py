"""A real Ray of three nodes (three raylets on this host), gateways on each, one record on PostgreSQL; a node is killed
in the middle."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ray import undisturbed
from tokentrue.app.rollouts import RolloutRun, plan_rollouts
from tokentrue.cli.main import run
from tokentrue.environments import RolloutConfig
from tokentrue.errors import ConfigError

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own: unclosed sockets, a future default
    pytest.mark.postgres,
    pytest.mark.slow,
]
NODES = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    size = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.timeout(900)
def test_the_sessions_of_a_killed_node_continue_on_the_others(
    cluster: Any, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "rollout.environment=tests.e2e.slow:SlowCalculator",
        "rollout.tasks=6",
        "rollout.group_size=3",
        "rollout.concurrency=4",
    ]
    settings += [f"store={database}", "rollout.timeout_s=400"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    out = tmp_path / "out"
    told: dict[str, Any] = {}
    killer = threading.Thread(target=lambda: told.update(kill_a_node(cluster, database)))
    killer.start()
    code = run("rollout", ["--ray", cluster.address, "--nodes", str(NODES), "--out", str(out), "--json", *flags])
    killer.join()
    said = capsys.readouterr()
    assert code == 0, (said.out, said.err, told)
    assert 0 < told["ended"] < 18, told
    rows = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    config = RolloutConfig(
        environment="tests.e2e.slow:SlowCalculator", tasks=6, group_size=3, concurrency=4, timeout_s=400
    )
    plans = plan_rollouts(config)
    assert sorted(row["rollout"] for row in rows) == sorted(plan.key for plan in plans), "each rollout once"
    assert [row["error"] for row in rows] == [None] * len(rows)
    assert max(Counter(sample["sample_id"] for sample in samples).values()) == 1, "a row is there twice"
    expected = undisturbed(config, tmp_path / "quiet")
    sessions = {row["session_id"]: row["rollout"] for row in rows}
    found: dict[str, list[list[int]]] = {key: [] for key in expected}
    for sample in samples:
        found[sessions[sample["session_id"]]].append(sample["token_ids"])
    assert found == expected, (
        "a rollout that lived through the death of a node sampled other tokens than an undisturbed one"
    )
    assert told["sessions_of_dead"] > 0 and moved(database) > 0, told


def kill_a_node(cluster: Any, database: str) -> dict[str, Any]:
    """The last node, when some rollouts have ended and gateways on every node own sessions."""
    import psycopg

    while True:
        time.sleep(0.2)
        try:
            with psycopg.connect(database, autocommit=True) as connection:
                ended = connection.execute("SELECT count(*) FROM sessions WHERE state='ended'").fetchone()
                owners = dict(
                    connection.execute(
                        "SELECT owner, count(*) FROM sessions WHERE state='open' GROUP BY owner"
                    ).fetchall()
                )
        except psycopg.Error:
            continue  # the tables are not there yet
        if ended is not None and ended[0] >= 2 and len(owners) == NODES:
            break
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    return {"ended": ended[0], "sessions_of_dead": min(owners.values()), "owners": owners}


def moved(database: str) -> int:
    """Sessions that had more than one owner."""
    import psycopg

    with psycopg.connect(database, autocommit=True) as connection:
        found = connection.execute("SELECT count(*) FROM sessions WHERE token > 1").fetchone()
    return 0 if found is None else found[0]


def test_several_nodes_need_a_record_that_all_of_them_reach(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="postgresql://"):
        RolloutRun(nodes=2, out=tmp_path)
