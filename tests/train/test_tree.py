"""Rows that share a prefix, computed as one tree. The oracle is every row by itself: log-probabilities have its bits,
gradients are as near to those of float64."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.gradients import flat_gradient
from tests.engine.world import VOCABULARY, build
from tests.marks import examples, slow_except
from tests.train.rows import sample_of, small_model
from tokentrue.app.configuration import read
from tokentrue.app.training import TrainRun, trainer_for
from tokentrue.mismatch import loss_named
from tokentrue.numerics import KeptRows, exact, logits_of, same_bits, score, scores_of, tree
from tokentrue.numerics.ops import Packed
from tokentrue.numerics.tree import TokenTree
from tokentrue.samples.shape import sample_from_json
from tokentrue.train import ExactScorer, OptimConfig, Ranks, TrainConfig, Trainer, scoring
from tokentrue.train.rows import Packing, Row, ScoredRow, rows_from_groups
from tokentrue.train.scoring import lay_out, replay_experts
from tokentrue.types import Sample

# Lengths around 128, the keys of a block on the CPU, and 40, the window of the small models.
TRUNKS, BRANCHES = (1, 5, 39, 127, 128, 140, 300), (0, 1, 7, 60, 130)
FAMILIES = ("qwen3", "gemma3", "gpt_oss", "deepseek_v3", "granite", "olmo3", "qwen3_moe", "glm4_moe")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_ids(seed: int, rows: int = 6) -> list[list[int]]:
    """Rows that continue a prefix of an earlier row; some equal it, or end inside it."""
    rng = random.Random(seed)

    def draw(lengths: Sequence[int]) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.choice(lengths))]

    made = [draw(TRUNKS)]
    while len(made) < rows:
        before = rng.choice(made)
        made.append([*before[: rng.randint(0, len(before))], *draw(BRANCHES)] or [3])
    rng.shuffle(made)
    return made


def row_of(ids: Sequence[int], heat: float = 1.0, kept: KeptRows | None = None) -> ScoredRow:
    return ScoredRow(ids=torch.tensor(ids), temperatures=torch.full((len(ids),), heat), kept=kept)


def random_tree(seed: int, rows: int = 6) -> list[ScoredRow]:
    return [row_of(ids) for ids in random_ids(seed, rows)]


def alone(model: Any, row: ScoredRow) -> Tensor:
    if row.length == 1:
        return torch.zeros(1)
    kept = None if row.kept is None else row.kept.of(slice(1, row.length))
    return torch.nn.functional.pad(score(model, row.ids[None], row.temperatures[1:], kept=kept)[0], (1, 0))


def differing(model: Any, rows: Sequence[ScoredRow]) -> int:
    """Rows whose bits in the tree are not those of the row by itself."""
    with torch.no_grad(), exact(model):
        found = ExactScorer(tree=True)(model, rows).logprobs
        return sum(not same_bits(a, alone(model, row)) for a, row in zip(found, rows, strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_except(
        {"qwen3 float32", "gemma3 bfloat16", "gpt_oss float32", "deepseek_v3 bfloat16"},
        product(FAMILIES, (torch.float32, torch.bfloat16)),
        name=lambda value: f"{value[0]} {value[1]}".replace("torch.", ""),
    ),
)
def test_log_probabilities_have_the_bits_of_each_row_by_itself(kind: str, dtype: torch.dtype) -> None:
    model = build(kind).to(dtype)
    for seed in range(2):
        rows = random_tree(seed)
        assert len(lay_out(rows, tree=True).source) < sum(row.length for row in rows)
        assert differing(model, rows) == 0, seed


# ---- mutants: what the comparison above must see -----------------------------------------------------------------
Change = Callable[[Packed], None]


def leak_sibling(packed: Packed) -> None:
    """The parent of one branch is replaced, among its keys, by the last token of a sibling."""
    branches = packed.branches
    assert branches is not None
    for start, length, (base, context, _) in zip(
        packed.cu_seqlens.tolist(), packed.lengths, branches.table.tolist(), strict=False
    ):
        parent = base + context - length - 1
        if context > length and int(branches.path[parent]) != start - 1:
            branches.path[parent] = start - 1
            return
    raise AssertionError("no branch has a sibling before it")


def shift_positions(packed: Packed) -> None:
    """The last branch is placed as the pack counts, not as its row."""
    assert packed.branches is not None
    packed.branches.positions[int(packed.cu_seqlens[-2]) :] += 1


@pytest.mark.parametrize("change", [leak_sibling, shift_positions])
def test_a_tree_with_another_ancestor_or_position_is_found(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, right = (
        build("qwen3"),
        [row_of([*range(50), *own]) for own in ([7, 8, 9], [3, 2, 5])],
        tree.pack_segments,
    )
    assert differing(model, rows) == 0 and tree.shares_prefixes(model)

    def pack_wrongly(*args: Any) -> Packed:
        packed = right(*args)
        if packed.branches is not None:
            change(packed)
        return packed

    monkeypatch.setattr(tree, "pack_segments", pack_wrongly)
    assert differing(model, rows) > 0
    with torch.no_grad():
        assert not tree.shares_prefixes(model), "the trainer's proof would not see it either"


# ---- gradients ---------------------------------------------------------------------------------------------------
def gradients(model: Any, losses: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    losses().backward()
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True)) ** 0.5


def gradient_errors(kind: str, rows: Sequence[ScoredRow], weights: Sequence[Tensor]) -> tuple[float, float, float]:
    """Distances from the gradient in float64 (transformers' own forward, row by row): of the tree's, of the separate
    rows', and of zero."""
    model = build(kind, initializer_range=0.05)

    def total(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([(x * w.to(x.dtype)).sum() for x, w in zip(values, weights, strict=True)]).sum()

    with exact(model):
        joined = gradients(model, lambda: total(scoring.ExactScorer(tree=True)(model, rows).logprobs))
        again = gradients(model, lambda: total(scoring.ExactScorer(tree=True)(model, rows).logprobs))
        apart = gradients(model, lambda: total([alone(model, row) for row in rows]))
    assert all(same_bits(a, b) for a, b in zip(joined, again, strict=True))
    model.set_attn_implementation("eager")
    if kind in {"gpt_oss", "deepseek_v3"}:
        model.set_experts_implementation("eager")
    wide = model.double()

    def reference(row: ScoredRow) -> Tensor:
        table = wide(input_ids=row.ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
        return torch.nn.functional.pad(table.gather(-1, row.ids[1:, None])[:, 0], (1, 0))

    right = gradients(wide, lambda: total([reference(row) for row in rows]))
    return distance(joined, right), distance(apart, right), distance([torch.zeros_like(g) for g in right], right)


def random_weights(rows: Sequence[ScoredRow], seed: int) -> list[Tensor]:
    """Every row wants something else of a token that it shares; some want nothing."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(row.length, generator=generator) * (torch.rand(row.length) < 0.7) for row in rows]


@pytest.mark.parametrize("kind", slow_except({"qwen3", "gpt_oss"}, ["qwen3", "gemma3", "gpt_oss", "deepseek_v3"]))
def test_gradients_are_as_near_to_float64_as_those_of_separate_rows(kind: str) -> None:
    """Both round the same sums. Separate rows do so R times, independently: their error is that of a sum of R numbers
    with random signs. A tree rounds the sum once, so its error is at most √R of theirs."""
    rows = [*random_tree(4, rows=5), row_of([9, 8, 7] * 20), row_of([9, 8, 7] * 20)]  # two equal ones
    joined, apart, size = gradient_errors(kind, rows, random_weights(rows, 1))
    assert joined <= len(rows) ** 0.5 * apart and apart < 1e-4 * size


def test_a_weight_that_is_dropped_on_a_shared_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row_of([*range(50), *own]) for own in ([7, 8, 9], [3, 2, 5], [3, 2, 5, 6])]

    def drop(model: Any, laid: TokenTree, *args: Any, **options: Any) -> list[Tensor]:
        found, first = tree.score_tree(model, laid, *args, **options), laid.nodes[: laid.lengths[0]]
        shared = torch.from_numpy(np.isin(laid.nodes[-laid.lengths[-1] :], first))[:, None]
        return [*found[:-1], torch.where(shared, found[-1].detach(), found[-1])]

    monkeypatch.setattr(scoring, "score_tree", drop)
    joined, apart, size = gradient_errors("qwen3", rows, random_weights(rows, 2))
    assert joined > 1e3 * apart and joined > 1e-2 * size


# ---- what rows may differ in on tokens that they share -------------------------------------------------------------
def test_temperatures_kept_ids_and_entropy_are_each_rows_own() -> None:
    """The same ids thrice: at two temperatures, and over the ids that a filter kept."""
    model, (ids, other) = build("qwen3"), random_ids(8, rows=2)
    ids = (ids + other + [1, 2, 3])[:60]
    lists: list[list[int]] = [[token, (token + 3) % VOCABULARY] if i % 3 == 1 else [] for i, token in enumerate(ids)]
    offsets = torch.tensor([0, *np.cumsum([len(each) for each in lists])])
    kept = KeptRows(token_ids=torch.tensor([i for each in lists for i in each]), offsets=offsets)
    rows = [row_of(ids), row_of([*ids[:40], 5], 0.7), row_of(ids, 0.7, kept), row_of(ids)]
    assert len(lay_out(rows, tree=True).source) == len(ids) + 1 and differing(model, rows) == 0
    with torch.no_grad(), exact(model):
        spread = ExactScorer(tree=True)(model, rows, entropy=True).entropy
        assert spread is not None
        for values, row in zip(spread, rows, strict=True):
            own = None if row.kept is None else row.kept.of(slice(1, row.length))
            wanted = scores_of(model, row.ids[None], row.temperatures[1:], entropy=True, kept=own)[0, :, 1].contiguous()
            assert same_bits(values[1:].contiguous(), wanted)


def test_a_row_of_one_token_leaves_the_other_rows_their_temperature() -> None:
    """Nothing predicts it, so its temperature, the last of the pass, is nobody's."""
    model, one = build("qwen3"), row_of([9])
    assert differing(model, [row_of([5, 6, 7, 8], 0.7), one]) == 0 and differing(model, [one, one]) == 0


def test_tokens_with_other_recorded_experts_are_other_tokens() -> None:
    model, ids = build("qwen3_moe"), random_ids(2)[0][:30] * 2
    generator, shape = torch.Generator().manual_seed(1), (len(ids), 2, 3)
    experts = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(len(ids) * 2)]).view(shape).short()
    moved = experts.clone()
    moved[20] = (moved[20] + 1) % 5
    rows = [replace(row_of(ids), experts=each) for each in (experts, moved, experts)]
    assert len(lay_out(rows, tree=True).source) == 2 * len(ids) - 20
    scorer = ExactScorer(tree=True)

    def scored(chosen: Sequence[ScoredRow]) -> list[Tensor]:
        with replay_experts(model, chosen, scorer=scorer, mode="experts"):
            return scorer(model, chosen).logprobs

    with torch.no_grad(), exact(model):
        together, apart = scored(rows), [scored([row])[0] for row in rows]
    assert all(same_bits(a, b) for a, b in zip(together, apart, strict=True))
    assert not same_bits(apart[0], apart[1])


# ---- packing -------------------------------------------------------------------------------------------------------
TREES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=20)


@settings(max_examples=examples(100), deadline=None)
@given(TREES, st.integers(1, 80), st.integers(1, 3))
def test_passes_hold_every_row_once_and_fit_the_budget(ids: list[list[int]], budget: int, world: int) -> None:
    rows: Any = [row_of(each) for each in ids]
    by_rank = [
        Packing(budget=budget, padded=False, rank=rank, world=world, tree=True).bins(rows, range(len(rows)))
        for rank in range(world)
    ]
    assert sorted(i for bins in by_rank for found in bins for i in found) == list(range(len(rows)))
    assert len({len(bins) for bins in by_rank}) == 1
    for found in (found for bins in by_rank for found in bins if len(found) > 1):
        laid = lay_out([rows[i] for i in found], tree=True)
        assert len(laid.source) <= budget
        assert len(laid.source) == len({tuple(ids[i][: n + 1]) for i in found for n in range(len(ids[i]))})


def test_a_group_with_one_prompt_computes_it_once_a_pass_and_leaves_work_for_every_rank() -> None:
    prompt = list(range(100))
    rows: Any = [row_of([*prompt, *[101 + i] * 20]) for i in range(8)]
    (whole,) = Packing(budget=1000, padded=False, tree=True).bins(rows, range(8))
    assert len(lay_out([rows[i] for i in whole], tree=True).source) == 100 + 8 * 20
    assert [len(found) for found in Packing(budget=200, padded=False, tree=True).bins(rows, range(8))] == [5, 3]
    halves = [Packing(budget=1000, padded=False, tree=True, rank=rank, world=2).bins(rows, range(8)) for rank in (0, 1)]
    assert all(len(bins) == 1 and len(bins[0]) >= 1 for bins in halves)


# ---- the trainer -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    return small_model()


def forked_groups(model: torch.nn.Module) -> list[list[Sample]]:
    """Two groups with one prompt each; the second session of each is two rows, which train a token that they share."""
    rng, made = random.Random(3), list[list[Sample]]()

    def draw(count: int) -> list[int]:
        return [rng.randrange(300) for _ in range(count)]

    for g in range(2):
        prompt, group = draw(140), list[Sample]()
        for i in range(4):
            answer = draw(30)
            forks = [answer, [*answer[:12], *draw(9)]] if i == 1 else [answer]
            for k, own in enumerate(forks):
                ids = [*prompt, *own]
                with torch.no_grad():
                    values = [0.0, *score(model, torch.tensor([ids]))[0].tolist()]
                given_ = [t < len(prompt) for t in range(len(ids))]
                sample = sample_of(ids, given_, values, name=f"s{g}-{i}", group=f"g{g}", reward=float(i % 2))
                group.append(replace(sample, sample_id=f"s{g}-{i}/{k}"))
        made.append(group)
    return made


def trainer_of(model: torch.nn.Module, **config: Any) -> Trainer:
    settings_ = TrainConfig(**{"micro_tokens": 100_000, **config})
    return Trainer(copy.deepcopy(model), config=settings_, optim=OptimConfig(), loss=loss_named("dapo"))


def test_a_step_has_the_loss_of_separate_rows_and_computes_fewer_tokens(base: torch.nn.Module) -> None:
    with exact(base):
        groups = forked_groups(base)
    joined, apart, cut = (
        flat_gradient(trainer_of(base, tree=tree_, micro_tokens=budget), groups)
        for tree_, budget in ((True, 100_000), (False, 100_000), (False, 500))
    )
    assert joined[1]["loss"] == apart[1]["loss"] != 0.0
    scale, rounding = float(apart[0].norm()), float((cut[0] - apart[0]).norm())  # of the same rows, packed otherwise
    assert 0 < rounding < 1e-5 * scale and float((joined[0] - apart[0]).norm()) <= 4 * rounding
    reports = [trainer_of(base, tree=tree_).step(groups) for tree_ in (True, False)]
    tokens = [report.metrics["tokens_computed"] for report in reports]
    assert tokens == [2 * (140 + 4 * 30 + 9), 2 * (5 * 140 + 4 * 30 + 21)] and tokens[1] == reports[1].metrics["tokens"]
    assert all(report.agreement.differing == 0 < report.agreement.compared for report in reports)


@pytest.mark.parametrize("is_tree", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_with_leaves_shares_prefixes_too(base: torch.nn.Module, is_tree: bool) -> None:
    """`train.tree` holds for an engine whose sums are cut for tensor parallelism; bits are those of its rows."""
    settings_ = read(TrainRun, sets=["engine.options.leaves=2", f"train.tree={str(is_tree).lower()}"])
    trainer, _ = trainer_for(settings_, Ranks())
    with exact(base, leaves=2):
        report = trainer.step(forked_groups(base))
    assert report.agreement.differing == 0 < report.agreement.compared
    assert (report.metrics["tokens_computed"] < report.metrics["tokens"]) is is_tree


def test_a_family_without_an_exact_tree_trains_rows_apart_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3_next")
    rows = [row_of([*range(20), 3]), row_of([*range(20), 4, 5])]
    trainer = trainer_of(model)
    with caplog.at_level(logging.WARNING, logger="tokentrue.train"), trainer.scoring():
        trainer.prove_tree()
        trainer.prove_tree()
    assert [record.getMessage() for record in caplog.records] == [
        "Qwen3NextForCausalLM: a tree of prefixes has no exact form, rows are apart"
    ]
    assert not trainer.scorer.tree
    with torch.no_grad(), trainer.scoring():
        found = trainer.scorer(trainer.model, rows).logprobs
        assert all(same_bits(a, alone(trainer.model, row)) for a, row in zip(found, rows, strict=True))


def test_forks_that_the_gateway_recorded_train_as_one_tree(base: torch.nn.Module) -> None:
    """Over HTTP with the exact engine: groups of one prompt, and conversations that go on from an earlier turn."""
    import httpx

    from tokentrue.app.background import BackgroundGateway

    with BackgroundGateway(engine="exact") as gateway, httpx.Client(base_url=gateway.url, timeout=60) as http:
        admin = {"authorization": f"Bearer {gateway.admin_key}"}
        found: list[Sample] = []
        for number in range(2):
            session = http.post("/sessions", json={"group": "g"}, headers=admin).json()
            keys = {"authorization": f"Bearer {session['api_key']}"}

            def chat(messages: list[Any], seed: int, keys: dict[str, str] = keys) -> list[Any]:
                body = {"model": "m", "messages": messages, "max_tokens": 16, "temperature": 1.2, "seed": seed}
                answer = http.post("/v1/chat/completions", json=body, headers=keys)
                assert answer.status_code == 200, answer.text
                return [*messages, answer.json()["choices"][0]["message"]]

            opened = chat([{"role": "user", "content": "Ann has 3 pens and buys 4 more. How many?"}], number)
            for fork, text in enumerate(("And twice that?", "Are you sure?", "And one less?")):
                chat([*opened, {"role": "user", "content": text}], 10 * number + fork)
            url = f"/sessions/{session['session_id']}"
            assert http.post(f"{url}/reward", json={"reward": float(number)}, headers=admin).is_success
            found += map(sample_from_json, http.get(f"{url}/samples", headers=admin).json()["samples"])
    rows: list[Row] = rows_from_groups([found])
    assert len(rows) == 6, "three forks of two sessions"
    joined, apart = (trainer_of(base, tree=tree_).step([found]) for tree_ in (True, False))
    sampled = sum(int(row.sampled.sum()) for row in rows)
    assert joined.agreement.differing == 0 and joined.agreement.compared == sampled > sum(
        sum(s.loss_mask) for s in found
    )
    assert joined.metrics["update/loss"] == apart.metrics["update/loss"] != 0.0
    assert joined.metrics["tokens_computed"] < 0.6 * apart.metrics["tokens_computed"]
    assert differing(base, rows) == 0


def test_a_tree_without_shared_prefixes_is_the_rows_back_to_back() -> None:
    rows = [row_of([1, 2, 3]), row_of([4]), row_of([2, 2])]
    laid = lay_out(rows, tree=True)
    assert laid.packed.branches is None and sorted(laid.source.tolist()) == list(range(6))
    model = build("llama")
    with torch.no_grad(), exact(model):
        plain = logits_of(model, torch.tensor([[1, 2, 3]]))
    assert plain.shape[1] == 3 and differing(model, rows) == 0
