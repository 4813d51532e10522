"""A package that is installed beside ours and adds an engine, a format, a family and an environment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.samples.test_audit import forest
from tokentrue.app.wiring import EngineConfig, ModelConfig, provider_for, renderer_for
from tokentrue.environments import load_environment
from tokentrue.errors import ConfigError, FileFormatError
from tokentrue.providers import load
from tokentrue.renderers.families import family_for
from tokentrue.samples import export_bytes, read_samples, write_samples
from tokentrue.samples.files import recognise_format

ENTRY_POINTS = """\
[tokentrue.providers]
bare = their_package:World
server = their_package:Server
theirs = their_package:Engine
[tokentrue.exporters]
theirs = their_package:FORMAT
[tokentrue.families]
theirs = their_package:recognise
[tokentrue.environments]
theirs = their_package:World
broken = their_package:Nowhere
"""
MODULE = """\
from tokentrue.providers.scripted import ScriptedProvider
from tokentrue.renderers.families import Clues, Family
from tokentrue.samples.formats import trainer_format


class Engine(ScriptedProvider):
    pass


class Server(ScriptedProvider):
    def __init__(self, url, *, api_key=None, slots=1):
        super().__init__([])
        self.url, self.slots = url, slots


def columns(row):
    return row["their_ids"], row["their_mask"], row["their_logprobs"]


FORMAT = trainer_format(
    "theirs",
    follows="their trainer",
    mark="their_ids",
    row=lambda sample: {
        "their_ids": list(sample.token_ids),
        "their_mask": list(sample.loss_mask),
        "their_logprobs": list(sample.rollout_logprobs),
    },
    columns=columns,
)


def recognise(clues: Clues) -> Family | None:
    return Family(name="theirs") if clues.has("<their_turn>") else None


class World:
    name = "theirs"

    def tasks(self, count, *, seed=0, split="train"):
        return []

    async def run(self, client, task):
        return 1.0
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "installed"
    facts = folder / "their_package-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "their_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    return folder


def test_an_engine() -> None:
    assert type(load("theirs", script=[])).__module__ == "their_package"
    with pytest.raises(ConfigError, match=r"no engine 'nobody'; .*scripted, bare, server, theirs$"):
        load("nobody")
    with pytest.raises(
        ConfigError, match=r"^engine 'bare': World\(\) takes no arguments"
    ):  # its constructor takes no setting
        load("bare", model="dir")


def test_an_engine_with_addresses_is_a_server_for_each() -> None:
    config = EngineConfig(name="server", urls=("http://a", "http://b"), options={"slots": 3})
    pool = provider_for(config, ModelConfig(), renderer_for(ModelConfig()))
    assert [(each.url, each.slots) for each in pool._replicas] == [("http://a", 3), ("http://b", 3)]
    with pytest.raises(ConfigError, match=r"^engine 'bare': World\(\) takes no arguments"):
        provider_for(EngineConfig(name="bare", urls=("http://a",)), ModelConfig(), renderer_for(ModelConfig()))


async def test_a_format(tmp_path: Path) -> None:
    samples = (await forest()).samples()
    path = tmp_path / "samples.jsonl"
    assert write_samples(samples, path, format="theirs") == len(samples)
    assert recognise_format(path) == "theirs"
    assert list(read_samples(path)) == samples
    assert export_bytes(samples, format="theirs") == (path.read_bytes(), "application/x-ndjson")
    with pytest.raises(FileFormatError, match=r"no format 'nobody'; .*tinker, theirs$"):
        write_samples(samples, path, format="nobody")


def test_a_family_comes_before_ours() -> None:
    tokenizer = SimpleNamespace(added_tokens_decoder={})
    assert family_for("{% for m in messages %}<their_turn>{% endfor %}", tokenizer).name == "theirs"
    assert family_for("{% for m in messages %}<turn>{% endfor %}", tokenizer).name == "generic"


def test_an_environment() -> None:
    assert load_environment("theirs").name == "theirs"
    with pytest.raises(ConfigError, match=r"no 'nobody'; .*verifiers, broken, theirs, or package"):
        load_environment("nobody")
    with pytest.raises(ConfigError, match="their_package:Nowhere cannot be loaded: AttributeError"):
        load_environment("broken")


def test_a_plugin_that_cannot_be_loaded_is_named(installed: Path) -> None:
    facts = installed / "their_package-1.0.dist-info" / "entry_points.txt"
    facts.write_text("[tokentrue.families]\nours = their_package:nothing\n")
    with pytest.raises(ConfigError, match=r"^tokentrue.families: ours \(their_package:nothing\) cannot be loaded"):
        family_for("", SimpleNamespace(added_tokens_decoder={}))
