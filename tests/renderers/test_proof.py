"""The proof at load: what it says, that it can fail, how it is kept, and what `verify` makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tests.renderers.talk import OWN, loaded
from tokentrue.cli.main import run
from tokentrue.renderers import Proof
from tokentrue.renderers import proof_cache as cache
from tokentrue.renderers.extending import splicer
from tokentrue.renderers.extending.splicer import Boundary, MarkedRender, Splicer
from tokentrue.renderers.prove import prove

BOUNDARIES = {
    ("qwen3-like", "user"): "\n<|im_start|>user\n",
    ("k2v3-like", "tool"): "\n<|im_start|>tool\n<tool_response>\n",
    ("real:qwen3", "tool"): "\n<|im_start|>user\n<tool_response>\n",
    ("real:glm-4.6", "user"): "\n",
    ("real:glm-4.6", "tool"): "\n<tool_response>\n",
    ("real:kimi-k2", "user"): "<|im_user|>user<|im_middle|>",
    ("real:deepseek-v3.1", "user"): "<｜User｜>",
}
STOPS = {
    "qwen3-like": ("<|im_end|>", "<|im_end|>"),
    "glm-like": ("<|user|>", "<|observation|>"),
    "harmony-like": ("<|return|>", "<|call|>"),
    "minimax-like": ("[e~[", "[e~["),
    "real:gpt-oss": ("<|return|>", "<|call|>"),
    "real:glm-4.6": ("<|user|>", "<|observation|>"),
    "real:kimi-k2": ("<|im_end|>", "<|im_end|>"),
    "real:deepseek-v3.1": ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "real:mistral-nemo": ("</s>", "</s>"),
}


@pytest.mark.parametrize("name", OWN)
def test_user_and_tool_are_proven(name: str) -> None:
    proof = loaded(name).proof
    assert proof.ok and proof.roles["user"] == proof.roles["tool"] == "proven"
    assert not [case for case in proof.cases if case.outcome == "wrong"]


@pytest.mark.parametrize(("name", "role"), BOUNDARIES)
def test_boundary_is_derived(name: str, role: str) -> None:
    assert loaded(name).proof.boundary[role] == BOUNDARIES[name, role]


@pytest.mark.parametrize("name", STOPS)
def test_stops_are_derived_per_kind_of_turn(name: str) -> None:
    proof = loaded(name).proof
    assert (*proof.stops["text"], *proof.stops["call"]) == STOPS[name]
    renderer = loaded(name)
    assert {renderer.codec.literals[text] for text in STOPS[name]} <= set(renderer.stop_token_ids)


def test_declared_stops_come_from_generation_config(tmp_path: Path) -> None:
    for path in parts.own_dir("qwen3-like").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    end = loaded("qwen3-like").codec.literals["<|endoftext|>"]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    renderer = tt.load_renderer(tmp_path)
    assert end in renderer.stop_token_ids and renderer.proof.stops["declared"][0] == "<|endoftext|>"


def _silent(role: str) -> str:
    return (
        "{% for m in messages %}{% if m.role != '" + role + "' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@pytest.mark.parametrize("role", ["tool", "system"])
def test_silence_is_not_consent(role: str) -> None:
    """A template that drops a role without raising is refused for it, and only for it."""
    proof = tt.load_renderer(parts.standin_dir(_silent(role))).proof
    assert proof.roles[role] == "refused" and "message_dropped" in proof.why[role] and proof.roles["user"] == "proven"


def test_hoisted_system_is_refused() -> None:
    text = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}" + _silent(
        "system"
    )
    assert "message_moved" in tt.load_renderer(parts.standin_dir(text)).proof.why["system"]


def test_a_template_that_ignores_tools_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    folder = parts.standin_dir(_silent("system"))
    assert (
        tt.load_renderer(folder).proof.tools == tt.load_renderer(folder).proof.tools == "ignored"
    )  # the second one is from the cache
    assert tt.load_renderer(parts.own_dir("qwen3-like")).proof.tools == "rendered"
    assert tt.verify(folder).to_json()["tools"] == "ignored"
    run("verify", [str(folder)])
    assert "the template ignores tools" in " ".join(capsys.readouterr().out.split())


def test_the_proof_cache_follows_code_and_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file of the package and any of the three libraries makes an older proof void."""
    real = cache.hash_code.__wrapped__
    before = real()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "0" if name == "tokenizers" else "1")
        assert real() != before
    package = tmp_path / "renderers"
    shutil.copytree(Path(cache.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "__file__", str(package / "proof_cache.py"))
    assert real() == before
    (package / "families" / "glm.py").write_text("# changed")
    assert real() != before


# mutations: the proof must notice


_render_tail = Splicer.render_tail


def _drop_newlines(self: Splicer, *args: Any) -> str:
    return _render_tail(self, *args).lstrip("\n")


def _cut_at_first_special(codec: Any, stops: Any, request: Any, render: MarkedRender) -> Boundary:
    literal, end = next((literal, end) for _, literal, end in codec.split(render.region) if literal)
    return Boundary(join="stop", gap=render.region[:end], literal=literal)


@pytest.mark.parametrize(
    ("owner", "function", "mutant", "name", "at_least"),
    [
        (Splicer, "render_tail", _drop_newlines, "qwen3-like", 16),
        (Splicer, "render_tail", _drop_newlines, "k2v3-like", 16),
        (Splicer, "render_tail", _drop_newlines, "minimax-like", 10),
        (splicer, "find_boundary", _cut_at_first_special, "harmony-like", 3),
        (splicer, "find_boundary", _cut_at_first_special, "kimi-like", 8),
    ],
)
def test_mutants_are_noticed(
    owner: Any, function: str, mutant: Any, name: str, at_least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boundary is dropped, or the first special token is taken for the stop: the proof says "wrong", and how
    often."""
    renderer = tt.load_renderer(parts.own_dir(name))
    monkeypatch.setattr(owner, function, mutant)
    wrong = [case for case in prove(renderer).cases if case.outcome == "wrong"]
    assert len(wrong) >= at_least


def test_what_depends_on_earlier_turns_is_named() -> None:
    counting = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ messages|length }}\n{% endif %}"
    )
    proof = tt.load_renderer(parts.standin_dir(counting)).proof
    assert proof.roles["user"] == "history"
    assert {case.outcome for case in proof.cases if case.shape == "text" and case.role == "user"} == {"proven"}


# kept between processes


def test_cache_is_used_and_survives_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = parts.own_dir("qwen3-like")
    first = tt.load_renderer(folder).proof
    proofs = [path for path in cache.find_directory().iterdir() if "roles" in path.read_text()]
    assert len(proofs) == 1 and not list(cache.find_directory().glob("*.tmp"))

    def never(*_: Any) -> Proof:
        raise AssertionError("proven again")

    with monkeypatch.context() as patch:
        patch.setattr("tokentrue.renderers.load.prove", never)
        assert tt.load_renderer(folder).proof == first
        with pytest.raises(RuntimeError, match="proven again"):
            tt.load_renderer(folder, template_kwargs={"x": 1})
    for damage in ("", "{", "[]", '{"key": "other"}'):
        proofs[0].write_text(damage)
        assert tt.load_renderer(folder).proof == first


def test_unwritable_cache_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tt.load_renderer(parts.own_dir("qwen3-like")).proof.ok


def test_hashes_follow_the_files(tmp_path: Path) -> None:
    for path in parts.own_dir("qwen3-like").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = tt.load_renderer(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(data, indent=1))
    second = tt.load_renderer(tmp_path)
    assert first.tokenizer_hash != second.tokenizer_hash and first.template_hash == second.template_hash
    assert all(text.startswith("sha256:") and len(text) == 71 for text in (first.tokenizer_hash, first.template_hash))
    assert first.template_hash != tt.load_renderer(tmp_path, chat_template=_silent("x")).template_hash


# verify


def test_verify_as_data() -> None:
    found = tt.verify(parts.own_dir("qwen3-like"))
    assert found.ok and found.roles["tool"] == "proven" and found.parse["two calls"] == "ok"
    data = json.loads(json.dumps(found.to_json()))
    assert {"ok", "roles", "why", "stops", "boundary", "rewrites", "cases"} <= data.keys()
    assert {case["outcome"] for case in data["cases"]} <= {"proven", "history", "refused", "unsupported"}


def test_verify_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(parts.own_dir("qwen3-like"))
    assert run("verify", [folder, "--json", "--set", "enable_thinking=false"]) == 0
    assert json.loads(capsys.readouterr().out)["roles"]["user"] == "proven"
    assert run("verify", [folder]) == 0
    assert "proven" in capsys.readouterr().out
    template = tmp_path / "silent.jinja"
    template.write_text(_silent("tool"))
    assert run("verify", [folder, "--template", str(template)]) == 1
    assert "drops new" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "arguments", [["/nonexistent"], ["FOLDER", "--template", "/nonexistent"], ["FOLDER", "--set", "novalue"], []]
)
def test_verify_called_wrong(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = str(parts.own_dir("qwen3-like"))
    assert run("verify", [folder if argument == "FOLDER" else argument for argument in arguments]) == 2
    assert "Traceback" not in capsys.readouterr().err
