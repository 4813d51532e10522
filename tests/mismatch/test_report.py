"""`tokentrue diagnose` from the command line, on samples and a tiny model of our own; and the page it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tokentrue.cli.main import run
from tokentrue.samples import write_samples
from tokentrue.types import Certificate, Sample, Span

GIVEN = 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    return folder


def make_samples(model_dir: Path, noise: float, temperature: float = 1.0) -> list[Sample]:
    """Rollouts whose log-probabilities are the exact trainer's plus noise."""
    from transformers import AutoModelForCausalLM

    from tokentrue.numerics import score

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(8):
        ids = torch.randint(0, 97, (1, 14 + number), generator=generator)
        with torch.no_grad():
            values = score(model, ids, temperature=temperature)[0]
        values = (values.double() + noise * torch.randn(values.shape, generator=generator).double()).clamp(max=-1e-9)
        length = ids.shape[1]
        spans = (
            Span(start=0, end=GIVEN, kind="given", role="user", turn=0, policy_version=None, trainable=False, why="prompt"),
            Span(start=GIVEN, end=length, kind="sampled", role="assistant", turn=number % 2, policy_version=number // 4, trainable=True,
                 why="sampled"),
        )  # fmt: skip
        sample = Sample(
            sample_id=f"s{number}", session_id=f"s{number}", group=f"g{number // 4}", token_ids=ids[0].tolist(),
            loss_mask=[0] * GIVEN + [1] * (length - GIVEN), rollout_logprobs=[None] * GIVEN + values[GIVEN - 1 :].tolist(), spans=spans,
            reward=float(number % 2), finish_reason="stop",
            metadata={"tokentrue": {"nodes": [{"sampled": length - GIVEN, "temperature": temperature}]}},
            certificate=Certificate(chain="", template="", tokenizer=""),
        )  # fmt: skip
        found.append(sample)
    return found


def answers_of(page: Path) -> dict[str, Any]:
    """What the page holds: its report, its mismatch plots, and the sessions in order."""
    held = page.read_text(encoding="utf-8").partition('id="answers">')[2].partition("</script>")[0]
    answers = json.loads(held)
    sessions = [row["session_id"] for row in answers['["index","0"]']["sessions"]]
    return {"report": answers['["report"]'], "mismatch": answers['["mismatch"]'], "sessions": sessions}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_rollouts_are_found_exact(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: float) -> None:
    """The exact operators recompute every bit, also at the temperature that the samples say they were sampled at."""
    write_samples(make_samples(model_dir, 0.0, temperature), tmp_path / "s.jsonl")
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("exact: all 100 log-probabilities are equal")
    assert found["metrics"]["corr/k3"] == 0.0 and found["metrics"]["tokens"] == 100 and found["worst"] == []


def test_noise_is_measured_and_shown(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(make_samples(model_dir, 0.05), tmp_path / "s.jsonl")
    page = tmp_path / "out" / "report.html"
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), "--plain", "-o", str(page)]) == 0
    assert "K3 0.00" in capsys.readouterr().out
    found = answers_of(page)
    report = found["report"]
    assert [chart["title"] for chart in report["charts"]][:1] == ["K1 and K3 over steps"] and len(report["charts"]) == 4
    titles = [table["title"] for table in report["tables"]]
    assert titles[0] == "Ratio tails, raw and as applied" and titles[1].startswith("Contribution C(r)") and titles[2] == "Worst sequences"
    assert found["mismatch"]["tokens"] == 100 and sum(found["mismatch"]["histogram"]["count"]) == 100
    worst = report["tables"][2]["rows"][0][0]
    assert found["sessions"][0] == worst  # to be read first
    assert "default-src 'none'" in page.read_text()


def test_a_gap_above_the_limit_is_found_wrong(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = make_samples(model_dir, 0.0)
    write_samples(samples, tmp_path / "s.jsonl")
    lines = [{"sample_id": s.sample_id, "logprobs": [None if v is None else v - 1.0 for v in s.rollout_logprobs]} for s in samples[:-1]]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer-logprobs", str(tmp_path / "t.jsonl"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["delta/mean"] == pytest.approx(-1.0) and found["metrics"]["corr/k1"] == pytest.approx(1.0)
    assert found["facts"]["left out"].startswith("1 samples") and not found["ok"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([], "either --trainer MODEL or --trainer-logprobs"),
        (["--trainer", "/nonexistent"], "not a directory"),
        (["--trainer-logprobs", "missing.jsonl"], "no such file"),
        (["--trainer-logprobs", "bad.jsonl"], "bad.jsonl:1"),
        (["--trainer-logprobs", "short.jsonl"], "2 trainer log-probabilities for 14 tokens"),
        (["--trainer-logprobs", "none.jsonl"], "no sample has trained tokens"),
        (["--trainer-logprobs", "none.jsonl", "--correction", "nope"], "no preset 'nope'"),
    ],
)
def test_called_wrong(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, extra: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(make_samples(model_dir, 0.0)[:1], tmp_path / "s.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "short.jsonl").write_text('{"sample_id": "s0", "logprobs": [null, -1.0]}\n')
    assert run("diagnose", ["s.jsonl", *extra]) == 2
    assert words in capsys.readouterr().err


def test_a_page_of_one_exact_step(model_dir: Path, tmp_path: Path) -> None:
    write_samples(make_samples(model_dir, 0.0)[:1], tmp_path / "s.jsonl")
    page = tmp_path / "report.html"
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), "-o", str(page)]) == 0
    found = answers_of(page)
    assert found["report"]["charts"] == [] and found["mismatch"]["equal"] == found["mismatch"]["tokens"]
    assert "Worst sequences" not in [table["title"] for table in found["report"]["tables"]]
