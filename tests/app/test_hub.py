"""A hub id while the hub cannot be reached: one request, then the cache, or one line that says what to do. And the one
loader."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from huggingface_hub import constants

import tokentrue
from tests.app.hub_standin import serve_model
from tests.doctor.engines import perturbed
from tests.mismatch.test_report import make_samples
from tokentrue.app.libraries import quiet_libraries
from tokentrue.cli.main import run
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError
from tokentrue.hub import load_causal_model, load_config, locate_model, why_unreachable
from tokentrue.renderers import load_renderer
from tokentrue.samples import write_samples

NOBODY = "http://127.0.0.1:9"
COMMIT = "0" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a hub at an address where nothing listens."""
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    yield tmp_path


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache in offline mode; the current directory has an empty directory."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(cache)
    (cache / "empty").mkdir()
    return cache


def put_into(cache: Path, model: Path = SMALL_MODEL, *, name: str = "name") -> Path:
    """A model (the shipped one) as org/`name`, as the hub's library lays a download out."""
    folder = cache / f"models--org--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / COMMIT).symlink_to(model)
    return folder / "snapshots" / COMMIT


@pytest.mark.parametrize(
    "line", ["serve --port 0 --store memory --model org/name", "verify org/name", "train --model org/name --out o"]
)
def test_one_line_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.chdir(cache)
    name, *rest = line.split()
    assert run(name, rest) == 2
    said = [
        each for each in capfd.readouterr().err.splitlines() if each.strip() and not each.strip().startswith("loading")
    ]
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


def test_our_own_set_up_does_not_switch_the_hub_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    quiet_libraries()
    assert (
        "HF_HUB_OFFLINE" not in os.environ
    )  # `train` and `doctor` could download nothing, and would name a setting that nobody made


def test_one_function_loads_models() -> None:
    package = Path(tokentrue.__file__).parent
    assert [path.name for path in package.rglob("*.py") if "AutoModelForCausalLM" in path.read_text()] == ["hub.py"]


@pytest.mark.parametrize(
    "model", ["./nowhere", "../nowhere", "/nowhere", "~/nowhere", "a/b/c", "two words", Path("org/name")]
)
def test_what_cannot_be_a_hub_id_is_a_missing_directory(model: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentrue.hub.why_unreachable", lambda: pytest.fail("no hub is asked"))
    for load in (lambda: load_causal_model(model, dtype="float32"), lambda: load_config(model)):
        with pytest.raises(ConfigError) as caught:
            load()
        wanted = f"model: there is no directory {str(model)!r}; give a Hugging Face directory or a hub id such as Qwen/Qwen3-0.6B"
        assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(), "OSError"),
        (RuntimeError("  \n"), "RuntimeError"),
        (RuntimeError("sizes differ:\n\t(2, 3)"), "sizes differ: (2, 3)"),
    ],
)
def test_every_reason_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    def fail(*_given: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ConfigError) as caught:
        load_causal_model(SMALL_MODEL, dtype="float32")
    assert str(caught.value) == f"model: cannot load {str(SMALL_MODEL)!r}: {reason}"


def write_recorded(path: Path, *, model: str) -> Path:
    """Samples as a gateway that serves `model` records them: its tokenizer's hash, and the exact log-probabilities of
    its weights."""
    tokenizer = load_renderer(model).tokenizer_hash
    made = make_samples(SMALL_MODEL, 0.0)[:2]
    write_samples([replace(one, certificate=replace(one.certificate, tokenizer=tokenizer)) for one in made], path)
    return path


def test_diagnose_takes_hub_ids(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_into(offline)
    samples = write_recorded(offline / "s.jsonl", model="org/name")
    assert (
        run("diagnose", [str(samples), "--trainer", "org/name", "--tokenizer", "org/name", "-o", "page.html", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("exact: all") and found["facts"]["trainer"] == "org/name"
    assert '"has_text":true' in (offline / "page.html").read_text()


def test_view_takes_a_hub_id(offline: Path) -> None:
    put_into(offline)
    samples = write_recorded(offline / "s.jsonl", model="org/name")
    assert run("view", [str(samples), "--model", "org/name", "--export", "page.html"]) == 0
    assert '"has_text":true' in (offline / "page.html").read_text()


@pytest.mark.slow
def test_doctor_takes_hub_ids(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine serves the weights before the last update: all three models are loaded."""
    put_into(offline)
    perturbed(load_causal_model(SMALL_MODEL, dtype="float32")).save_pretrained(offline / "before")
    put_into(offline, offline / "before", name="old")
    models = ["--model", "org/name", "--served", "org/old", "--previous", "org/old"]
    assert run("doctor", ["--engine", "exact", *models, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "org/name" and found["facts"]["dtype expected"] == "float32"
    assert {one["fault"] for one in found["findings"] if one["verdict"] == "fault"} == {"stale_weights"}


def test_doctor_expects_the_dtype_that_a_hub_id_was_saved_in(offline: Path) -> None:
    from tokentrue.doctor import Reference

    load_causal_model(SMALL_MODEL, dtype="bfloat16").save_pretrained(offline / "half")
    put_into(offline, offline / "half")
    reference = Reference.load("org/name")
    assert reference.dtype == "bfloat16" and str(reference.model.dtype) == "torch.float32"


OPTIONS = [
    "diagnose s.jsonl --trainer",
    f"diagnose s.jsonl --trainer {SMALL_MODEL} -o page.html --tokenizer",
    "doctor --engine hf --model",
    f"doctor --engine hf --model {SMALL_MODEL} --served",
    f"doctor --engine hf --model {SMALL_MODEL} --previous",
    "view s.jsonl --export page.html --model",
]
MISSING = {
    "./nowhere": "there is no directory './nowhere'; give a Hugging Face directory or a hub id such as Qwen/Qwen3-0.6B",
    "org/name": "'org/name' is neither a directory here nor in the hub's cache, and the hub cannot be reached (HF_HUB_OFFLINE is set)",
    "empty": "'empty'",
}


def errors_of(line: str, capfd: pytest.CaptureFixture[str]) -> list[str]:
    name, *rest = line.split()
    assert run(name, rest) == 2
    return [each for each in capfd.readouterr().err.splitlines() if each.strip()]


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda line: line.replace(str(SMALL_MODEL), "MODEL"))
def test_a_missing_model_is_one_line_with_the_option(
    offline: Path, capfd: pytest.CaptureFixture[str], options: str, missing: str
) -> None:
    write_recorded(offline / "s.jsonl", model=str(SMALL_MODEL))
    capfd.readouterr()
    said = errors_of(f"{options} {missing}", capfd)
    assert len(said) == 1, said
    assert (
        said[0].startswith(f"tokentrue {options.split()[0]}: {options.split()[-1]}: ") and MISSING[missing] in said[0]
    )


@pytest.mark.parametrize("options", ["doctor --engine hf --model MODEL --served", "doctor --engine exact --model MODEL --served",
                                     "doctor --engine hf --model", "diagnose s.jsonl --trainer"])  # fmt: skip
def test_a_model_without_weights_is_one_line_with_the_option(
    offline: Path, capfd: pytest.CaptureFixture[str], options: str
) -> None:
    write_recorded(offline / "s.jsonl", model=str(SMALL_MODEL))
    (offline / "empty" / "config.json").write_text((SMALL_MODEL / "config.json").read_text())
    capfd.readouterr()
    said = errors_of(f"{options.replace('MODEL', str(SMALL_MODEL))} empty", capfd)
    assert len(said) == 1, said
    option = options.split()[-1]
    words = "cannot load 'empty': ", "model.safetensors"
    if option == "--model":  # the tokenizer comes from there, and is looked for first
        words = "directory 'empty' has no tokenizer", "is it a model's?"
    assert f": {option}: {words[0]}" in said[0] and words[1] in said[0]


def test_previous_weights_that_a_probe_cannot_load_name_their_option(
    offline: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    perturbed(load_causal_model(SMALL_MODEL, dtype="float32")).save_pretrained(offline / "other")
    (offline / "empty" / "config.json").write_text((SMALL_MODEL / "config.json").read_text())
    capfd.readouterr()
    said = errors_of(f"doctor --engine hf --model {SMALL_MODEL} --served other --previous empty", capfd)
    assert len(said) == 1 and ": --previous: cannot load 'empty': " in said[0], said


SHOW = """
import json, sys
from tokentrue.renderers import load_renderer
renderer = load_renderer(sys.argv[1])
print(json.dumps([renderer.tokenizer_hash, renderer.template_hash, sorted(renderer.stop_token_ids)]))
"""


@pytest.mark.slow
def test_a_hub_id_is_read_as_the_directory_of_its_files_is(tmp_path: Path) -> None:
    """Its hash and its stops, those of generation_config.json among them; the weights are not downloaded."""
    model = tmp_path / "model"
    shutil.copytree(SMALL_MODEL, model)
    stops = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    extra = next(i for i in range(300) if i not in {stops} if i not in load_renderer(SMALL_MODEL).stop_token_ids)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [stops, extra]}))

    def show(name: str, **env: str) -> list[object]:
        done = subprocess.run(
            [sys.executable, "-c", SHOW, name], env={**os.environ, **env}, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    expected = show(str(model))
    assert extra in expected[2]  # type: ignore[operator]
    with serve_model(model, "org/served") as (url, downloaded):
        assert show("org/served", HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home")) == expected
    assert "tokenizer.json" in downloaded and not any(name.endswith(".safetensors") for name in downloaded)
    assert show("org/served", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home")) == expected, (
        "the cache holds what was downloaded"
    )
