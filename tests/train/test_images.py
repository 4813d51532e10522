"""`tokentrue train` with pictures: over HTTP, exact, resumable, on one rank and on two."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import Qwen3VLForConditionalGeneration

from tests import vision
from tests.images.double import picture
from tests.train.pictures import make_model
from tests.train.test_ranks import ENV, ROOT, launch
from tokentrue.app.rollouts import RoundImages
from tokentrue.errors import AuditError
from tokentrue.images import hash_image
from tokentrue.train.ranks import find_layers
from tokentrue.train.rows import rows_from_groups
from tokentrue.types import Certificate, ImageRun, Sample


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("seeing"))


def command(world: int, model: str, out: Path, steps: int, **sets: object) -> list[str]:
    settings: dict[str, object] = {
        "rollout.environment": "tests.train.pictures:Pictures", "rollout.tasks": 4, "rollout.group_size": 3,
        "rollout.max_tokens": 12, "optim.lr": 1e-3, "log": "[]", "threads": 1, "train.micro_tokens": 256,
        "train.checkpoint_every": 1, **sets,
    }  # fmt: skip
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    run = ["tokentrue", "train", "--model", model, "--out", str(out), "--steps", str(steps), "--json", *options]
    return launch(world, *run)


def train(*args: Any, **sets: object) -> list[dict[str, Any]]:
    done = subprocess.run(command(*args, **sets), cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def weights(out: Path, step: int) -> dict[str, bytes]:
    found = load_file(out / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
    return {name: value.numpy().tobytes() for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_see_what_one_process_sees(model: str, tmp_path: Path) -> None:
    """Half of the rows have no picture: passes of one rank leave the tower without a gradient, those of the other do
    not. A tower that was summed wrongly would differ in the norm."""
    one, two = train(1, model, tmp_path / "one", 2), train(2, model, tmp_path / "two", 2)
    for row in (*one, *two):
        assert row["exact_compared"] > 0 and row["exact_differing"] == 0
        assert row["rows_trained"] > 0
    for key in ("reward", "rollouts/failed", "tokens", "tokens_trained", "exact_compared"):
        assert two[0][key] == one[0][key], "the first round is the same whoever plays it"
    assert two[0]["update/grad_norm"] == pytest.approx(one[0]["update/grad_norm"], rel=1e-4)
    before = load_file(Path(model) / "model.safetensors")
    for out in ("one", "two"):
        after = load_file(tmp_path / out / "checkpoints" / "step-000001" / "model.safetensors")
        moved = {name for name in before if "visual" in name and not before[name].equal(after[name])}
        assert len(moved) > 10, "the tower did not learn"
        assert not list((tmp_path / out / "rounds").iterdir()), "pictures of trained rounds are kept"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resumed_run_has_the_pictures_of_waiting_rounds(model: str, tmp_path: Path) -> None:
    """With a lag, a checkpoint has rounds that were played and not trained on."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(1, model, whole, 4, **{"train.lag": 1})
    again = command(1, model, broken, 4, **{"train.lag": 1})
    running = subprocess.Popen(again, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not (broken / "checkpoints" / "step-000001" / "state.json").exists():
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    running.kill()
    running.wait()
    assert not (broken / "checkpoints" / "step-000004").exists(), "the run had ended before it was killed"
    (waiting,) = (json.loads(line) for line in (broken / "checkpoints/latest/rounds.jsonl").read_text().splitlines())
    assert any(sample["images"] for group in waiting["groups"] for sample in group)
    train(1, model, broken, 4, **{"train.lag": 1})
    assert weights(whole, 4) == weights(broken, 4)


def test_the_tower_is_no_list_of_layers() -> None:
    """Its blocks run once for each image: as FSDP units they would gather another number of times on each rank."""
    model = Qwen3VLForConditionalGeneration(vision.config(num_hidden_layers=2))
    assert len(model.model.visual.blocks) == 3
    assert find_layers(model) is model.model.language_model.layers


def test_rounds_keep_their_pictures_until_a_checkpoint_has_them(tmp_path: Path) -> None:
    images, data = RoundImages(tmp_path), picture(20, 20)
    for number in (3, 4, 5):
        images.folder(number).add(hash_image(data), data)
    images.drop_before(5)
    assert images.folder(5).read(hash_image(data))[0] == data
    with pytest.raises(AuditError, match="is not in"):
        images.folder(4).read(hash_image(data))
    with pytest.raises(AuditError, match="do not fit"):
        images.folder(5).add(hash_image(data), data + b"x")


def test_a_picture_in_many_rows_is_read_once() -> None:
    reads: list[str] = []

    def read(sha256: str) -> bytes:
        reads.append(sha256)
        return b"x"

    run = ImageRun(sha256="a" * 64, start=0, count=1, grid=(1, 2, 2), processor="p")
    seal = Certificate(chain="", template="", tokenizer="")
    sample = Sample(
        sample_id="s", session_id="s", group=None, token_ids=[7, 8], loss_mask=[0, 1], rollout_logprobs=[None, -1.0],
        spans=(), reward=1.0, finish_reason="stop", metadata={}, certificate=seal, images=(run,),
    )  # fmt: skip
    rows = rows_from_groups([[sample, sample], [sample]], images=read)
    assert [row.images[0].data for row in rows] == [b"x"] * 3 and reads == ["a" * 64]
