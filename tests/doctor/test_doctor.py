"""The command, the page, the layers, experts and samples; and that one fault is one accusation."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doctor import engines as e
from tests.doctor.faults import tiny_model
from tokentrue.cli.doctor import report_from
from tokentrue.cli.main import run
from tokentrue.doctor import CAUSES, DoctorReport, Finding, Reference, Verdict, examine
from tokentrue.doctor.exam import EngineRoutes, Examination
from tokentrue.doctor.findings import FOLLOWS, cannot_tell, fault, ok, settle
from tokentrue.doctor.interface import probe_stability
from tokentrue.doctor.naming import grows_with_position
from tokentrue.doctor.samples import probe_samples
from tokentrue.doctor.weights import first_difference
from tokentrue.errors import EngineUnreachable
from tokentrue.ids import TokenIds
from tokentrue.providers import load
from tokentrue.providers.exact import ExactProvider
from tokentrue.providers.hf import HFProvider
from tokentrue.renderers import load_renderer
from tokentrue.samples import write_samples
from tokentrue.types import Certificate, Completion, Finish, Sample, Sampling, SamplingMask, Span
from tokentrue.viewer import write_report


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def test_the_command_finds_nothing_wrong_with_the_model_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, samples = load_renderer(str(e.CALCULATOR)).tokenizer_hash, await sampled(e.calculator(), Sampling())
    known = [replace(one, certificate=replace(one.certificate, tokenizer=tokenizer)) for one in samples]
    write_samples(known, tmp_path / "s.jsonl")
    arguments = ["--engine", "exact", "--model", str(e.CALCULATOR), "--samples", str(tmp_path / "s.jsonl"), "--json"]
    assert await asyncio.to_thread(run, "doctor", arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["engine"] == "exact"
    for probe in ("weights: log-probabilities of a prompt", "samples: recorded log-probabilities"):
        (seen,) = [one for one in found["findings"] if one["probe"].startswith(probe)]
        assert seen["verdict"] == "ok"


@pytest.mark.slow
def test_the_command_does_not_name_what_it_cannot_and_says_where_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = e.calculator()
    torch.manual_seed(0)
    weight = changed.model.layers[1].mlp.up_proj.weight
    weight.data += 0.3 * weight.data.std() * torch.randn_like(weight)
    changed.save_pretrained(tmp_path / "served")
    page = tmp_path / "report.html"
    arguments = ["--engine", "hf", "--model", str(e.CALCULATOR), "--served", str(tmp_path / "served"), "-o", str(page)]
    assert run("doctor", [*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (blamed,) = [one for one in found["findings"] if one["verdict"] == "fault"]
    assert blamed["fault"] == "unknown" and blamed["cause"] in found["summary"]
    (place,) = [one for one in found["findings"] if one["probe"] == "weights: first layer that differs"]
    assert place["detail"] == "first in model.layers.1.mlp.up_proj"
    text = page.read_text()
    assert blamed["cure"] in text and "model.layers.1.mlp.up_proj" in text
    assert run("doctor", arguments) == 1
    assert "cause and cure" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "vllm", "--model", str(e.CALCULATOR)], "--url: engine 'vllm' needs one"),
        (["--engine", "hf", "--url", "http://x", "--model", str(e.CALCULATOR)], "takes none"),
        (["--engine", "mine", "--model", str(e.CALCULATOR)], "no engine 'mine'"),
        (["--engine", "hf", "--model", "/nowhere"], "--model: there is no directory '/nowhere'"),
        (["--engine", "hf", "--model", str(e.CALCULATOR), "--dtype", "int3"], "dtype: 'int3' is not one of"),
        (["--engine", "sglang", "--url", "http://127.0.0.1:9", "--model", str(e.CALCULATOR)], "no engine is reachable"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", arguments) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def test_one_fault_is_one_accusation() -> None:
    findings = [
        fault("off_by_one", "9 tokens"),
        fault("unknown", "mean 3"),
        ok("0"),
    ]
    settled = settle(findings)
    assert [finding.verdict for finding in settled] == [Verdict.FAULT, Verdict.CANNOT_TELL, Verdict.OK]
    assert "follows from off_by_one" in settled[1].detail
    both = [fault("template", "3 ids"), fault("rope", "mean 2")]  # neither explains the other
    assert settle(both) == both


def test_a_coarser_dtype_explains_that_batches_differ() -> None:
    """As a real vLLM in bfloat16 does where float32 is expected."""
    findings = [
        fault("batch_variant", "0.07"),
        fault("prefix_cache", "0.09"),
        fault("dtype_bfloat16", "0.03"),
    ]
    assert [finding.fault for finding in settle(findings)] == ["", "", "dtype_bfloat16"]


def test_raw_reports_explain_that_filters_are_missing_in_them() -> None:
    findings = [fault("temperature_ignored", "T"), fault("raw_logprobs", "1-fold"), fault("filters_ignored", "0")]
    assert [finding.fault for finding in settle(findings)] == ["temperature_ignored", "", ""]
    assert [finding.fault for finding in settle(findings[1:])] == ["raw_logprobs", ""]


def test_a_symptom_is_no_name_for_an_unknown_cause() -> None:
    assert [one.fault for one in settle([fault("prefill_decode", "0.1"), fault("unknown", "1")])] == ["", "unknown"]


def test_no_two_faults_explain_each_other() -> None:
    assert not [(one, other) for one, names in FOLLOWS.items() for other in names if one in FOLLOWS.get(other, ())]


def test_every_consequence_is_a_known_fault() -> None:
    assert set(FOLLOWS) | {name for names in FOLLOWS.values() for name in names} <= set(CAUSES)


def test_the_page_escapes_what_an_engine_says(tmp_path: Path) -> None:
    finding = Finding(
        probe="p", verdict=Verdict.FAULT, figure="<b>", fault="template", detail="<script>alert(1)</script>"
    )
    report = DoctorReport(engine="vllm", model="m", facts={"id": "<i>"}, findings=(finding, cannot_tell("&")))
    write_report(tmp_path / "page.html", report_from(report))
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in page and r"\u003cscript>alert(1)" in page and r"\u003ci>" in page


def test_growth_with_the_position() -> None:
    assert grows_with_position(torch.tensor([1.0, 1.0, 8.0]), torch.tensor([1, 2, 3])) == 8.0


def test_the_first_layer_that_differs_is_found_in_the_order_of_execution() -> None:
    model, other = e.calculator(), e.calculator()
    assert first_difference(model, other, range(20), 1e-6) == ("", 0.0)
    other.model.layers[2].self_attn.o_proj.weight.data *= 1.01
    other.model.layers[1].mlp.down_proj.weight.data *= 1.01
    assert first_difference(model, other, range(20), 1e-4)[0] == "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 11, r"model\.layers\.1\.mlp\.up_proj": 3}},
        {"rank_pattern": {"v_proj": 2}},
        {"use_rslora": True, "alpha_pattern": {"layers.0.self_attn.v_proj": 9}, "rank_pattern": {"q_proj": 4}},
    ],
)
def test_the_reference_with_an_adapter_is_pefts_own_merge(tmp_path: Path, settings: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=5, lora_alpha=7, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False, **settings
    )
    torch.manual_seed(2)
    trained = peft.get_peft_model(e.calculator(), config)
    trained.save_pretrained(tmp_path)
    expected = trained.merge_and_unload().state_dict()
    found = Reference.load(e.CALCULATOR, adapter=tmp_path).model.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, msg=lambda said, name=name: f"{name}: {said}")


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    peft.get_peft_model(e.calculator(), config).save_pretrained(tmp_path / "dora")
    for folder, words in ((tmp_path / "dora", "use_dora"), (tmp_path, "adapter_config.json")):
        assert run("doctor", ["--engine", "hf", "--model", str(e.CALCULATOR), "--adapter", str(folder)]) == 2
        assert words in capsys.readouterr().err


def recorded_settings(given: int, sampled: int, sampling: Sampling) -> dict[str, Any]:
    settings = {"temperature": sampling.temperature, **{name: getattr(sampling, name) for name in sampling.filters}}
    return {
        "tokentrue": {
            "nodes": [{"given": given, "sampled": sampled, "temperature": sampling.temperature, "sampling": settings}]
        }
    }


def with_prompt(given: int, mask: SamplingMask | None) -> SamplingMask | None:
    return (
        None
        if mask is None
        else SamplingMask.from_rows([*([] for _ in range(given)), *(list(mask.row(i)) for i in range(len(mask)))])
    )


async def sampled(
    model: Any, sampling: Sampling, *, count: int = 6, versions: Any = lambda n: 0, recorded: bool = False
) -> list[Sample]:
    """Samples with the engine's own log-probabilities; `recorded`: with the sampling settings and kept ids that a
    session records."""
    renderer, provider = load_renderer(str(e.CALCULATOR)), HFProvider(model)
    found: list[Sample] = []
    for n in range(count):
        prompt = tuple(
            renderer.render([{"role": "user", "content": f"What is {n} + 3 and why do rivers flow?"}]).token_ids
        )
        done = await provider.generate(prompt, replace(sampling, seed=n, max_tokens=24))
        end = len(prompt) + len(done.token_ids)
        spans = (
            Span(
                start=0,
                end=len(prompt),
                kind="given",
                role="user",
                turn=0,
                policy_version=None,
                trainable=False,
                why="prompt",
            ),
            Span(
                start=len(prompt),
                end=end,
                kind="sampled",
                role="assistant",
                turn=0,
                policy_version=versions(n),
                trainable=True,
                why="",
            ),
        )
        settings = recorded_settings(len(prompt), len(done.token_ids), sampling)
        found.append(
            Sample(
                sample_id=f"s{n}", session_id=f"s{n}", group=None, token_ids=(*prompt, *done.token_ids),
                loss_mask=(*(0 for _ in prompt), *(1 for _ in done.token_ids)),
                rollout_logprobs=(*(None for _ in prompt), *done.logprobs),
                spans=spans, reward=None, finish_reason="stop", metadata=settings if recorded else {},
                sampling_mask=with_prompt(len(prompt), done.sampling_mask) if recorded else None,
                certificate=Certificate(chain="", template="", tokenizer=""),
            )
        )  # fmt: skip
    return found


async def judged(samples: list[Sample]) -> list[Finding]:
    """Without the probes of an engine, which take most of an examination's time."""
    reference, renderer = Reference.load(e.CALCULATOR), load_renderer(str(e.CALCULATOR))
    reference.expect(reference.dtype)
    exam = Examination(
        provider=HFProvider(reference.model),
        routes=EngineRoutes(),
        renderer=renderer,
        reference=reference,
        dtype=reference.dtype,
    )
    return await probe_samples(exam, samples)


@pytest.mark.parametrize(
    ("sampling", "change", "expected"),
    [
        pytest.param(Sampling(), lambda m: m, "", marks=pytest.mark.slow),
        (Sampling(temperature=0.7), lambda m: m, "sampled_temperature"),
        pytest.param(Sampling(top_k=3), lambda m: m, "sampled_filters", marks=pytest.mark.slow),
        pytest.param(Sampling(), lambda m: m.bfloat16(), "dtype_bfloat16", marks=pytest.mark.slow),
        pytest.param(Sampling(), lambda m: e.with_rope(m, 100_000.0), "rope", marks=pytest.mark.slow),
    ],
)
async def test_samples_alone_tell_the_cause(sampling: Sampling, change: Any, expected: str) -> None:
    found = await judged(await sampled(change(e.calculator()), sampling))
    assert found[0].fault == expected, found[0]
    assert any("position" in finding.probe for finding in found)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.3, top_p=0.8),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                Sampling(temperature=1.3),
                Sampling(temperature=1.3, top_k=4),
                Sampling(temperature=0.7, min_p=0.05),
                Sampling(temperature=0.0),
            )
        ),
    ],
)
async def test_recorded_settings_are_applied_to_the_reference(sampling: Sampling) -> None:
    found = await judged(await sampled(e.calculator(), sampling, recorded=True))
    assert found[0].verdict is Verdict.OK, found[0]


@pytest.mark.slow
async def test_a_fault_is_seen_under_a_filter_too() -> None:
    samples = await sampled(e.with_rope(e.calculator(), 100_000.0), Sampling(temperature=1.3, top_k=4), recorded=True)
    assert (await judged(samples))[0].fault == "rope"


@pytest.mark.slow
async def test_log_probabilities_of_temperature_1_are_no_match_for_a_recorded_one() -> None:
    samples = await sampled(e.calculator(), Sampling(), recorded=True)
    claimed = [
        replace(
            one,
            metadata=recorded_settings(
                one.spans[0].end, one.spans[1].end - one.spans[0].end, Sampling(temperature=0.7)
            ),
        )
        for one in samples
    ]
    (verdict, *_) = await judged(claimed)
    assert verdict.fault == "sampled_temperature" and "divided by 1.429" in verdict.detail  # 1 / 0.7


@pytest.mark.slow
async def test_samples_whose_kept_ids_were_not_recorded_are_not_judged() -> None:
    filtered = [
        replace(one, sampling_mask=None) for one in await sampled(e.calculator(), Sampling(top_k=3), recorded=True)
    ]
    (verdict,) = await judged(filtered)
    assert (
        verdict.verdict is Verdict.CANNOT_TELL
        and "under top_k, and the engine did not report which ids were kept" in verdict.detail
    )
    whole = await sampled(e.calculator(), Sampling(), recorded=True)
    first, second, *_ = await judged([*filtered, *whole])
    assert first.verdict is Verdict.OK and second.detail.startswith("6 of 12 samples"), (first, second)


@pytest.mark.parametrize(
    ("tokenizer", "beyond", "words"),
    [
        (None, True, "holds token id 999999, beyond the vocabulary"),
        ("other", False, "was recorded with another tokenizer (other)"),
    ],
)
async def test_samples_of_another_model_are_refused_before_any_probe(
    tokenizer: str | None, beyond: bool, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sample, *_) = await sampled(e.calculator(), Sampling())
    name = tokenizer or load_renderer(str(e.CALCULATOR)).tokenizer_hash
    ids = [999_999 if beyond else sample.token_ids[0], *sample.token_ids[1:]]
    write_samples(
        [replace(sample, token_ids=TokenIds(ids), certificate=replace(sample.certificate, tokenizer=name))],
        tmp_path / "s.jsonl",
    )
    arguments = ["--engine", "hf", "--model", str(e.CALCULATOR), "--samples", str(tmp_path / "s.jsonl")]
    assert await asyncio.to_thread(run, "doctor", arguments) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and len(said.splitlines()) == 1, said


async def test_samples_of_one_version_that_differ_are_stale() -> None:
    fresh = await sampled(e.calculator(), Sampling(), count=4, versions=lambda n: 8)
    stale = await sampled(e.perturbed(e.calculator()), Sampling(), count=4, versions=lambda n: 7)
    found = await judged([*fresh, *stale])
    assert found[0].fault == "stale_weights" and "version 7" in found[0].figure


@pytest.mark.slow
async def test_experts_of_a_mixture_are_compared_layer_by_layer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": 659, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 1024, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(str(e.CALCULATOR)).save_pretrained(tmp_path)
    renderer, reference = load_renderer(str(tmp_path)), Reference.load(tmp_path)
    report = await examine(load("exact", model=str(tmp_path)), renderer, reference)
    (routing,) = [finding for finding in report.findings if finding.probe.startswith("experts")]
    assert routing.verdict is Verdict.OK and routing.figure.startswith("0.0%"), routing
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    report = await examine(load("exact", model=model), renderer, reference)
    (routing,) = [finding for finding in report.findings if finding.probe.startswith("experts")]
    assert routing.fault == "routing" and "replayed" in routing.detail, routing


@pytest.mark.slow
async def test_an_engine_of_any_name_that_scores_is_asked_for_a_prompts_log_probabilities() -> None:
    class Renamed(ExactProvider):
        name = "mine"

    provider = Renamed(str(e.CALCULATOR))
    try:
        report = await examine(provider, load_renderer(str(e.CALCULATOR)), Reference.load(e.CALCULATOR))
    finally:
        await provider.close()
    verdicts = {finding.probe: finding.verdict for finding in report.findings}
    assert verdicts["weights: log-probabilities of a prompt"] is Verdict.OK


async def test_nothing_to_compare_is_no_agreement() -> None:
    class Silent(HFProvider):
        async def generate(self, prompt_ids: Any, sampling: Sampling, *, session: str | None = None) -> Completion:
            return Completion(token_ids=TokenIds(()), logprobs=(), finish=Finish.LENGTH)

    exam = Examination(
        provider=Silent(e.calculator()), routes=EngineRoutes(), renderer=load_renderer(str(e.CALCULATOR)),
        reference=Reference.load(e.CALCULATOR), dtype="float32",
    )  # fmt: skip
    assert {finding.verdict for finding in await probe_stability(exam)} == {Verdict.CANNOT_TELL}


async def test_an_engine_that_goes_away_is_no_fault() -> None:
    class Gone(e.TamperedProvider):
        async def generate(self, prompt_ids: Any, sampling: Sampling, *, session: str | None = None) -> Any:
            raise EngineUnreachable("no engine is reachable at http://127.0.0.1:9")

    with pytest.raises(EngineUnreachable):
        await examine(Gone(e.calculator()), load_renderer(str(e.CALCULATOR)), Reference.load(e.CALCULATOR))


@pytest.mark.slow
async def test_a_model_without_an_uncertain_token_cannot_tell(tmp_path: Path) -> None:
    """Every probe has a way to say that it does not know."""
    model = tiny_model(tmp_path / "sure", "untied")
    reference = Reference.load(model)
    reference.model.lm_head.weight.data *= 1e5  # all mass on one token everywhere
    report = await examine(HFProvider(reference.model), load_renderer(str(model)), reference)
    verdicts = {finding.probe: finding.verdict for finding in report.findings}
    assert verdicts["meaning: filters"] is Verdict.CANNOT_TELL and report.exit_code == 0
