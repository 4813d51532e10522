"""The grid's own Llama against Hugging Face's, its exact engine, and its statistics."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.figures import (
    DOCS,
    MARKS,
    complete_runs,
    draw_curves,
    has_fallen,
    holm,
    interval,
    judge,
    p_value,
    show_mean,
    table_of_arms,
    table_of_contrasts,
    write_page,
)  # fmt: skip
from experiments.grid import (
    DATA,
    GROUPS,
    ROWS,
    SIZE,
    Bench,
    Engine,
    Job,
    Question,
    Tasks,
    Trainer,
    arms,
    choose_rates,
    compact,
    fp8,
    is_right,
    late,
    main_jobs,
    make_batches,
    measure,
    read_runs,
    real_fp8_linear,
    round_rows,
    run_jobs,
    score,
    tuning_jobs,
)  # fmt: skip
from experiments.llama import (
    Cache,
    Shape,
    causal_bias,
    decode,
    flatten,
    forward,
    head,
    linear,
    load_shape,
    rope_table,
    upcycle,
)
from experiments.quick import ARMS as ARMS_OF_QUICK
from experiments.quick import find_trouble
from tokentrue.mismatch import policy_loss

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


def run_plain(shape: Shape, weights: dict[str, torch.Tensor], ids: torch.Tensor, **options: object):
    rope = rope_table(shape, 64, torch.device("cpu"))
    positions = torch.arange(ids.shape[2]).expand_as(ids)
    return forward(shape, weights, ids, positions, causal_bias(ids, weights["norm"].dtype), rope, **options)


@torch.no_grad()
def test_both_passes_equal_hugging_face(hugging_face: tuple[Path, torch.nn.Module]) -> None:
    directory, model = hugging_face
    shape = load_shape(directory, 96)
    assert shape == TINY
    theirs = flatten(shape, model.state_dict(), range(96))
    weights = shape.views(torch.stack([torch.randn_like(theirs), theirs]))  # beside a run with other weights
    ids, rope = torch.randint(0, 96, (2, 3, 20)), rope_table(shape, 24, torch.device("cpu"))
    expected = model(ids[1]).logits.log_softmax(-1)
    hidden, _ = run_plain(shape, weights, ids)
    torch.testing.assert_close(head(hidden, weights)[1], expected, atol=1e-5, rtol=0)
    cache = Cache(shape, 6, 24, dtype=torch.float32, device=torch.device("cpu"))
    run_plain(shape, weights, ids[:, :, :12], cache=cache.write_prompt)
    for at in range(11, 19):
        hidden, _ = decode(shape, weights, ids[:, :, at], torch.full((2, 3), at), rope, cache)
        torch.testing.assert_close(head(hidden, weights)[1], expected[:, at], atol=1e-5, rtol=0)


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
    return Bench(tasks=tasks, shape=TINY, start=start, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "name",
    ["exact: exact", "mixture: exact", "kernels: recompute + TIS", "real fp8: bypass", "mixture: bypass + replay"],
)
def test_only_the_exact_arm_has_the_trainers_bits(name: str) -> None:
    jobs = [Job(arm=ARMS[name], seed=seed, lr=1e-3) for seed in range(2)]
    for found in make_bench().run(jobs, steps=2, evaluate_every=1):
        assert len(found["held_out"]) == 3
        assert all(math.isfinite(row["reward"]) and row["compared"] > 0 for row in found["rows"])
        differing = sum(row["differing"] for row in found["rows"])
        assert (differing == 0) == name.endswith(": exact")


def test_batches_are_filed_as_they_end_and_not_begun_past_the_deadline(tmp_path: Path) -> None:
    jobs, file = [Job(arm=ARMS["kernels: bypass"], seed=0, lr=1e-3)], tmp_path / "new" / "grid.jsonl"
    run_jobs(make_bench(), jobs, file, steps=1, at_once=2, until=-math.inf)
    assert read_runs(file) == []
    run_jobs(make_bench(), jobs * 2, file, steps=1, at_once=1, until=math.inf)
    assert [run["seed"] for run in read_runs(file)] == [0, 0]


@pytest.mark.slow
def test_a_stale_engine_has_the_weights_of_four_batches_ago() -> None:
    (found,) = make_bench().run([Job(arm=ARMS["stale: exact"], seed=0, lr=1e-3)], steps=3)
    assert found["rows"][0]["differing"] == 0
    assert found["rows"][2]["delta"] > found["rows"][0]["delta"] == 0


@pytest.mark.parametrize("method", ["bypass", "recompute + TIS", "MIS", "score centering", "policy gradient"])
def test_a_run_of_a_batch_takes_the_steps_it_would_take_alone(method: str) -> None:
    """Against plain autograd and torch's AdamW, in float32, beside runs of other methods and rates."""
    bench, arm = make_bench(), ARMS[f"kernels: {method}"]
    jobs = [Job(arm=ARMS["kernels: bypass + TIS"], seed=1, lr=1e-2), Job(arm=arm, seed=0, lr=1e-3)]
    trainer = Trainer(TINY, bench.start, jobs, device=torch.device("cpu"))
    trainer.flat = trainer.master.clone()
    trainer.weights = {name: view.detach().requires_grad_() for name, view in TINY.views(trainer.flat).items()}
    torch.manual_seed(3)
    engine = Engine(TINY, "kernels", trainer.flat.clone(), groups=GROUPS, copies=SIZE)
    questions = bench.tasks.train[:GROUPS]
    rollout = engine.generate([questions] * 2)
    prompts = [torch.tensor(q.prompt_ids) for q in questions for _ in range(SIZE)]
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.cat(parts) for parts in zip(prompts, rollout.sampled_SBA[1], strict=True)], batch_first=True
    )  # every answer with a prompt of its own
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    rollout.logprobs_SBA += 0.3 * torch.randn_like(rollout.logprobs_SBA)  # ratios that weights cut off
    rewards = torch.rand(2, ROWS).round()
    trainer.train(rollout, rewards)

    flat = bench.start.clone()[None].requires_grad_()
    optimiser = torch.optim.AdamW([flat], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    groups = rewards[1].view(GROUPS, SIZE)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()

    def score_rows(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        weights = TINY.views(flat)
        hidden, _ = run_plain(TINY, weights, ids[None, rows])
        at = last[rows, None] + torch.arange(16)
        table = head(hidden, weights)[0][torch.arange(len(at))[:, None], at]
        sampled = ids[rows].gather(1, at + 1)
        return table.gather(2, sampled[..., None])[..., 0], table.gather(2, rollout.head_ids_SBAK[1, rows])

    cuts = [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)]
    old = [score_rows(rows)[0].detach() for rows in cuts]
    for number, rows in enumerate(cuts):
        current, likely = score_rows(rows)
        extra = {}
        if method == "score centering":
            extra = {"head_logprobs": likely, "rollout_head_logprobs": rollout.head_logprobs_SBAK[1, rows]}
        loss, _ = policy_loss(
            current, old[number], rollout.logprobs_SBA[1, rows], advantages[rows], rollout.mask_SBA[1, rows],
            replace(arm.config, aggregate="token_mean"), **extra,
        )  # fmt: skip
        if method == "policy gradient":  # no ratio, no clip, no weights: its formula
            kept = rollout.mask_SBA[1, rows]
            loss = -(advantages[rows, None] * current)[kept].sum() / kept.sum()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([flat], 1.0)
        optimiser.param_groups[0]["lr"] = 1e-3 * (number + 1) / 10
        optimiser.step()
    for mine, theirs, tolerance in (
        (trainer.first[1], optimiser.state[flat]["exp_avg"][0], 1e-3),
        (trainer.master[1] - bench.start, flat.detach()[0] - bench.start, 5e-2),  # gradients near 0: a sign decides
    ):
        assert theirs.norm() > 0 and (mine - theirs).norm() < tolerance * theirs.norm()


def test_a_run_without_gradient_keeps_its_weights() -> None:
    jobs = [Job(arm=ARMS["kernels: bypass"], seed=seed, lr=1e-3) for seed in range(2)]
    trainer = Trainer(TINY, make_bench().start, jobs, device=torch.device("cpu"))
    before = trainer.master.clone()
    trainer.gradient[1].normal_()
    trainer.update()
    assert torch.equal(trainer.master[0], before[0]) and not torch.equal(trainer.master[1], before[1])


def test_measures_are_of_each_runs_valid_tokens() -> None:
    trainer, sampled = torch.full((2, 1, 3), -1.0), torch.tensor([[[-1.0, -1.5, 9.0]], [[-1.0, -1.0, -1.0]]])
    mask = torch.tensor([[[True, True, False]], [[True, True, True]]])
    first, second = measure(trainer, sampled, mask)
    ratio = math.exp(0.5)
    assert first["delta"] == pytest.approx(0.25) and first["k3"] == pytest.approx((ratio - 1.5) / 2)
    assert first["ess"] == pytest.approx((1 + ratio) ** 2 / (1 + ratio**2) / 2)
    assert (first["differing"], first["compared"]) == (1, 2)
    assert (second["delta"], second["ess"], second["differing"], second["compared"]) == (0, 1, 0, 3)


def test_a_mixture_starts_near_its_dense_model() -> None:
    mixture = Shape(**{name: getattr(TINY, name) for name in TINY.__slots__ if name != "experts"}, experts=4)
    start = torch.randn(TINY.size()) * 0.1
    plain, made = TINY.views(start[None]), mixture.views(upcycle(TINY, start, mixture, noise=0.0)[None])
    ids = torch.randint(0, 96, (1, 2, 8))
    a, _ = run_plain(TINY, plain, ids)
    b, routed = run_plain(mixture, made, ids)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert routed is not None and routed.shape == (1, 1, 2, 8, 2)


def test_fp8_keeps_three_bits_of_mantissa() -> None:
    rounded = fp8(torch.tensor([[448.0, 17.0, 1.06, 0.0]]))
    assert rounded.tolist() == [[448.0, 16.0, 1.0, 0.0]]  # steps of 2 at 16, of 1/8 at 1; ties to even


def test_real_fp8_products_are_those_of_the_rounded_numbers() -> None:
    """Against float64 products of the numbers that e4m3 and its scales hold, a run at a time."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, 5, 32) * 7, torch.randn(3, 48, 32) * 0.1
    rounded = round_rows(weight)
    assert rounded.values.dtype == torch.float8_e4m3fn
    found = real_fp8_linear(x, rounded)
    for run in range(3):
        a, b = (values.double() * scales.double() for values, scales in (round_rows(x[run]), round_rows(weight[run])))
        torch.testing.assert_close(found[run].double(), a @ b.T, atol=1e-4, rtol=1e-5)
    plain = linear(x, weight)
    assert 0.01 < (found - plain).norm() / plain.norm() < 0.1


@torch.no_grad()
def test_both_fp8_engines_follow_the_weights_they_load() -> None:
    bench = make_bench()
    first, second = bench.start[None].clone(), bench.start.flip(0)[None].clone()
    for flat in (first, second):
        TINY.views(flat)["norm"].fill_(1.0)
    questions, found = [bench.tasks.train[:GROUPS]], {}
    for kind in ("kernels", "fp8", "real fp8"):
        engine = Engine(TINY, kind, first.clone(), groups=GROUPS, copies=1)
        engine.load(first)
        before = engine.generate(questions, greedy=True).logprobs_SBA
        where = [weight.data_ptr() for weight in engine.weights["0.qkv"]] if kind == "real fp8" else []
        engine.load(second)
        assert where == [weight.data_ptr() for weight in engine.weights["0.qkv"]][: len(where)]  # graphs keep reading
        rollout = engine.generate(questions, greedy=True)
        assert (rollout.logprobs_SBA - before).abs().max() > 0.1
        # First tokens: later ones follow other choices.
        found[kind] = torch.stack([before[..., 0], rollout.logprobs_SBA[..., 0]])
    torch.testing.assert_close(found["fp8"], found["real fp8"], atol=1e-4, rtol=0)
    assert (found["fp8"] - found["kernels"]).abs().max() > 1e-3


@torch.no_grad()
def test_only_a_replaying_trainer_takes_the_engines_experts() -> None:
    bench, shape = make_bench(), replace(TINY, experts=4)
    start = upcycle(TINY, bench.start, shape, noise=1.0)
    for name in ("mixture: bypass", "mixture: bypass + replay"):
        trainer = Trainer(shape, start, [Job(arm=ARMS[name], seed=0, lr=1e-3)], device=torch.device("cpu"))
        engine = Engine(shape, "kernels", trainer.flat, groups=GROUPS, copies=SIZE)
        rollout = engine.generate([bench.tasks.train[:GROUPS]])
        assert rollout.routed is not None
        rollout.routed = (rollout.routed + 1) % 4  # experts that the router did not choose
        for groups in trainer.cuts:
            rows = slice(groups.start * SIZE, groups.stop * SIZE)
            sampled = rollout.sampled_SBA[:, rows]
            given = (shape, trainer.weights, rollout.prompts_SGP[:, groups], rollout.lengths_SG[:, groups], sampled)
            own, engines = (
                score(*given, trainer.rope, routed).gather(3, sampled[..., None])[..., 0]
                for routed in (None, rollout.routed[:, :, groups])
            )
            assert (own - engines).abs().max() > 0.1
            scored, _ = trainer.score(rollout, groups)
            assert torch.equal(scored, engines if name.endswith("replay") else own)


def test_rewards() -> None:
    assert is_right("3 + 4 = 7.", "7")
    assert not is_right("7 or 8", "7")
    assert is_right("Nus", "nus")


def test_rates_are_chosen_on_held_out_reward_of_other_seeds() -> None:
    def run(lr: float, reward: float) -> dict[str, object]:
        return {"arm": "kernels: bypass", "lr": lr, "held_out": [[0, 0.9], [25, reward]]}

    rates = choose_rates([run(1e-5, 0.4), run(3e-5, 0.2)])
    assert rates == {"kernels: bypass": 1e-5}
    jobs = main_jobs(rates, range(2), {("kernels: bypass", 0)})
    assert [job.seed for job in jobs if job.arm.name == "kernels: bypass"] == [1]
    assert {job.lr for job in jobs if job.arm.name == "kv8: bypass"} == {1e-5}  # not tuned: the method's
    assert not {job.seed for job in tuning_jobs()} & set(range(100))


def test_batches_hold_one_program() -> None:
    batches = make_batches(main_jobs({}, range(3), set()), 8)
    assert all(len(batch) <= 8 and len({job.program for job in batch}) == 1 for batch in batches)
    assert sum(map(len, batches)) == 3 * len(arms())


def test_curves_on_file_keep_sums_and_extremes() -> None:
    rows = [{"reward": n / 10, "lowest": -n, "differing": 2, "norm": n} for n in range(12)]
    made = compact({"arm": "a", "rows": rows, "held_out": [(0, {"x": 0.5})]})
    assert made["curves"] == {"reward": [0.45, 1.05], "lowest": [-9, -11], "differing": [20, 4], "norm": [9, 11]}


def test_intervals_and_verdicts() -> None:
    # scipy.stats.t.interval(0.95, 4, loc=mean, scale=sem) of these five: half width 1.9632
    assert interval([1, 2, 3, 4, 5]) == pytest.approx(1.9632, abs=1e-3)
    for values in ([1, 2, 3, 4, 5], [0.3, -0.3, 0.2, -0.2, 0.1]):  # four degrees of freedom have a closed form
        t = statistics.fmean(values) / statistics.stdev(values) * math.sqrt(5)
        scaled = 1 + t * t / 4
        expected = 1 - 0.75 * t / math.sqrt(scaled) * (1 - t * t / (12 * scaled))
        assert p_value(values) == pytest.approx(expected, abs=1e-6)
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert judge([0.1, 0.1, 0.1], 0.0) == "too few seeds (3)"
    assert judge([0.1, 0.12, 0.09, 0.11, 0.1], 0.0) == "difference"
    assert judge([0.1, 0.12, 0.09, 0.11, 0.1] * 2, 0.01) == "significant"
    assert judge([0.1, 0.12, 0.09, 0.11, 0.1] * 2, 0.2) == "difference"
    assert judge([0.3, -0.3, 0.2, -0.2, 0.1], 0.0) == "no difference shown"


def test_a_run_has_fallen_by_its_last_evaluation() -> None:
    assert has_fallen({"held_out": [[0, 0.2, 0.4], [25, 0.8, 0.6], [50, 0.4, 0.5]]})
    assert not has_fallen({"held_out": [[0, 0.2, 0.4], [25, 0.4, 0.5], [50, 0.8, 0.6]]})


def test_every_run_on_file_is_in_the_tables() -> None:
    runs, tuning = (read_runs(DATA / name) for name in ("grid.jsonl", "tuning.jsonl"))
    found = complete_runs(runs)
    assert sum(map(len, found.values())) == len(runs)
    assert {run["lr"] for run in runs} == {choose_rates(tuning)[arm] for arm in found if arm in choose_rates(tuning)}
    assert not {run["seed"] for run in runs} & {run["seed"] for run in tuning}
    assert all(sum(run["curves"]["differing"]) == 0 for run in found["exact: exact"].values())
    text = (DOCS / "lab.md").read_text()
    page = text[text.index(MARKS[0]) : text.index(MARKS[1])]
    assert "\n".join(table_of_arms(found)) in page and "\n".join(table_of_contrasts(found)) in page


def test_the_page_has_the_repetition_on_file() -> None:
    filed, repeated = (complete_runs(read_runs(DATA / name)) for name in ("grid.jsonl", "repetition.jsonl"))
    text = (DOCS / "lab.md").read_text()
    assert tuple(repeated) == ARMS_OF_QUICK
    for arm, runs in repeated.items():
        cells = [arm]
        for of, total in ((filed[arm], f" of {len(filed[arm])}"), (runs, "")):
            cells += [show_mean([late(run) for run in of.values()]), f"{sum(map(has_fallen, of.values()))}{total}"]
        assert f"| {' | '.join(cells)} |" in text
    curves = [run["curves"] for run in repeated["exact: exact"].values()]
    differing, compared = (int(sum(sum(found[key]) for found in curves)) for key in ("differing", "compared"))
    assert f"\n{differing} of the exact arm's {compared:,} log-probabilities differ" in text


def test_a_mixture_has_its_own_reward_before_training(tmp_path: Path) -> None:
    (run,) = make_bench().run([Job(arm=ARMS["exact: exact"], seed=0, lr=1e-3)], steps=2, evaluate_every=1)
    run = compact(run)
    held = {
        arm: [[0, start], *run["held_out"][1:]] for arm, start in (("exact: exact", 0.25), ("mixture: exact", 0.75))
    }
    lines = table_of_arms({arm: {0: {**run, "arm": arm, "held_out": found}} for arm, found in held.items()})
    assert "before training: 0.25, 0.75 of the mixture." in lines[-1]
    draw_curves(tmp_path / "drawn.png", {str(n): {"a": [run, run]} for n in range(3)})  # no fourth panel
    assert (tmp_path / "drawn.png").stat().st_size > 1000


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


@torch.no_grad()
def test_replayed_routing_is_laid_out_as_the_trainers_tokens() -> None:
    bench = make_bench()
    shape = replace(TINY, experts=4)
    flat = upcycle(TINY, bench.start, shape, noise=1.0)[None]
    engine = Engine(shape, "kernels", flat, groups=GROUPS, copies=SIZE)
    rollout = engine.generate([bench.tasks.train[:GROUPS]])
    given = (shape, engine.weights, rollout.prompts_SGP, rollout.lengths_SG, rollout.sampled_SBA, engine.rope)
    assert rollout.routed is not None
    own, replayed, other = (score(*given, routed) for routed in (None, rollout.routed, rollout.routed.roll(1, 3)))
    mask = rollout.mask_SBA
    torch.testing.assert_close(own[mask], replayed[mask], atol=1e-4, rtol=0)
    assert (own - other)[mask].abs().max() > 0.1
