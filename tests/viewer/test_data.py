"""The data API without a browser: one shape for every source, what would have broken, advantages, plots, export, bad
input."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import tokentrue as tt
from tests.viewer.world import (
    STEPS,
    SYSTEM,
    TASKS,
    Told,
    build_store,
    long_sample,
    renderer,
    run_apart,
    split,
    store_samples,
    write_trainer_file,
)
from tokentrue.cli.main import run as run_command
from tokentrue.errors import ConfigError, FileFormatError, SessionNotFound
from tokentrue.samples import write_samples
from tokentrue.samples.trainer_logprobs import read_trainer_logprobs
from tokentrue.sessions import Journal
from tokentrue.types import Sample
from tokentrue.viewer import FileSource, Report, SampleList, StoreSource, ViewerData, create_app, write_report
from tokentrue.viewer.breaks import differing_ranges
from tokentrue.viewer.page import answer_key
from tokentrue.viewer.plots import group_advantages, plots_to_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("viewer") / "runs.sqlite")


@pytest.fixture(scope="module")
def samples(store: Path) -> list[Sample]:
    return store_samples(store)


@pytest.fixture(scope="module")
def from_store(store: Path) -> Iterator[ViewerData]:
    source = StoreSource(Journal(f"sqlite:{store}", read_only=True), name=store.name)
    yield ViewerData(source, renderer=renderer())
    source.close()


@pytest.mark.parametrize("format", ["jsonl", "parquet", "safetensors"])
def test_a_file_and_a_store_give_the_same_shape(
    from_store: ViewerData, samples: list[Sample], tmp_path: Path, format: str
) -> None:
    path = tmp_path / f"samples.{format}"
    write_samples(samples, path, format=format)
    from_file = ViewerData(FileSource(path), renderer=renderer())
    assert same_keys(from_file.index(), from_store.index())
    name, sample = "task0-rollout2", next(one for one in samples if one.session_id == "task0-rollout2")
    assert same_keys(from_file.session(name) | {"nodes": []}, from_store.session(name) | {"nodes": []})
    mine, theirs = (data.branch(name, sample.sample_id) for data in (from_file, from_store))
    assert mine.keys() == theirs.keys()
    sampled = [
        [(b["start"], b["body"], b["end"], b["message"]) for b in one["blocks"] if b["kind"] == "sampled"]
        for one in (mine, theirs)
    ]
    assert sampled[0] == sampled[1]
    for key in ("token_ids", "rollout_logprobs", "spans", "reward", "pieces", "certificate", "advantage"):
        assert mine[key] == theirs[key], key
    assert from_file.group("task-0").keys() == from_store.group("task-0").keys()


def same_keys(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        free = a.keys() & {"untrained", "metadata"}
        return a.keys() == b.keys() and all(same_keys(a[key], b[key]) for key in a.keys() - free)
    if isinstance(a, list) and isinstance(b, list) and a and b:
        return same_keys(a[0], b[0])
    return True


def test_every_token_is_in_one_block_and_blocks_carry_their_messages(
    from_store: ViewerData, samples: list[Sample]
) -> None:
    for sample in samples:
        branch = from_store.branch(sample.session_id, sample.sample_id)
        edges = [block["start"] for block in branch["blocks"]] + [branch["blocks"][-1]["end"]]
        assert edges[0] == 0 and edges[-1] == len(sample.token_ids) and edges == sorted(set(edges))
        assert all(a["end"] == b["start"] for a, b in zip(branch["blocks"], branch["blocks"][1:], strict=False))
        assert [block["message"]["role"] for block in branch["blocks"]][:3] == ["system", "user", "assistant"]


def test_abandoned_attempts_are_branches_that_train_nothing(from_store: ViewerData) -> None:
    heads = from_store.session("task0-rollout1")["branches"]
    assert [head["abandoned"] for head in heads] == [None, "retried"]
    branch = from_store.branch("task0-rollout1", heads[1]["sample_id"])
    assert heads[1]["trained"] == 0 and branch["untrained"] == [(0, len(branch["token_ids"]))]
    assert {span[7] for span in branch["spans"] if span[2] == "sampled"} == {"trained_elsewhere", "retried"}


def test_a_group_counts_the_tokens_of_abandoned_attempts(from_store: ViewerData) -> None:
    """As the list of sessions does: the rollouts shown leave them out."""
    rows = [row for row in from_store.index()["sessions"] if row["group"] == "task-0"]
    shown = from_store.group("task-0")
    assert (shown["sampled"], shown["trained"]) == tuple(
        sum(row[name] for row in rows) for name in ("sampled", "trained")
    )
    assert shown["trained"] < shown["sampled"] > sum(rollout["sampled"] for rollout in shown["rollouts"])


def test_breaks_name_every_difference(from_store: ViewerData, samples: list[Sample]) -> None:
    """The same conversation rendered again: splits healed, reasoning gone, a call's spacing changed; and every
    difference found is real."""
    for sample in samples:
        found = from_store.breaks(sample.session_id, sample.sample_id)
        rebuilt: list[int] = []
        at = 0
        for _, start, end, other_start, other_end, *_ in found["breaks"]:
            rebuilt += found["token_ids"][at:start] + found["other_ids"][other_start:other_end]
            at = end
        assert rebuilt + found["token_ids"][at:] == found["other_ids"]  # applying the differences gives the render
    found = from_store.breaks("task0-rollout2", next(s.sample_id for s in samples if s.session_id == "task0-rollout2"))
    names = {row["name"]: row for row in found["names"]}
    assert found["mode"] == "render" and found["dropped"]
    assert names["reasoning removed"]["count"] == 3 and names["same text, other tokens"]["count"] >= 3
    assert found["lost"] == sum(row["lost"] for row in names.values()) > 0


def test_nothing_breaks_where_nothing_differs() -> None:
    """One turn, sampled as the tokenizer itself would write it."""
    made, engine = renderer(), Told()
    engine.answers.append([*made.encode_sampled(STEPS[-1]), made.stop_token_ids[0]])
    session = tt.Session(renderer=made, provider=engine)
    run_apart(chat_once(session))
    data = ViewerData(SampleList(session.samples(), name="one"), renderer=made)
    found = data.breaks(session.id, session.samples()[0].sample_id)
    assert found["mode"] == "render" and found["breaks"] == [] and found["lost"] == 0


def test_a_file_without_messages_is_rendered_again_where_its_prompt_can_be_rebuilt() -> None:
    made, engine = renderer(), Told()
    engine.answers.append(split(STEPS[-1], 3))
    session = tt.Session(renderer=made, provider=engine)
    run_apart(chat_once(session))
    data = ViewerData(SampleList(session.samples(), name="one"), renderer=made)
    found = data.breaks(session.id, session.samples()[0].sample_id)
    assert found["mode"] == "render" and {row["name"] for row in found["names"]} == {"same text, other tokens"}


async def chat_once(session: tt.Session) -> None:
    await session.chat([SYSTEM, {"role": "user", "content": "Well?"}])


def test_a_prompt_with_tools_that_a_file_does_not_hold_falls_back_to_text_and_says_so(samples: list[Sample]) -> None:
    data = ViewerData(SampleList(samples, name="samples"), renderer=renderer())
    found = data.breaks(samples[0].session_id, samples[0].sample_id)
    assert found["mode"] == "retokenise" and "open the store" in found["why"]


@pytest.mark.parametrize(
    ("recorded", "other", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], []),
        ([1, 5, 6, 3], [1, 7, 3], [(1, 3, 1, 2)]),
        ([1, 2], [1, 2, 9], [(2, 2, 2, 3)]),
        ([9, 4, 4, 9, 5], [9, 4, 4, 9, 6], [(4, 5, 4, 5)]),
        ([9, 1, 9, 2, 9, 3], [9, 1, 9, 3], [(2, 4, 2, 2)]),
        ([], [1], [(0, 0, 0, 1)]),
    ],
)
def test_differing_ranges(recorded: list[int], other: list[int], expected: list[Any]) -> None:
    found = differing_ranges(recorded, other, frozenset({9}))
    rebuilt: list[int] = []
    at = 0
    for start, end, other_start, other_end in found:
        rebuilt += recorded[at:start] + other[other_start:other_end]
        at = end
    assert rebuilt + recorded[at:] == other
    assert found == expected


@pytest.mark.parametrize("rewards", [[0.0, 1.0, 0.0, 0.5], [1.0, 1.0], [3.0], [0.1, 0.2, 0.7]])
def test_advantages_are_those_of_mismatch(rewards: list[float]) -> None:
    torch = pytest.importorskip("torch")
    from tokentrue.mismatch import grpo_advantages

    expected = grpo_advantages(torch.tensor(rewards, dtype=torch.float64), [0] * len(rewards)).tolist()
    assert group_advantages(rewards) == pytest.approx(expected, abs=1e-12)


def test_an_advantage_of_the_sample_itself_wins(samples: list[Sample]) -> None:
    group = [one for one in samples if one.group == "task-0"]
    told = [replace(group[0], metadata={**group[0].metadata, "advantage": 9.5}), *group[1:]]
    shown = ViewerData(SampleList(told, name="s")).group("task-0")["rollouts"]
    assert next(one for one in shown if one["sample_id"] == group[0].sample_id)["advantage"] == 9.5


def test_plots_count_every_token_once() -> None:
    draw = np.random.default_rng(0)
    rollout = [None, *(-draw.exponential(size=500)).tolist()]
    trainer = [None if value is None else min(0.0, value + float(draw.normal(0, 0.01))) for value in rollout]
    mask = [0, *([1] * 500)]
    found = plots_to_json([(rollout, trainer, mask, 1.5), (rollout, rollout, mask, -0.5)])
    assert found["tokens"] == 1000 == sum(found["histogram"]["count"]) == sum(found["position"]["count"])
    assert found["equal"] >= 500
    assert found["contribution"]["positive"]["tokens"] == 500 == found["contribution"]["negative"]["tokens"]
    assert found["contribution"]["negative"]["mean"] == 0.0
    deltas = [t - r for r, t in zip(rollout, trainer, strict=True) if r is not None and t is not None]
    expected = sum(-math.expm1(delta) * 1.5 for delta in deltas) / 500
    assert found["contribution"]["positive"]["mean"] == pytest.approx(expected)
    assert found["tail"]["share"][0] == pytest.approx(sum(delta != 0 for delta in deltas) / 1000)


def test_exact_log_probabilities_are_said_to_be_exact(
    from_store: ViewerData, samples: list[Sample], tmp_path: Path
) -> None:
    trainer = read_trainer_logprobs(write_trainer_file(tmp_path / "t.jsonl", samples, exact=True))
    found = ViewerData(from_store.source, trainer=trainer).mismatch()
    assert found["equal"] == found["tokens"] == sum(sum(sample.loss_mask) for sample in samples)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"logprobs": []}',
        '{"sample_id": "x", "logprobs": ["a"]}',
        '{"sample_id": "x", "logprobs": ["-1.5"]}',
        '{"sample_id": "x", "logprobs": [true]}',
        '{"sample_id": "x", "logprobs": [0.5]}',
        '{"sample_id": "x", "logprobs": [-1e999]}',
        f'{{"sample_id": "x", "logprobs": [-1{"0" * 400}]}}',
        '{"sample_id": "x", "logprobs": [null], "entropy": ["1"]}',
        '{"sample_id": "x", "logprobs": [null], "entropy": 1}',
        '{"sample_id": "first", "logprobs": [null]}',
        "[" * 100_000,
    ],
)
def test_a_bad_trainer_file_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"sample_id": "first", "logprobs": [null, 0, -1], "entropy": [null, 0, 2.5]}}\n\n{line}\n')
    with pytest.raises(FileFormatError, match=r"t\.jsonl:3:"):
        read_trainer_logprobs(path)


def test_trainer_log_probabilities_of_another_length_are_refused(samples: list[Sample], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"sample_id": "{samples[0].sample_id}", "logprobs": [null]}}\n')
    data = ViewerData(SampleList(samples, name="s"), trainer=read_trainer_logprobs(path))
    with pytest.raises(FileFormatError, match="1 trainer log-probabilities"):
        data.branch(samples[0].session_id, samples[0].sample_id)


def test_the_server_answers_and_refuses(from_store: ViewerData) -> None:
    client = TestClient(create_app(from_store))
    page = client.get("/")
    assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
    assert "<script>" not in page.text and 'type="module" src="static/app.js"' in page.text
    assert client.get("/data/index?offset=0").json()["total"] == 8
    assert client.get("/data/index?offset=-1").status_code == 422
    assert client.get("/data/session?session=nobody").status_code == 404
    assert client.get("/data/session").status_code == 422
    assert client.get("/data/nothing").status_code == 404
    assert client.get("/data/index?view=x&self=y").status_code == 200
    assert client.get("/data/mismatch").json()["error"].startswith("no trainer log-probabilities")
    assert client.post("/data/index").status_code == 405
    assert client.get("/static/../data.py").status_code == 404


def test_an_image_that_is_not_beside_the_file_is_no_error_of_the_server(samples: list[Sample], tmp_path: Path) -> None:
    write_samples(samples[:1], tmp_path / "s.jsonl")
    client = TestClient(create_app(ViewerData(FileSource(tmp_path / "s.jsonl"))))
    for name, said in (("ab" * 32, "is not in s.jsonl.images"), ("../s.jsonl", "is no SHA-256 of an image")):
        answer = client.get("/data/image", params={"session": samples[0].session_id, "sha256": name})
        assert answer.status_code == 422 and said in answer.json()["error"]


def test_the_page_is_mounted_below_another_path(from_store: ViewerData) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    client = TestClient(Starlette(routes=[Mount("/view", create_app(from_store))]))
    assert client.get("/view/").status_code == 200
    assert client.get("/view/data/index?offset=0").status_code == 200
    assert client.get("/view/static/app.js").status_code == 200


def test_missing_things_are_named(from_store: ViewerData, samples: list[Sample]) -> None:
    data = ViewerData(SampleList(samples, name="s"))
    with pytest.raises(ConfigError, match="--model DIR"):
        data.breaks(samples[0].session_id, samples[0].sample_id)
    with pytest.raises(SessionNotFound, match="no sample"):
        from_store.branch("task0-rollout0", "nobody")
    with pytest.raises(SessionNotFound, match="no session of group"):
        from_store.group("nobody")


def test_a_report_is_one_file_that_asks_for_nothing(samples: list[Sample], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write_report(path, Report(title="A run", verdict="fine </script><b>"), source=SampleList(samples[:1], name="s"))
    text = path.read_text(encoding="utf-8")
    assert (
        "default-src 'none'" in text and 'src="' not in text.replace('type="module"', "") and "</script><b>" not in text
    )
    assert answer_key("report").replace('"', '\\"') in text


@pytest.mark.parametrize(
    "value", ["née", "a\u2028b", "\U0001f600", '"\\', "\x00\x1f\x7f", "lone \ud800", "\udfff/", 'née "\udc00"']
)
def test_an_export_spells_its_keys_as_the_page_does(value: str) -> None:
    script = "process.stdin.on('data', text => process.stdout.write(JSON.stringify(JSON.parse(text))))"
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    asked = json.dumps(["session", value])
    spelled = subprocess.run(
        [node, "-e", script], input=asked, capture_output=True, text=True, encoding="utf-8", timeout=60, check=True
    )
    assert answer_key("session", value) == spelled.stdout


def test_text_that_utf8_cannot_hold_is_answered_as_an_escape(samples: list[Sample]) -> None:
    metadata = {**samples[0].metadata, "said": "cut \udcc3, née", "rate": math.nan, "long": 10**30}
    client = TestClient(
        create_app(ViewerData(SampleList([replace(samples[0], metadata=metadata)], name="caf\udce9.jsonl")))
    )
    assert client.get("/data/index?offset=0").json()["source"]["name"] == "caf\udce9.jsonl"
    shown = client.get(f"/data/session?session={samples[0].session_id}").json()["metadata"]
    assert (shown["said"], shown["rate"], shown["long"]) == ("cut \udcc3, née", None, 10**30)


@pytest.mark.parametrize("field", ["session_id", "sample_id", "group"])
def test_a_name_that_no_address_can_hold_is_refused(samples: list[Sample], tmp_path: Path, field: str) -> None:
    odd: Any = {field: "\ud800"}
    write_samples([replace(samples[0], **odd)], tmp_path / "s.jsonl")
    done = run_cli(str(tmp_path / "s.jsonl"), "--export", str(tmp_path / "page.html"))
    assert (
        done.returncode == 2
        and f"{field} '\\ud800' holds a lone surrogate" in done.stderr
        and done.stderr.count("\n") == 1
    )
    if field != "sample_id":  # which the list does not name
        client = TestClient(create_app(ViewerData(FileSource(tmp_path / "s.jsonl"))))
        assert client.get("/data/index?offset=0").status_code == 422


def test_a_long_branch_is_answered_in_time() -> None:
    sample = long_sample(20_000)
    data = ViewerData(SampleList([sample], name="long"), renderer=renderer())
    branch = data.branch("long", "long-0")
    assert len(branch["token_ids"]) == len(sample.token_ids) and len(branch["pieces"]) < 100


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tokentrue", "view", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, stdin=subprocess.DEVNULL
    )


def test_the_command_exports_and_names_what_is_wrong(
    samples: list[Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = tmp_path / "samples.jsonl", tmp_path / "page.html"
    write_samples(samples[:2], path)
    done = run_cli(str(path), "--export", str(target))
    assert done.returncode == 0 and "2 of 2 sessions" in done.stdout and target.stat().st_size > 100_000
    for arguments, words in (
        ((str(tmp_path / "none.jsonl"),), "no such file"),
        (("sqlite:" + str(tmp_path / "none.sqlite"),), "no journal at"),
        (("http://127.0.0.1:9",), "is `tokentrue serve` running?"),
        ((str(path), "--model", str(tmp_path / "none")), "--model: there is no directory"),
        ((str(path), "--port", "99999"), "between 0 and 65535"),
        ((str(path), "--trainer-logprobs", str(tmp_path / "none")), "no such file"),
    ):
        assert run_command("view", list(arguments)) == 2
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said, arguments


def test_a_file_is_shown_from_its_end_page_by_page(samples: list[Sample], tmp_path: Path) -> None:
    many = [replace(samples[n % len(samples)], sample_id=f"s{n}", session_id=f"s{n}") for n in range(620)]
    write_samples(many, tmp_path / "many.jsonl")
    data = ViewerData(FileSource(tmp_path / "many.jsonl"), renderer=renderer())
    pages = [data.index(), data.index(offset=500)]
    assert [page["total"] for page in pages] == [620, 620]
    names = [row["session_id"] for page in pages for row in page["sessions"]]
    assert names == [f"s{n}" for n in reversed(range(620))], "the newest first, and older ones after them"


def test_a_row_says_how_the_task_begins(from_store: ViewerData) -> None:
    rows = {row["session_id"]: row for row in from_store.index()["sessions"]}
    assert rows["task0-rollout2"]["task"] == TASKS[0]


def test_messages_are_searched_part_by_part(from_store: ViewerData) -> None:
    seen: list[str] = []
    at: int | None = 0
    while at is not None:
        part = from_store.search("FROM LEXER", offset=at)
        seen += [match["session_id"] for match in part["matches"]]
        at = part["next"]
    expected = {row["session_id"] for row in from_store.index()["sessions"] if row["turns"] > 1}
    assert seen and len(seen) == len(set(seen)) and set(seen) <= expected
    match = from_store.search("names a module that was removed")["matches"][0]
    assert match["role"] == "assistant" and "Delete it." in match["text"] and match["turn"] > 0
    assert from_store.search("no agent ever said this")["matches"] == []


def test_a_store_that_nobody_writes_is_not_live(store: Path, samples: list[Sample], tmp_path: Path) -> None:
    path = tmp_path / "copy.sqlite"
    path.write_bytes(store.read_bytes())
    source = StoreSource(Journal(f"sqlite:{path}", read_only=True), name="copy")
    assert source.is_active()
    for each in tmp_path.iterdir():
        os.utime(each, (1, 1))
    assert not source.is_active()
    source.close()
    write_samples(samples, tmp_path / "s.jsonl")
    assert not ViewerData(FileSource(tmp_path / "s.jsonl")).index()["source"]["live"]  # a file is read once
