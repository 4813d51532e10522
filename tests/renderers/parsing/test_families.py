"""Families are recognised by what their templates write; the model's name plays no part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import parts
from tests.marks import slow_but_every
from tokentrue.renderers.families import FAMILIES, Clues, family_for

REAL = {
    "llama.cpp/Qwen-Qwen2.5-7B-Instruct.jinja": "qwen2.5",
    "llama.cpp/Qwen-Qwen3-0.6B.jinja": "qwen3",
    "trl/qwen3_instruct_2507.jinja": "qwen2.5",
    "xinference/Qwen3-Next-Thinking": "qwen3",
    "llama.cpp/Qwen-QwQ-32B.jinja": "qwen3",
    "llama.cpp/Qwen3-Coder.jinja": "qwen3-coder",
    "llama.cpp/Qwen3.5-4B.jinja": "qwen3.5",
    "trl/qwen3_6.jinja": "qwen3.5",
    "xinference/glm-4.5": "glm",
    "llama.cpp/GLM-4.6.jinja": "glm",
    "llama.cpp/GLM-4.7-Flash.jinja": "glm",
    "xinference/glm-5.1": "glm",
    "llama.cpp/moonshotai-Kimi-K2.jinja": "kimi-k2",
    "xinference/Kimi-K2.5": "kimi-k2",
    "llama.cpp/MiniMax-M2.jinja": "minimax-m2",
    "xinference/MiniMax-M2.5": "minimax-m2",
    "xinference/MiniMax-M2.7": "minimax-m2",
    "trl/deepseekv3.jinja": "deepseek-v3",
    "xinference/deepseek-r1-0528": "deepseek-v3",
    "llama.cpp/deepseek-ai-DeepSeek-V3.1.jinja": "deepseek-v3.1",
    "llama.cpp/deepseek-ai-DeepSeek-V3.2.jinja": "deepseek-v3.2",
    "llama.cpp/deepseek-ai-DeepSeek-V4.jinja": "deepseek-v4",
    "llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja": "nemotron-3",
    "llama.cpp/openai-gpt-oss-120b.jinja": "harmony",
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct.jinja": "llama-3",
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407.jinja": "mistral",
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506.jinja": "mistral",
    "trl/gemma3.jinja": "gemma-3",
    "llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja": "hermes",
}
PINNED = {
    "llama.cpp/GLM-4.7-Flash.jinja": {"clear_thinking": False},
    "llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja": {"truncate_history_thinking": False},
    "llama.cpp/deepseek-ai-DeepSeek-V4.jinja": {"drop_thinking": False},
    "trl/qwen3_6.jinja": {"preserve_thinking": True},
    "llama.cpp/Qwen-Qwen3-0.6B.jinja": {},
}
NOBODY = SimpleNamespace(added_tokens_decoder={})


@pytest.mark.parametrize("name", slow_but_every(4, REAL))
def test_real_templates_are_recognised(name: str) -> None:
    template = parts.templates().get(name)
    if template is None:
        pytest.skip(f"{name} is not here")
    assert family_for(template, NOBODY).name == REAL[name]


@pytest.mark.parametrize("name", PINNED)
def test_switches_against_forgetting_are_pinned(name: str) -> None:
    template = parts.templates().get(name)
    if template is None:
        pytest.skip(f"{name} is not here")
    assert family_for(template, NOBODY).template_kwargs == PINNED[name]


@pytest.mark.parametrize(
    ("name", "family"),
    [("qwen3-like", "qwen3"), ("k2v3-like", "k2v3"), ("glm-like", "glm"), ("kimi-like", "kimi-k2"), ("minimax-like", "minimax-m2"),
     ("deepseek-like", "deepseek-v3.1"), ("harmony-like", "harmony"), ("inkling-like", "inkling")],
)  # fmt: skip
def test_own_templates_are_recognised(name: str, family: str) -> None:
    template = (parts.FIXTURES / "templates" / f"{name}.jinja").read_text()
    assert family_for(template, NOBODY).name == family


def test_every_response_template_loads() -> None:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    seen = set()
    for template in parts.templates().values():
        clues = Clues(template=template, tokens=frozenset())
        for recognise in FAMILIES:
            family = recognise(clues)
            if family is not None and family.response_template is not None:
                load_response_template(dict(family.response_template))
                seen.add(family.name)
    if parts.shared():
        assert len(seen) >= 17


def test_a_template_without_messages_is_plain() -> None:
    assert family_for("hello", NOBODY).name == "plain"
