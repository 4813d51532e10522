"""A hub id while the hub cannot be reached: one request, then the cache, or one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tokentrue.cli.main import run
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError
from tokentrue.hub import locate_model, why_unreachable

NOBODY = "http://127.0.0.1:9"
COMMIT = "0" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a hub at an address where nothing listens."""
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    yield tmp_path


def put_into(cache: Path) -> Path:
    """The shipped model as org/name, as the hub's library lays a download out."""
    folder = cache / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / COMMIT).symlink_to(SMALL_MODEL)
    return folder / "snapshots" / COMMIT


@pytest.mark.parametrize("line", ["serve --port 0 --store memory --model org/name", "verify org/name", "train --model org/name --out o"])
def test_one_line_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str) -> None:
    monkeypatch.chdir(cache)
    name, *rest = line.split()
    assert run(name, rest) == 2
    said = [each for each in capfd.readouterr().err.splitlines() if each.strip() and not each.strip().startswith("loading")]
    assert len(said) == 1, said  # the library's own retries are not heard
    assert (
        "'org/name' is neither a directory here nor in the hub's cache" in said[0]
        and NOBODY in said[0]
        and "give a model's directory" in said[0]
    )


def test_the_cache_is_used(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = put_into(cache)
    assert locate_model("org/name") == str(found)
    assert run("verify", ["org/name"]) == 0
    assert "Retrying" not in capfd.readouterr().err


def test_a_hub_that_answers_and_a_directory_are_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_model(SMALL_MODEL) == str(SMALL_MODEL)
    monkeypatch.setattr("tokentrue.hub.why_unreachable", lambda: None)
    assert locate_model("org/name") == "org/name"


def test_offline_mode_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert why_unreachable() == "HF_HUB_OFFLINE is set"
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        locate_model("org/name")
