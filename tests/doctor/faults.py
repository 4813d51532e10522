"""The seeded faults: each with the name that the doctor should give it, and how to build an engine that has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.doctor import engines as e
from tests.doctor.seventh_set import LastSlotUnwritten, Retokenised
from tokentrue.doctor import Reference
from tokentrue.doctor.reference import load_model
from tokentrue.protocols import Provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`served` is None for an engine in this process; `server` is a stand-in to be started."""

    model: Path = e.CALCULATOR
    provider: Provider | None = None
    server: e.RoutedStandIn | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    adapter: Path | None = None

    def reference(self) -> Reference:
        return Reference.load(self.model, adapter=self.adapter)


def tiny_model(folder: Path, kind: str) -> Path:
    """A small random model of another architecture, with the calculator's tokenizer and template."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "vocab_size": 659, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.15, "eos_token_id": 2, "bos_token_id": None,
    }  # fmt: skip
    model: Any
    if kind == "bias":
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module.bias is not None:
                module.bias.data.normal_(std=0.5)
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(e.CALCULATOR)).save_pretrained(folder)
    return folder


def adapter_of(folder: Path, model: Any) -> Path:
    """A PEFT adapter on the query projections."""
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(4)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            rows, columns = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, columns) * 0.2
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 4) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    return folder


def _hf(change: Callable[[Any], Any]) -> Callable[[Path], Case]:
    return lambda folder: Case(provider=e.TamperedProvider(change(e.calculator())))


def _tampered(**how: Any) -> Callable[[Path], Case]:
    return lambda folder: Case(provider=e.TamperedProvider(e.calculator(), **how))


def _of(kind: str, change: Callable[[Any], Any]) -> Callable[[Path], Case]:
    def build(folder: Path) -> Case:
        model = tiny_model(folder / kind, kind)
        return Case(model=model, provider=e.TamperedProvider(change(load_model(model))))

    return build


def _server(**how: Any) -> Callable[[Path], Case]:
    return lambda folder: Case(server=e.RoutedStandIn(e.calculator(), **how))


def _every(fault: str) -> Callable[[Path], Case]:
    def build(folder: Path) -> Case:
        server = e.RoutedStandIn(e.calculator())
        server.every = fault
        return Case(server=server)

    return build


def _other_template(folder: Path) -> Case:
    template = (e.CALCULATOR / "chat_template.jinja").read_text()
    assert "user" in template
    changed = "{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}" + template
    return Case(server=e.RoutedStandIn(e.calculator(), template=changed))


def _other_tokenizer(folder: Path) -> Case:
    """Another revision of the tokenizer: the last merges are gone."""
    revised = folder / "revised"
    revised.mkdir()
    for file in ("tokenizer_config.json", "chat_template.jinja", "config.json"):
        (revised / file).write_text((e.CALCULATOR / file).read_text())
    spec = json.loads((e.CALCULATOR / "tokenizer.json").read_text())
    spec["model"]["merges"] = spec["model"]["merges"][:-80]
    (revised / "tokenizer.json").write_text(json.dumps(spec))
    return Case(server=e.RoutedStandIn(e.calculator(), tokenizer=revised))


def _stale(folder: Path) -> Case:
    old = folder / "old"
    previous = e.perturbed(e.calculator())
    previous.save_pretrained(old)
    return Case(provider=e.TamperedProvider(previous), options={"previous": old})


def _adapter(folder: Path) -> Case:
    return Case(provider=e.TamperedProvider(e.calculator()), adapter=adapter_of(folder / "adapter", e.calculator()))


FAULTS: dict[str, tuple[str, Callable[[Path], Case]]] = {
    "other chat template": ("template", _other_template),
    "other tokenizer revision": ("tokenizer", _other_tokenizer),
    "swapped special token": ("special_tokens", _server(swap={2: 1})),
    "raw log-probabilities": (
        "raw_logprobs",
        lambda folder: Case(provider=e.TamperedProvider(m := e.calculator(), after=e.raw_top(m))),
    ),
    "temperature ignored": (
        "temperature_ignored",
        _tampered(before=lambda prompt, s: (prompt, s if not s.temperature else _warm(s))),
    ),
    "filters not in the log-probabilities": (
        "filters_ignored",
        lambda folder: Case(provider=e.UnfilteredProvider(e.calculator())),
    ),
    "three decimals on the wire": ("wire_precision", _tampered(after=e.rounded)),
    "bfloat16 on the wire": ("wire_precision", _tampered(after=e.in_bfloat16)),
    "probabilities in float16 on the wire": ("wire_precision", _tampered(after=e.probabilities_in_half)),
    "last slot of a finished request unwritten": (
        "prefix_cache",
        lambda folder: Case(provider=LastSlotUnwritten(e.calculator(), "float32")),
    ),
    "ids decoded and encoded again": (
        "prompt_changed",
        lambda folder: Case(provider=Retokenised(e.calculator(), "float32")),
    ),
    "sentinel for a missing log-probability": ("bad_logprobs", _every("sentinel")),
    "one token too many in the prompt": ("bos_added", _every("recount")),
    "log-probabilities off by one": ("off_by_one", _tampered(after=e.shifted_by_one)),
    "context cut off": ("context_truncated", _tampered(before=e.truncated(128))),
    "data race": ("unstable", lambda folder: Case(provider=e.Unstable(e.calculator()))),
    "batch-variant kernel": ("batch_variant", lambda folder: Case(provider=e.Neighbours(e.calculator()))),
    "stale prefix cache": (
        "prefix_cache",
        lambda folder: Case(provider=e.StaleCache(m := e.calculator(), e.perturbed(m))),
    ),
    "bfloat16": ("dtype_bfloat16", _hf(lambda m: m.bfloat16())),
    "float16": ("dtype_float16", _hf(lambda m: m.half())),
    "int8 weights": ("int8_weights", _hf(lambda m: e.quantise(m, e.to_int8))),
    "float8 weights": ("fp8_weights", _hf(lambda m: e.quantise(m, e.to_fp8))),
    "float8 KV cache": ("fp8_kv_cache", lambda folder: Case(provider=e.QuantisedCacheProvider(e.calculator()))),
    "rope theta": ("rope", _hf(lambda m: e.with_rope(m, 1_000_000.0))),
    "dropped biases": ("bias_dropped", _of("bias", e.drop_biases)),
    "tied output layer": ("tied_head", _of("untied", e.tie_head)),
    "stale weights, previous known": ("stale_weights", _stale),
    "stale weights": ("unknown", _hf(e.perturbed)),
    "adapter not loaded": ("adapter_missing", _adapter),
}


def _warm(sampling: Any) -> Any:
    from dataclasses import replace

    return replace(sampling, temperature=1.0)
