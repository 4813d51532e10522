"""The grid's own Llama against Hugging Face's, its exact engine, and its statistics."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from experiments.figures import MARKS, interval, judge, write_page
from experiments.grid import Bench, Question, Tasks, arms, choose_rates, compact, fp8, is_right, main_jobs
from experiments.llama import Cache, Shape, decode, flatten, forward, head, load_shape, rope_table, upcycle
from experiments.quick import find_trouble

TINY = Shape(
    width=32, layers=3, heads=2, cache_heads=1, head_width=16, inner=48, vocabulary=96, rope_base=1e4, epsilon=1e-5
)
ARMS = {arm.name: arm for arm in arms()}


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=48, vocab_size=96, rms_norm_eps=1e-5, tie_word_embeddings=True, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, initializer_range=0.2,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    return directory, LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_both_passes_equal_hugging_face(hugging_face: tuple[Path, torch.nn.Module]) -> None:
    directory, model = hugging_face
    shape = load_shape(directory, 96)
    assert shape == TINY
    weights = shape.views(flatten(shape, model.state_dict(), range(96)))
    ids, rope = torch.randint(0, 96, (3, 20)), rope_table(shape, 24, torch.device("cpu"))
    expected = model(ids).logits.log_softmax(-1)
    hidden, _ = forward(shape, weights, ids, rope)
    torch.testing.assert_close(head(hidden, weights), expected, atol=1e-5, rtol=0)
    cache = Cache(shape, 3, 24, dtype=torch.float32, device=torch.device("cpu"))
    forward(shape, weights, ids[:, :12], rope, cache=cache.write_prompt)
    for at in range(11, 19):
        hidden, _ = decode(shape, weights, ids[:, at], torch.full((3,), at), rope, cache, linear=F.linear)
        torch.testing.assert_close(head(hidden, weights), expected[:, at], atol=1e-5, rtol=0)


def make_bench() -> Bench:
    torch.manual_seed(1)
    start = torch.randn(TINY.size()) * 0.2
    for name, view in TINY.views(start).items():
        if "norm" in name:
            view.fill_(1.0)
    questions = [
        Question(kind="odd", prompt_ids=tuple(range(3, 8 + n)), answer="1") for n in range(6)
    ]  # a reply is right by its length alone: a random model needs rewards
    tasks = Tasks(train=questions, held_out=questions, decode=lambda ids: str(len(ids) % 2))
    return Bench(tasks, shape=TINY, start=start, device="cpu")


@pytest.mark.parametrize("name", ["exact: exact", "kernels: recompute + TIS", "mixture: bypass + replay"])
def test_only_the_exact_arm_has_the_trainers_bits(name: str) -> None:
    found = make_bench().run(ARMS[name], seed=0, lr=1e-3, steps=2, evaluate_every=1)
    assert len(found["held_out"]) == 3
    assert all(math.isfinite(row["reward"]) and row["compared"] > 0 for row in found["rows"])
    differing = sum(row["differing"] for row in found["rows"])
    assert (differing == 0) == (name == "exact: exact")


@pytest.mark.slow
def test_a_stale_engine_has_the_weights_of_four_batches_ago() -> None:
    found = make_bench().run(ARMS["stale: exact"], seed=0, lr=1e-3, steps=3)
    assert found["rows"][0]["differing"] == 0
    assert found["rows"][2]["delta"] > found["rows"][0]["delta"] == 0


def test_a_mixture_starts_near_its_dense_model() -> None:
    mixture = Shape(**{name: getattr(TINY, name) for name in TINY.__slots__ if name != "experts"}, experts=4)
    start = torch.randn(TINY.size()) * 0.1
    plain, made = TINY.views(start), mixture.views(upcycle(TINY, start, mixture, noise=0.0))
    ids, rope = torch.randint(0, 96, (2, 8)), rope_table(TINY, 8, torch.device("cpu"))
    a, _ = forward(TINY, plain, ids, rope)
    b, routed = forward(mixture, made, ids, rope)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert routed is not None and routed.shape == (1, 2, 8, 2)


def test_fp8_keeps_three_bits_of_mantissa() -> None:
    rounded = fp8(torch.tensor([[448.0, 17.0, 1.06, 0.0]]))
    assert rounded.tolist() == [[448.0, 16.0, 1.0, 0.0]]  # steps of 2 at 16, of 1/8 at 1; ties to even


def test_rewards() -> None:
    assert is_right("3 + 4 = 7.", "7")
    assert not is_right("7 or 8", "7")
    assert is_right("Nus", "nus")


def test_rates_are_chosen_on_held_out_reward() -> None:
    def run(lr: float, reward: float) -> dict[str, object]:
        held = [[0, 0.9], [25, reward]]
        return {
            "arm": "fp8: bypass",
            "lr": lr,
            "steps": 5,
            "asked": 5,
            "held_out": held,
            "curves": {"reward": [1 - reward]},
        }

    rates = choose_rates([run(1e-5, 0.4), run(3e-5, 0.2)])
    assert rates == {"bypass": 1e-5}
    jobs = main_jobs(rates, range(2), 5, {("fp8: bypass", 0, 1e-5, 5)})
    assert [job.seed for job in jobs if job.arm.name == "fp8: bypass"] == [1]


def test_curves_on_file_keep_sums_and_extremes() -> None:
    rows = [{"reward": n / 10, "lowest": -n, "differing": 2, "norm": n} for n in range(7)]
    made = compact({"arm": "a", "rows": rows, "held_out": [(0, {"x": 0.5})]})
    assert made["curves"] == {"reward": [0.2, 0.55], "lowest": [-4, -6], "differing": [10, 4], "norm": [4, 6]}


def test_intervals_and_verdicts() -> None:
    # scipy.stats.t.interval(0.95, 4, loc=mean, scale=sem) of these five: half width 1.9632
    assert interval([1, 2, 3, 4, 5]) == pytest.approx(1.9632, abs=1e-3)
    assert judge([0.1, 0.1, 0.1]) == "too few seeds (3)"
    assert judge([0.1, 0.12, 0.09, 0.11, 0.1]) == "difference"
    assert judge([0.1, 0.12, 0.09, 0.11, 0.1] * 2) == "significant"
    assert judge([0.3, -0.3, 0.2, -0.2, 0.1]) == "no difference shown"


def test_tables_go_between_their_marks() -> None:
    page = f"a\n{MARKS[0]}\nold\n{MARKS[1]}\nb"
    assert write_page(page, ["new"]) == f"a\n{MARKS[0]}\n\nnew\n\n{MARKS[1]}\nb"


def test_quick_says_what_cannot_run_before_it_starts(
    hugging_face: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    assert "there is no config.json" in find_trouble(tmp_path, on_gpu=False)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "there is no tokenizer.json" in find_trouble(tmp_path, on_gpu=False)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is a qwen3 model" in find_trouble(tmp_path, on_gpu=False)
    (tmp_path / "config.json").write_text((hugging_face[0] / "config.json").read_text())
    assert find_trouble(tmp_path, on_gpu=False) == ""
    if not torch.cuda.is_available():
        assert "--device cpu" in find_trouble(tmp_path, on_gpu=True)
