"""`tokentrue diagnose` from the command line, on samples and a tiny model of our own; and the page it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.viewer.world import build_store, store_samples
from tokentrue.app.libraries import DTYPES
from tokentrue.cli.diagnose import read_sealed
from tokentrue.cli.main import run
from tokentrue.ids import TokenIds
from tokentrue.samples import write_samples
from tokentrue.types import Certificate, Sample, SamplingMask, Span

GIVEN = 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
             "max_position_embeddings": 64}  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    return folder


def make_samples(model_dir: Path, noise: float, temperature: float = 1.0, *, top_k: int = 0) -> list[Sample]:
    """Rollouts whose log-probabilities are the exact trainer's plus noise. With `top_k`, over that many kept ids, which
    are recorded."""
    from transformers import AutoModelForCausalLM

    from tokentrue.numerics import KeptRows, score

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(8):
        ids = torch.randint(0, 97, (1, 14 + number), generator=generator)
        length = ids.shape[1]
        rows = [
            [] if i < GIVEN or not top_k else sorted({(int(ids[0, i]) + 7 * n) % 97 for n in range(top_k)})
            for i in range(length)
        ]
        offsets = torch.tensor([0, *(len(row) for row in rows[1:])]).cumsum(0)
        kept = KeptRows(
            token_ids=torch.tensor([one for row in rows for one in row], dtype=torch.int64), offsets=offsets
        )
        with torch.no_grad():
            values = score(model, ids, temperature=temperature, kept=kept if top_k else None)[0]
        values = (values.double() + noise * torch.randn(values.shape, generator=generator).double()).clamp(max=-1e-9)
        spans = (
            Span(start=0, end=GIVEN, kind="given", role="user", turn=0, policy_version=None, trainable=False,
                 why="prompt"),
            Span(start=GIVEN, end=length, kind="sampled", role="assistant", turn=number % 2,
                 policy_version=number // 4, trainable=True, why="sampled"),
        )  # fmt: skip
        sample = Sample(
            sample_id=f"s{number}", session_id=f"s{number}", group=f"g{number // 4}", token_ids=ids[0].tolist(),
            loss_mask=[0] * GIVEN + [1] * (length - GIVEN), spans=spans,
            rollout_logprobs=[None] * GIVEN + values[GIVEN - 1 :].tolist(),
            reward=float(number % 2), finish_reason="stop",
            metadata={"tokentrue": {"nodes": [
                {"given": GIVEN, "sampled": length - GIVEN, "temperature": temperature,
                 "sampling": {"top_k": top_k} if top_k else {}}
            ]}},
            sampling_mask=SamplingMask.from_rows(rows) if top_k else None,
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
def test_exact_rollouts_are_found_exact(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    """The exact operators recompute every bit, also at the temperature that the samples say they were sampled at."""
    write_samples(make_samples(model_dir, 0.0, temperature), tmp_path / "s.jsonl")
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("exact: all 100 log-probabilities are equal")
    assert found["metrics"]["corr/k3"] == 0.0 and found["metrics"]["tokens"] == 100 and found["worst"] == []


@pytest.mark.parametrize("correction", ["m2po", "deepseek_v3_2"])
def test_a_correction_that_needs_rewards_is_left_out_without_them(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], correction: str
) -> None:
    samples = make_samples(model_dir, 0.0)
    for rewards, shown in ((False, f"none: {correction} needs a reward for every sample"), (True, correction)):
        found = samples if rewards else [replace(sample, reward=None) for sample in samples]
        write_samples(found, tmp_path / "s.jsonl")
        options = ["--trainer", str(model_dir), "--correction", correction, "--json"]
        assert run("diagnose", [str(tmp_path / "s.jsonl"), *options]) == 0
        assert json.loads(capsys.readouterr().out)["facts"]["correction shown"] == shown


def test_noise_is_measured_and_shown(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(make_samples(model_dir, 0.05), tmp_path / "s.jsonl")
    page = tmp_path / "report.html"
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), "--plain", "-o", str(page)]) == 0
    assert "K3 0.00" in capsys.readouterr().out
    found = answers_of(page)
    report = found["report"]
    assert [chart["title"] for chart in report["charts"]][:1] == ["K1 and K3 over steps"] and len(report["charts"]) == 4
    assert [table["title"] for table in report["tables"]] == ["Training-inference mismatch", "Worst sequences"]
    assert found["mismatch"]["tokens"] == 100 and sum(found["mismatch"]["histogram"]["count"]) == 100
    worst = report["tables"][1]["rows"][0][0]
    assert found["sessions"][0] == worst  # to be read first
    assert "default-src 'none'" in page.read_text()


def test_a_page_shows_one_contribution(model_dir: Path, tmp_path: Path) -> None:
    """Its numbers and its plot have the same advantages: a session of three samples counts once, with its first
    sample's reward, and an uncompared sample counts in its group's baseline."""
    samples = [replace(s, session_id="several" if i < 3 else s.session_id, group="g" if i < 6 else None) for i, s in
               enumerate(make_samples(model_dir, 0.3))]  # fmt: skip
    samples[0] = replace(samples[0], reward=0.25)
    samples[5] = replace(samples[5], metadata={**samples[5].metadata, "advantage": -3.5})
    write_samples(samples, tmp_path / "s.jsonl")
    rows = [(s.sample_id, [None if v is None else min(0.0, v + (-1.0) ** i * (25 if i == 11 else 0.1))
                           for i, v in enumerate(s.rollout_logprobs)]) for s in samples[:4] + samples[5:]]  # fmt: skip
    given = write_logprobs(tmp_path / "t.jsonl", rows)
    page = tmp_path / "report.html"
    assert run("diagnose", [str(tmp_path / "s.jsonl"), *given, "-o", str(page)]) == 1
    found = answers_of(page)
    plot, numbers = found["mismatch"]["contribution"], dict(found["report"]["tables"][0]["rows"])
    for sign in ("positive", "negative"):
        label = f"skew of contributions, {sign} advantages (contribution/rollout/{sign}/skew)"
        assert numbers[label] == pytest.approx(plot[sign]["skew"], rel=1e-6)


def test_a_gap_above_the_limit_is_found_wrong(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = make_samples(model_dir, 0.0)
    write_samples(samples, tmp_path / "s.jsonl")
    lines = [
        {"sample_id": s.sample_id, "logprobs": [None if v is None else v - 1.0 for v in s.rollout_logprobs]}
        for s in samples[:-1]
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer-logprobs", str(tmp_path / "t.jsonl"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["delta/mean"] == pytest.approx(-1.0) and found["metrics"]["corr/k1"] == pytest.approx(1.0)
    assert found["facts"]["left out"].startswith("1 sample ") and not found["ok"]


@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_filtered_samples_are_scored_over_their_kept_ids(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], plain: list[str]
) -> None:
    """Turns of two temperatures too: each is scored at its own."""
    samples = [*make_samples(model_dir, 0.0, 1.3, top_k=4), *(rename(s) for s in make_samples(model_dir, 0.0, 0.7))]
    write_samples(samples, tmp_path / "s.jsonl")
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), "--json", *plain]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compared"]["samples"] == found["compared"]["samples_in_file"] == 16
    assert (found["verdict"].startswith("exact: all 200") or bool(plain)) and found["metrics"]["delta/abs_mean"] < 1e-6


def rename(sample: Sample) -> Sample:
    return replace(sample, sample_id=f"{sample.sample_id}-b", session_id=f"{sample.session_id}-b")


def test_turns_of_one_sample_may_have_different_temperatures(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hot, cold = make_samples(model_dir, 0.0, 1.3)[0], make_samples(model_dir, 0.0, 0.7)[0]
    half = GIVEN + 4
    nodes = [
        {"given": GIVEN, "sampled": 4, "temperature": 1.3},
        {"given": 0, "sampled": len(hot.token_ids) - half, "temperature": 0.7},
    ]
    logprobs = [*hot.rollout_logprobs[:half], *cold.rollout_logprobs[half:]]
    write_samples(
        [replace(hot, rollout_logprobs=logprobs, metadata={"tokentrue": {"nodes": nodes}})], tmp_path / "s.jsonl"
    )
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir)]) == 0
    assert "exact: all 9 log-probabilities are equal" in capsys.readouterr().out


def test_a_filter_without_kept_ids_is_said_and_accuses_nobody(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filtered = [rename(replace(sample, sampling_mask=None)) for sample in make_samples(model_dir, 0.0, top_k=4)]
    write_samples([*filtered, *make_samples(model_dir, 0.0)], tmp_path / "s.jsonl")
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "compared 100 of 200 trained tokens, 8 of 16 samples" in said
    assert "not scored: 8 samples" in said and "did not report which ids were kept" in said
    write_samples(filtered, tmp_path / "s.jsonl")
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir)]) == 2
    assert "sampled under top_k, and the engine did not report which ids were kept" in capsys.readouterr().err


def write_logprobs(path: Path, rows: Sequence[tuple[str, Sequence[float | None]]]) -> list[str]:
    path.write_text("".join(json.dumps({"sample_id": name, "logprobs": list(values)}) + "\n" for name, values in rows))
    return ["--trainer-logprobs", str(path)]


def test_the_verdict_says_how_little_was_compared(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = make_samples(model_dir, 0.0)
    write_samples(samples, tmp_path / "s.jsonl")
    few = [value if i == GIVEN else None for i, value in enumerate(samples[0].rollout_logprobs)]
    given = write_logprobs(tmp_path / "t.jsonl", [(samples[0].sample_id, few)])
    page = tmp_path / "report.html"
    assert run("diagnose", [str(tmp_path / "s.jsonl"), *given, "-o", str(page)]) == 0
    assert page.read_text().partition("argmax flips (flips)")[2][:6] == '","-"]'
    said = capsys.readouterr().out
    assert "exact: all 1 log-probabilities are equal; compared 1 of 100 trained tokens, 1 of 8 samples" in " ".join(
        said.split()
    )
    (flips,) = [line for line in said.splitlines() if "flips" in line]
    assert flips.split("│")[2].strip() == "-"  # nobody knows an argmax here
    assert run("diagnose", [str(tmp_path / "s.jsonl"), *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["flips"] is None
    assert found["compared"] == {"samples": 1, "samples_in_file": 8, "trained_tokens": 1, "trained_tokens_in_file": 100}
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), "--plain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["flips"] is not None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            lambda row: [("s0", [None, *([0.5] * (len(row) - 1))])],
            "t.jsonl:1: token 1: the log-probability 0.5 is above 0",
        ),
        (lambda row: [("s0", row), ("s1", row), ("s0", row)], "t.jsonl:3: sample_id 's0' is also in line 1"),
        (
            lambda row: [("s0", [*row[:-1], float("nan")])],
            "t.jsonl:1: token 13: the log-probability nan is not finite; write null",
        ),
        (
            lambda row: [("s0", [*row[:-1], float("-inf")])],
            "t.jsonl:1: token 13: the log-probability -inf is not finite; write null",
        ),
        (
            lambda row: [("s0", ["-1.0"] * len(row))],
            "t.jsonl:1: Expected `float | null`, got `str` - at `$.logprobs[0]`",
        ),
        (lambda row: [(3, row)], "t.jsonl:1: Expected `str`, got `float` - at `$.sample_id`"),
    ],
)
def test_log_probabilities_that_are_none_are_refused_by_row(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: Any, words: str
) -> None:
    samples = make_samples(model_dir, 0.0)
    write_samples(samples, tmp_path / "s.jsonl")
    given = write_logprobs(tmp_path / "t.jsonl", changed(list(samples[0].rollout_logprobs)))
    assert run("diagnose", [str(tmp_path / "s.jsonl"), *given]) == 2
    said = capsys.readouterr().err
    assert words in said and "Correction" not in said


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([], "either --trainer MODEL or --trainer-logprobs"),
        (["--trainer", "/nonexistent"], "--trainer: there is no directory '/nonexistent'"),
        (["--trainer-logprobs", "missing.jsonl"], "no such file"),
        (["--trainer-logprobs", "bad.jsonl"], "bad.jsonl:1"),
        (["--trainer-logprobs", "short.jsonl"], "2 trainer log-probabilities for 14 tokens"),
        (["--trainer-logprobs", "none.jsonl"], "no sample has trained tokens"),
        (["--trainer-logprobs", "none.jsonl", "--correction", "nope"], "no preset 'nope'"),
        (["--trainer-logprobs", "none.jsonl", "--max-k3", "nan"], "'--max-k3': Input should be greater"),
        (["--trainer-logprobs", "binary.jsonl"], "cannot be read as UTF-8"),
        (["--trainer", "MODEL", "--device", "bogus"], "device: 'bogus' is not supported; use cpu, cuda or cuda:N"),
        (["--trainer", "MODEL", "--dtype", "float64"], "dtype: 'float64' is not one of float32, bfloat16, float16"),
        (["--trainer", "MODEL", "--device", "cuda:97"], "device: 'cuda:97' is not available"),
    ],
)
def test_called_wrong(
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(make_samples(model_dir, 0.0)[:1], tmp_path / "s.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short.jsonl").write_text('{"sample_id": "s0", "logprobs": [null, -1.0]}\n')
    assert run("diagnose", ["s.jsonl", *(str(model_dir) if one == "MODEL" else one for one in extra)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("field", ["session_id", "sample_id", "group"])
def test_a_name_that_utf8_cannot_hold_is_shown_and_refused_for_a_page(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    odd: Any = {field: "odd\ud800"}
    path, page = tmp_path / "s.jsonl", tmp_path / "page.html"
    write_samples([replace(sample, **odd) for sample in make_samples(model_dir, 0.1)[:1]], path)
    assert run("diagnose", [str(path), "--trainer", str(model_dir)]) in {0, 1}
    said = capsys.readouterr().out
    assert field != "sample_id" or "worst: odd\\ud800" in said
    monkeypatch.setattr(
        "tokentrue.cli.diagnose.load_scorer", lambda *_, **__: pytest.fail("it is refused before any scoring")
    )
    assert run("diagnose", [str(path), "--trainer", str(model_dir), "-o", str(page)]) == 2
    said = capsys.readouterr().err
    assert f"{field} 'odd\\ud800' holds a lone surrogate" in said and said.count("\n") == 1 and not page.exists()


def test_text_that_utf8_cannot_hold_is_in_the_page_as_an_escape(model_dir: Path, tmp_path: Path) -> None:
    path, page = tmp_path / "s.jsonl", tmp_path / "page.html"
    (sample,) = make_samples(model_dir, 0.0)[:1]
    write_samples(
        [replace(sample, metadata={**sample.metadata, "said": "cut \udcc3, née, \u2028", "long": 10**30})], path
    )
    assert run("diagnose", [str(path), "--trainer", str(model_dir), "-o", str(page)]) == 0
    held = page.read_text(encoding="utf-8").partition('id="answers">')[2].partition("</script>")[0]
    assert json.loads(held)['["session","s0"]']["metadata"] == {"said": "cut \udcc3, née, \u2028", "long": 10**30}


def test_odd_metadata_of_other_programs_is_no_internal_error(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, scores = tmp_path / "s.jsonl", tmp_path / "scores.jsonl"
    (sample, *_) = make_samples(model_dir, 0.0)
    write_logprobs(scores, [(sample.sample_id, sample.rollout_logprobs)])
    asked = [str(path), "--trainer-logprobs", str(scores)]
    for name, value in (("step", "--5"), ("step", "²"), ("step", "9" * 5000), ("advantage", 10**400)):
        write_samples([replace(sample, metadata={**sample.metadata, name: value})], path)
        assert run("diagnose", asked) == 0, name
    for record in (None, 3, "seal", ["seal"]):
        write_samples([replace(sample, metadata={"tokentrue": record})], path)
        assert run("diagnose", asked) == 2, record
        assert "metadata.tokentrue" in capsys.readouterr().err


def test_a_sample_that_was_changed_after_it_was_sealed_is_refused(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_sample = next(iter(store_samples(build_store(tmp_path / "runs.sqlite"))))
    path = tmp_path / "s.jsonl"
    write_samples([store_sample], path)
    assert [sample.sample_id for sample in read_sealed(path, None)] == [store_sample.sample_id]
    write_samples([replace(store_sample, reward=0.75)], path)
    assert run("diagnose", [str(path), "--trainer", str(model_dir)]) == 2
    said = capsys.readouterr().err
    assert "the seal is broken" in said and f"`tokentrue audit {path}` lists all" in said and said.count("\n") == 1


def test_kept_ids_beyond_the_vocabulary_are_refused(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sample,) = make_samples(model_dir, 0.0, top_k=3)[:1]
    assert sample.sampling_mask is not None
    mask = replace(sample.sampling_mask, token_ids=TokenIds([*sample.sampling_mask.token_ids[:-1], 97]))
    write_samples([replace(sample, sampling_mask=mask)], tmp_path / "s.jsonl")
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir)]) == 2
    assert "sample s0 holds token id 97, beyond the vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_the_other_commands_is_taken(model_dir: Path, tmp_path: Path, dtype: str) -> None:
    write_samples(make_samples(model_dir, 0.0)[:2], tmp_path / "s.jsonl")
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), "--dtype", dtype]) == 0


def test_a_page_of_one_exact_step(model_dir: Path, tmp_path: Path) -> None:
    write_samples(make_samples(model_dir, 0.0)[:1], tmp_path / "s.jsonl")
    page = tmp_path / "report.html"
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), "-o", str(page)]) == 0
    found = answers_of(page)
    assert found["report"]["charts"] == [] and found["mismatch"]["equal"] == found["mismatch"]["tokens"]
    assert "Worst sequences" not in [table["title"] for table in found["report"]["tables"]]


def test_samples_are_scored_together_and_kept(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward pass for eight short samples; the file it leaves says the same to a second `diagnose`."""
    from tokentrue.train.scoring import ExactScorer

    passes: list[int] = []
    score = ExactScorer.__call__

    def counted(self: ExactScorer, model: Any, rows: Any, **options: Any) -> Any:
        passes.append(len(rows))
        return score(self, model, rows, **options)

    monkeypatch.setattr(ExactScorer, "__call__", counted)
    samples = make_samples(model_dir, 0.05)
    write_samples(samples, tmp_path / "s.jsonl")
    kept = tmp_path / "trainer.jsonl"
    options = ["--trainer", str(model_dir), "--write-logprobs", str(kept), "--json"]
    assert run("diagnose", [str(tmp_path / "s.jsonl"), *options]) == 0
    first = json.loads(capsys.readouterr().out)
    assert passes == [len(samples)]
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer-logprobs", str(kept), "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert first["metrics"]["corr/k3"] == second["metrics"]["corr/k3"] > 0
    assert first["verdict"].startswith("OK: K3 ") and "<= 0.015 (--max-k3)" in first["verdict"]
    assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer-logprobs", str(kept), "--write-logprobs", "x"]) == 2
    assert "give --trainer MODEL" in capsys.readouterr().err


def test_a_failure_says_the_bound_and_the_likely_reason(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of versions 0 and 1 against one model; then those of version 0, sampled by other weights."""
    monkeypatch.setenv("COLUMNS", "300")  # one line for the verdict, whatever the terminal
    samples = make_samples(model_dir, 0.0)
    noisy = make_samples(model_dir, 0.5)
    write_samples([*samples[:4], *noisy[4:]], tmp_path / "s.jsonl")
    for extra, code, said in (
        ([], 1, "policy versions 0 to 1 sampled, the trainer has the weights of one; --policy-version N"),
        (["--policy-version", "0"], 0, "exact: all 42 log-probabilities are equal\n"),
        (["--policy-version", "1"], 1, "are these the weights, template and tokenizer that sampled?"),
        (["--policy-version", "7"], 2, "no sample of policy version 7; versions in the file: 0, 1"),
    ):
        assert run("diagnose", [str(tmp_path / "s.jsonl"), "--trainer", str(model_dir), *extra]) == code
        found = capsys.readouterr()
        assert said in found.out + found.err
        assert code != 1 or (" > 0.015 (--max-k3)" in found.out and "FAIL: K3 0." in found.out)
