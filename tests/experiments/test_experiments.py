"""Experiments: quick versions of every experiment as smoke tests, and the pieces that their claims rest on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import EXPERIMENTS, SOURCES, Arm, Scale, run_experiment
from experiments.arms import run_arm
from experiments.registry import module_of, select_arms, show_results
from experiments.rewriting import (
    RewrittenRounds,
    TranscribedSessions,
    compact,
    given_span,
    reencode,
    rerender,
    sampled_span,
    stringify,
)
from experiments.routing import routing_flips
from experiments.sources import quantise, rollout_weights
from tests.marks import slow_except
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError
from tokentrue.types import Certificate, Sample

pytestmark = pytest.mark.timeout(280)


@pytest.mark.parametrize("name", slow_except({"retokenize"}, EXPERIMENTS))
def test_quick_runs_end_with_a_table(name: str, tmp_path: Path) -> None:
    table = run_experiment(name, Scale(), quick=True, out=tmp_path)
    assert not [row for row in table.rows if "stopped" in row[0]]
    assert len(table.rows) == len(select_arms(module_of(name), quick=True, only=None))
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    assert saved["results"] and saved["machine"]
    assert (tmp_path / f"{name}.png").stat().st_size > 5_000
    for run in saved["results"]:
        if run["arm"].startswith("exact") or run["arm"] == "token-in, token-out":
            assert all(row["exact_differing"] == 0 and row["exact_compared"] > 0 for row in run["rows"])
        elif "int" in run["arm"] and run["rows"]:
            assert all(row["mismatch/delta_abs_mean"] > 1e-4 for row in run["rows"])


def test_runs_on_file_are_shown(tmp_path: Path) -> None:
    row = {"reward": 0.5, "update/grad_norm": 1.0, "mismatch/log_ppl_trainer": 0.1}
    run = {"arm": "text encoded again", "seed": 4, "before": 0.4, "after": 0.75, "seconds": 1.0, "rows": [row, row]}
    (tmp_path / "retokenize.runs.jsonl").write_text(json.dumps(run) + "\n")
    table = show_results("retokenize", out=tmp_path)
    assert table.rows == [["text encoded again", "0.75", "0.50", "0.100", "1.00"]]


def test_every_source_keeps_norms_and_errs_within_its_step() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    norm = torch.ones(64)
    for source in SOURCES:
        changed = dict(rollout_weights([("a.weight", weight), ("norm.weight", norm)], source))
        assert torch.equal(changed["norm.weight"], norm)
        assert torch.equal(changed["a.weight"], weight) == (source == "none")
    for bits in (3, 4, 8):
        step = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert bool(((quantise(weight, bits) - weight).abs() <= step / 2 + 1e-6).all())
        assert len(np.unique((quantise(weight, bits) / step).round().numpy())) <= 2**bits - 1


def recorded(renderer: object) -> Sample:
    """A conversation with a split that the tokenizer would not make: "1" + "2" for "12"."""
    from tokentrue.environments.word_problems import CALCULATOR

    question = {"role": "user", "content": "Tom has 7 pens. Tom gets 5 more. How many now?"}
    prompt = list(renderer.render([question], tools=[CALCULATOR]).token_ids)  # type: ignore[attr-defined]
    encode = renderer.encode_sampled  # type: ignore[attr-defined]
    said = [*encode("<think>\ndone\n</think>\n\nThe answer is "), *encode("1"), *encode("2"), *encode(".<|im_end|>")]
    spans = (given_span(0, len(prompt), 0), sampled_span(len(prompt), len(prompt) + len(said), 0, 0))
    answer = {"role": "assistant", "content": "The answer is 12.", "reasoning_content": "done"}
    return Sample(
        sample_id="s",
        session_id="s",
        group="g",
        token_ids=[*prompt, *said],
        loss_mask=[0] * len(prompt) + [1] * len(said),
        rollout_logprobs=[None] * len(prompt) + [-0.1] * len(said),
        spans=spans,
        reward=1.0,
        finish_reason="stop",
        metadata={"messages": [question, answer]},
        certificate=Certificate(chain="", template="", tokenizer=""),
    )


def test_what_a_round_trip_through_text_does_to_a_sample() -> None:
    from tokentrue.renderers import load_renderer

    renderer = load_renderer(str(SMALL_MODEL))
    sample = recorded(renderer)
    healed = reencode(sample, renderer)
    assert renderer.decode(healed.token_ids) == renderer.decode(sample.token_ids)
    assert len(healed.token_ids) == len(sample.token_ids) - 1, "the split was not healed"
    again = rerender(sample, renderer, lambda message: message)
    assert list(again.token_ids) == list(healed.token_ids) and list(again.loss_mask) == list(healed.loss_mask)
    dropped = rerender(sample, renderer, stringify)
    assert "done" not in renderer.decode(dropped.token_ids)
    assert sum(dropped.loss_mask) < sum(healed.loss_mask)


async def test_retold_samples_carry_the_engines_own_log_probabilities() -> None:
    """Nothing is invented for ids that nobody sampled: the engine is asked for them, and the trainer's operators give
    the same bits."""
    from transformers import AutoModelForCausalLM

    from experiments.arms import provider_for, rollout_config
    from experiments.local_sessions import LocalSessions
    from tokentrue.app.rollouts import RolloutRounds
    from tokentrue.numerics import score
    from tokentrue.renderers import load_renderer

    scale = Scale(groups=1, size=2)
    renderer, provider = load_renderer(str(SMALL_MODEL)), provider_for(Arm(name="a"), scale, at_once=4)
    config = rollout_config(scale, 0, horizon=None, tasks=1)
    sessions = TranscribedSessions(LocalSessions(renderer, provider, sampling=config.sampling))
    try:
        played = RewrittenRounds(RolloutRounds(config, sessions), "stringify", renderer=renderer, provider=provider)
        (group,) = await played.play(0)
    finally:
        await provider.close()
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
    for sample in group:
        with torch.no_grad():
            expected = score(model, torch.tensor([list(sample.token_ids)]))[0].tolist()
        for index, (mask, value) in enumerate(zip(sample.loss_mask, sample.rollout_logprobs, strict=True)):
            assert value == (expected[index - 1] if mask else None)


def save_mixture(folder: Path) -> None:
    """A random mixture with the shipped model's tokenizer."""
    import shutil

    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SMALL_MODEL / name, folder / name)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=659, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, eos_token_id=2,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True, tie_word_embeddings=True,
        initializer_range=0.3,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
def test_a_mixture_is_exact_through_training_and_its_routing_flips_with_other_weights(tmp_path: Path) -> None:
    """Made on the spot: engine and trainer agree in every bit over updates, and a rounded router chooses other
    experts."""
    from transformers import AutoModelForCausalLM

    save_mixture(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert routing_flips(model, model.named_parameters(), range(40)) == 0.0
    assert routing_flips(model, rollout_weights(model.named_parameters(), "int3"), range(40)) > 0.05
    scale = Scale(model=str(tmp_path), groups=2, size=2, steps=2, heldout=1)
    found = run_arm(Arm(name="mixture", loss="reinforce", baseline="none"), scale, seed=0)
    assert all(row["exact_compared"] > 50 and row["exact_differing"] == 0 for row in found["rows"])


@pytest.mark.slow
def test_replayed_experts_shrink_the_mismatch_of_a_mixture(tmp_path: Path) -> None:
    """int8 rollouts send tokens to other experts than the trainer's router; with the engine's choice replayed less is
    left."""
    from experiments.routing_replay import arms

    save_mixture(tmp_path / "small-moe")
    scale = Scale(model=str(tmp_path / "small"), groups=2, size=2, steps=1, heldout=1)
    found = {arm.name: run_arm(arm, scale, seed=0)["rows"][0] for arm in arms(quick=False) if "int8" in arm.name}
    own, replayed = found.values()
    assert own["routing_flips"] > 0.01
    assert replayed["mismatch/k3"] < own["mismatch/k3"]


@pytest.mark.slow
def test_an_unmerged_adapter_keeps_every_bit_and_a_merged_one_does_not() -> None:
    """Two steps, so that the adapter is not 0 any more. The engine is lent by a run that left other weights in it."""
    from experiments.arms import Engines
    from experiments.pretrained import arms

    pytest.importorskip("peft")
    scale, engines = Scale(groups=3, size=6, steps=2, heldout=1, lr=1e-4), Engines()
    run_arm(Arm(name="before", dtype="bfloat16"), scale, 0, engines)
    unmerged, merged = (run_arm(arm, scale, 0, engines)["rows"] for arm in arms(quick=False) if "adapter" in arm.name)
    assert all(row["exact_compared"] > 50 and row["exact_differing"] == 0 for row in unmerged)
    assert unmerged[0]["update/grad_norm"] > 0
    assert merged[0]["mismatch/delta_abs_mean"] == 0.0 < merged[1]["mismatch/delta_abs_mean"]


def test_nonsense_is_refused_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps"):
        Scale(steps=0)
    with pytest.raises(ConfigError, match="seeds"):
        Scale(seeds=())
    with pytest.raises(ConfigError, match="no model in"):
        run_arm(Arm(name="mixture", variant="moe"), Scale(model=str(tmp_path / "m")), seed=0)


@pytest.mark.slow
def test_all_experiments_by_a_deadline(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.run_all",
        "--tiny",
        "--device",
        "cpu",
        "--jobs",
        "2",
        "--deadline",
        "270",
    ]
    root = Path(__file__).parent.parent.parent
    subprocess.run(
        [*command, "--models", str(tmp_path / "m"), "--out", str(tmp_path / "out")], cwd=root, check=True, timeout=290
    )
    for name in EXPERIMENTS:
        table = show_results(name, out=tmp_path / "out")
        assert table.rows and not [row for row in table.rows if "stopped" in row[0]]


def test_compact_is_what_json_stringify_writes() -> None:
    assert compact('{"expression": "1 + 2", "n": [1, 2]}') == '{"expression":"1 + 2","n":[1,2]}'
    assert compact("not json") == "not json"


@pytest.mark.slow
def test_pretrained_arms_run_in_16_bit_and_a_forgotten_mask_shows(tmp_path: Path) -> None:
    """The shipped model stands in: an exact arm in bfloat16, and top-p with and without the kept ids."""
    from experiments.pretrained import arms

    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"Tom has {i} pens. Tom gets {i} more. How many now?", "answer": str(2 * i)}) + "\n"
                             for i in range(100)))  # fmt: skip
    scale = Scale(tasks=str(tasks), groups=2, size=4, steps=1, heldout=2, lr=1e-5, seeds=(0,), jobs=1)
    found = {
        arm.name: run_arm(arm, scale, 0)["rows"][0]
        for arm in arms(quick=False)
        if "GRPO, exact" in arm.name or "top-p" in arm.name
    }
    exact, replayed, dropped = found.values()
    assert exact["exact_compared"] > 0 and exact["exact_differing"] == 0 == exact["mismatch/delta_abs_mean"]
    assert (
        abs(replayed["mismatch/ratio_mean"] - 1) < 0.01
        and dropped["mismatch/ratio_mean"] < replayed["mismatch/ratio_mean"] - 0.01
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nothing"], "no experiment 'nothing'; choose one of retokenize"),
        (["run"], "run which experiment? one of retokenize"),
        (["run", "thresholds", "--device", "cuda:99"], "device: 'cuda:99' is not available"),
        (["show", "retokenize", "--out", "nowhere"], "no runs of retokenize in nowhere"),
    ],
)
def test_a_wrong_command_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments.__main__ import main

    monkeypatch.setattr(sys, "argv", ["experiments", *arguments])
    try:
        code = main()
    except SystemExit as left:
        code = left.code
    assert code == 2 and said in capsys.readouterr().err
