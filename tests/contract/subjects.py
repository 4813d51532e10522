"""Whom the contract suite examines: a tokenizer, a template and the dialect of the models that use them.

`own` subjects use this repository's fixtures and run on any machine. `real` ones use real tokenizers and templates
where they can be had (see tests/parts.py); a template whose own tokenizer cannot be had runs on our BPE with exactly
the tokens that it uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests import carriers, parts
from tests.contract import dialects as d
from tests.contract.dialects import Dialect, Harmony, Inkling
from tokentrue.renderers.families.harmony import correct_template
from tokentrue.renderers.load import renderer_of

CHATML = "<|im_end|>"
_short = lambda name, turn, place: f"c{turn:04d}{place:04d}"  # noqa: E731
_kimi = lambda name, turn, place: f"functions.{name}:{place}"  # noqa: E731


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """`tokenizer`: `own:NAME`, `real:NAME` or `standin`; `template`: a key of `carriers.all_templates()`, or "" for the
    tokenizer's own."""

    name: str
    family: str
    tokenizer: str
    dialect: Dialect
    template: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    roles: frozenset[str] = frozenset({"tool", "user"})  # continuations that must be proven
    system: bool = True  # the template takes a system message at the top

    def folder(self) -> Path:
        kind, _, name = self.tokenizer.partition(":")
        if kind == "own":
            return parts.own_dir(name)
        return parts.tokenizer_dir(name) if kind == "real" else parts.standin_dir(self.source() or "")

    def source(self) -> str | None:
        if not self.template:
            return None
        found = _templates().get(self.template)
        if found is None:
            pytest.skip(f"template {self.template}: neither ../shared/templates nor its wheel is here")
        return found

    def renderer(self) -> Any:
        return _renderer(self.name)

    def judge(self) -> Any:
        """transformers' own tokenizer: the truth that our renders are held to, with `truth` for its render of the same
        template."""
        return parts.loaded_tokenizer(self.folder())

    def truth(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.judge().apply_chat_template(messages, chat_template=self.source(), tokenize=False, **options)


@cache
def _templates() -> dict[str, str]:
    found = dict(carriers.all_templates())
    if shipped := found.get("trl/gptoss.jinja"):
        found["ours/gpt-oss"] = correct_template(shipped) or ""
    return found


@cache
def _renderer(name: str) -> Any:
    """As `load_renderer` does; large tokenizers are loaded once and shared."""
    subject = BY_NAME[name]
    if subject.tokenizer.startswith("own:"):
        return tt.load_renderer(str(subject.folder()))
    return renderer_of(
        subject.judge(),
        directory=subject.folder(),
        chat_template=subject.source(),
        template_kwargs=dict(subject.kwargs) or None,
    )


_qwen = Dialect(calls=d.hermes, stop=CHATML)
_plain_qwen = Dialect(calls=d.hermes, stop=CHATML, think=None)
_coder = Dialect(calls=d.function_xml, stop=CHATML, think=None)
_qwen35 = Dialect(calls=d.function_xml, stop=CHATML, before_calls="\n\n")
_k2v3 = Dialect(calls=d.hermes, stop=CHATML, think=("<think>\n", "\n</think>\n"))
_glm45 = Dialect(calls=d.arg_pairs, stop="<|user|>", call_stop="<|observation|>", think=("\n<think>", "</think>\n"))
_glm47 = Dialect(
    calls=d.tight_pairs, stop="<|user|>", call_stop="<|observation|>", think=("<think>", "</think>"), before_calls=""
)
_kimi2 = Dialect(calls=d.kimi, stop=CHATML, think=None, before_calls="", ids=_kimi)
_kimi25 = Dialect(calls=d.kimi, stop=CHATML, think=("<think>", "</think>"), before_calls="", ids=_kimi)
_minimax = Dialect(calls=d.minimax, stop="[e~[")
_EOS = "<｜end▁of▁sentence｜>"
_ds3 = Dialect(calls=d.deepseek_fenced, stop=_EOS, think=None, before_calls="")
_ds31 = Dialect(calls=d.deepseek_bare, stop=_EOS, think=None, before_calls="")
_ds31_thinking = Dialect(calls=d.deepseek_bare, stop=_EOS, think=("<think>", "</think>"), before_calls="")
_r1 = Dialect(calls=d.deepseek_fenced, stop=_EOS, think=("<think>\n", "\n</think>\n\n"), before_calls="")
_ds32 = Dialect(
    calls=partial(d.dsml, block="function_calls"), stop=_EOS, think=("<think>", "</think>"), before_calls="\n\n"
)
_ds4 = Dialect(calls=partial(d.dsml, block="tool_calls"), stop=_EOS, think=("<think>", "</think>"), before_calls="\n\n")
_nemotron = Dialect(calls=d.function_xml, stop=CHATML, think=("<think>\n", "\n</think>\n"))
_harmony = Harmony(calls=d.harmony_call, stop="<|return|>", call_stop="<|call|>", parallel=False, text_with_calls=False,
                   closes={"<|return|>": "<|end|>"})  # fmt: skip
_harmony_talks = replace(_harmony, text_with_calls=True)
_inkling = Inkling(calls=d.hermes, stop="<|content_model_end_sampling|>")
_llama = Dialect(calls=d.llama, stop="<|eot_id|>", think=None, parallel=False, text_with_calls=False)
_nemo = Dialect(calls=d.mistral_list, stop="</s>", think=None, text_with_calls=False, ids=_short)
_mistral_each = Dialect(calls=d.mistral_each, stop="</s>", think=None, before_calls="", ids=_short)
_gemma = Dialect(calls=None, stop="<end_of_turn>", think=None)

OWN = (
    Subject(name="own-qwen3", family="qwen3", tokenizer="own:qwen3-like", dialect=_qwen),
    Subject(name="own-k2v3", family="k2v3", tokenizer="own:k2v3-like", dialect=_k2v3),
    Subject(name="own-glm", family="glm", tokenizer="own:glm-like", dialect=_glm47),
    Subject(name="own-minimax", family="minimax-m2", tokenizer="own:minimax-like", dialect=_minimax),
    Subject(name="own-kimi", family="kimi-k2", tokenizer="own:kimi-like", dialect=_kimi25),
    Subject(name="own-deepseek", family="deepseek-v3.1", tokenizer="own:deepseek-like", dialect=_ds31_thinking),
    Subject(name="own-inkling", family="inkling", tokenizer="own:inkling-like", dialect=_inkling),
    Subject(name="own-harmony", family="harmony", tokenizer="own:harmony-like", dialect=_harmony),
)
REAL = (
    Subject(name="qwen2.5", family="qwen2.5", tokenizer="real:qwen2.5", dialect=_plain_qwen),
    Subject(name="qwen3", family="qwen3", tokenizer="real:qwen3", dialect=_qwen),
    Subject(name="qwen3-2507-instruct", family="qwen3", tokenizer="real:qwen3", template="trl/qwen3_instruct_2507.jinja",
            dialect=_plain_qwen),
    Subject(name="qwen3-2507-thinking", family="qwen3", tokenizer="real:qwen3", template="xinference/Qwen3-Next-Thinking",
            dialect=Dialect(calls=d.hermes, stop=CHATML)),
    Subject(name="qwen3-next-instruct", family="qwen3", tokenizer="real:qwen3", template="xinference/Qwen3-Next-Instruct",
            dialect=_plain_qwen),
    Subject(name="qwen3-coder", family="qwen3-coder", tokenizer="real:qwen3-coder", dialect=_coder),
    Subject(name="qwq", family="qwen3", tokenizer="real:qwen3", template="llama.cpp/Qwen-QwQ-32B.jinja",
            dialect=Dialect(calls=d.hermes, stop=CHATML)),
    Subject(name="qwen3.5", family="qwen3.5", tokenizer="real:qwen3.5", dialect=_qwen35),
    Subject(name="qwen3.6", family="qwen3.5", tokenizer="real:qwen3.5", template="trl/qwen3_6.jinja", dialect=_qwen35),
    Subject(name="glm-4.5", family="glm", tokenizer="real:glm-4.6", template="xinference/glm-4.5", dialect=_glm45),
    Subject(name="glm-4.6", family="glm", tokenizer="real:glm-4.6", dialect=_glm45),
    Subject(name="glm-4.7", family="glm", tokenizer="real:glm-4.6", template="llama.cpp/GLM-4.7-Flash.jinja", dialect=_glm47),
    Subject(name="glm-5", family="glm", tokenizer="real:glm-4.6", template="xinference/glm-5.1", dialect=_glm47),
    Subject(name="kimi-k2", family="kimi-k2", tokenizer="real:kimi-k2", dialect=_kimi2),
    Subject(name="kimi-k2.5", family="kimi-k2", tokenizer="standin", template="xinference/Kimi-K2.5", dialect=_kimi25),
    Subject(name="kimi-k2.6", family="kimi-k2", tokenizer="standin", template="ours/Kimi-K2.6", dialect=_kimi25),
    Subject(name="minimax-m2", family="minimax-m2", tokenizer="standin", template="llama.cpp/MiniMax-M2.jinja", dialect=_minimax),
    Subject(name="minimax-m2.5", family="minimax-m2", tokenizer="standin", template="xinference/MiniMax-M2.5", dialect=_minimax),
    Subject(name="minimax-m2.7", family="minimax-m2", tokenizer="standin", template="xinference/MiniMax-M2.7", dialect=_minimax),
    Subject(name="deepseek-v3", family="deepseek-v3", tokenizer="real:deepseek-v3.1", template="xinference/deepseek-prover-v2",
            dialect=_ds3),
    Subject(name="deepseek-r1", family="deepseek-v3", tokenizer="real:deepseek-v3.1", template="xinference/deepseek-r1-0528",
            dialect=_r1),
    Subject(name="deepseek-v3.1", family="deepseek-v3.1", tokenizer="real:deepseek-v3.1", dialect=_ds31),
    Subject(name="deepseek-v3.1-thinking", family="deepseek-v3.1", tokenizer="real:deepseek-v3.1", kwargs={"thinking": True},
            dialect=_ds31_thinking),
    Subject(name="deepseek-v3.2", family="deepseek-v3.2", tokenizer="standin", template="llama.cpp/deepseek-ai-DeepSeek-V3.2.jinja",
            kwargs={"thinking": True}, dialect=_ds32),
    Subject(name="deepseek-v4", family="deepseek-v4", tokenizer="real:deepseek-v4", template="llama.cpp/deepseek-ai-DeepSeek-V4.jinja",
            kwargs={"thinking": True}, dialect=_ds4),
    Subject(name="inkling", family="inkling", tokenizer="standin", template="miles/inkling_fixed.jinja", dialect=_inkling),
    Subject(name="nemotron-3", family="nemotron-3", tokenizer="real:nemotron-3", dialect=_nemotron),
    Subject(name="gpt-oss", family="harmony", tokenizer="real:gpt-oss", template="ours/gpt-oss", dialect=_harmony_talks),
    Subject(name="gpt-oss-shipped", family="harmony", tokenizer="real:gpt-oss", template="trl/gptoss.jinja", dialect=_harmony),
    Subject(name="llama-3.2", family="llama-3", tokenizer="real:llama-3.2", dialect=_llama),
    Subject(name="llama-3.1", family="llama-3", tokenizer="real:llama-3.2", template="llama.cpp/meta-llama-Llama-3.1-8B-Instruct.jinja",
            dialect=_llama),
    Subject(name="mistral-nemo", family="mistral", tokenizer="real:mistral-nemo", dialect=_nemo),
    Subject(name="mistral-small", family="mistral", tokenizer="standin", template="llama.cpp/Mistral-Small-3.2-24B-Instruct-2506.jinja",
            dialect=_mistral_each),
    Subject(name="gemma-3", family="gemma-3", tokenizer="real:gemma-3", dialect=_gemma, roles=frozenset({"user"})),
    Subject(name="hermes", family="hermes", tokenizer="standin", template="llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
            dialect=_plain_qwen),
)  # fmt: skip
BY_NAME = {subject.name: subject for subject in (*OWN, *REAL)}
