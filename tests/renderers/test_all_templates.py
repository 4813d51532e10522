"""Every real template that can be had offline: none crashes, each is proven or refused with a reason, none is silently
wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tests.renderers.standins import standin
from tests.renderers.talk import TOOLS, calls, result, says, user
from tests.renderers.templates_page import TARGET, Row, page, reasons, rows
from tokentrue.renderers import renderer_of

# one of each kind: hoists, drops, raises, carries state, opener as stop, alias, no stop, parts, short ids, tools at the
# last user
SAMPLE = {
    f"llama.cpp/{name}.jinja"
    for name in (
        "Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B", "GLM-4.6", "Kimi-K3", "MiniMax-M2", "deepseek-ai-DeepSeek-V3.1", "Cohere2MoE",
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "openai-gpt-oss-120b", "meta-llama-Llama-3.1-8B-Instruct", "google-gemma-4-31B-it",
        "mistralai-Mistral-Nemo-Instruct-2407", "HuggingFaceTB-SmolLM3-3B", "microsoft-Phi-3.5-mini-instruct", "llama-cpp-rwkv-world",
        "unsloth-Apriel-1.5", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "meetkai-functionary-medium-v3.1", "tencent-Hy3",
    )
}  # fmt: skip


def _sound(found: list[Row]) -> None:
    for row in found:
        if row.proof is None:
            assert row.error, row.name
            continue
        assert not [case for case in row.proof.cases if case.outcome == "wrong"], row.name
        refused = [case for case in row.proof.cases if case.outcome in {"refused", "unsupported"}]
        assert all(case.why for case in refused), row.name
        assert bool(refused) == bool(reasons(row))


def test_a_sample_of_templates() -> None:
    if parts.shared() is None:
        pytest.skip("the sample is from ../shared/templates, which is not here")
    found = list(rows(SAMPLE, real=False))
    assert {row.name for row in found} == SAMPLE
    _sound(found)
    verdicts = {
        row.name.partition("/")[2].removesuffix(".jinja"): row.proof.roles if row.proof else {} for row in found
    }
    assert verdicts["Qwen3-Coder"]["tool"] == "proven"
    assert verdicts["Kimi-K3"]["tool"] == "proven"  # it counts calls, those of the real conversation
    assert verdicts["deepseek-ai-DeepSeek-R1-Distill-Llama-8B"]["tool"] == "history"  # opens otherwise after others
    assert verdicts["deepseek-ai-DeepSeek-V3.1"]["system"] == "refused"  # hoisted to the top
    assert verdicts["MiniMax-M2"]["system"] == "refused"  # dropped in silence
    assert verdicts["Qwen3.5-4B"]["system"] == "refused"  # raises
    assert verdicts["llama-cpp-rwkv-world"]["user"] == "refused"  # no stop token
    assert verdicts["deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"]["tool"] == "refused"  # writes its stop twice


EARLIER: list[list[dict[str, Any]]] = [
    [],
    [user("zq"), says("zw")],
    [user("zq"), calls("Oslo", first=50), result("zr", 50), says("zw")],
    [user("zq"), calls("Oslo", first=50), result("zr", 50), calls("Rome", first=60), result("zr", 60), says("zw")],
]
LAST = {
    "user": ([user("a"), says("b")], [user("NEW")]),
    "tool": ([user("a"), calls("Paris")], [result("NEW")]),
    "tools": ([user("a"), calls("Paris", "Oslo")], [result("NEW"), result("MORE", 1)]),
}


def test_a_verdict_says_whether_earlier_turns_change_the_added_ids() -> None:
    if parts.shared() is None:
        pytest.skip("the sample is from ../shared/templates, which is not here")
    for name, text in parts.templates().items():
        if name not in SAMPLE:
            continue
        renderer = renderer_of(standin(text), chat_template=text)
        for role, (history, new) in LAST.items():
            stops = renderer.stops.after(history[-1])
            if renderer.proof.roles[role] == "refused" or not stops:
                continue
            prefix, tools = [7, renderer.codec.literals[stops[0]]], TOOLS if role != "user" else None
            found = [renderer.extend(prefix, [*earlier, *history], new, tools) for earlier in EARLIER]
            added = {each.added_ids for each in found if isinstance(each, tt.Extension)}
            assert renderer.proof.roles[role] == ("history" if len(added) > 1 else "proven"), (name, role)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_templates() -> None:
    found = list(rows())
    if len(found) < 100:
        pytest.skip(f"only {len(found)} templates can be had here")
    _sound(found)
    users = Counter(row.proof.roles["user"] if row.proof else "refused" for row in found)
    tools = Counter(row.proof.roles["tool"] if row.proof else "refused" for row in found)
    assert users["proven"] >= 0.88 * len(found) and tools["proven"] + tools["history"] >= 0.65 * len(found), (
        users,
        tools,
    )
    written = TARGET.read_text(encoding="utf-8")
    if all(f"| {row.name} | {row.tokenizer} |" in written for row in found) and written.count("\n| ") > len(found):
        assert page(found) == written, "python -m tests.renderers.templates_page writes the page anew"
