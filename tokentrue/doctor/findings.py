"""What the probes found, as data: verdict, figure, likely cause, cure, and how sure the probe is."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Literal

from tokentrue.records import record

DRAWS = "meaning: draws follow the reported distribution"
Confidence = Literal["high", "medium", "low"]


class Verdict(StrEnum):
    OK = "ok"
    FAULT = "fault"
    CANNOT_TELL = "cannot_tell"


@record
class Finding:
    """One probe's answer. `fault` is a stable name, one of `CAUSES`; empty where nothing is wrong."""

    probe: str = ""  # the name of the probe, which `exam.probe` fills in
    verdict: Verdict
    figure: str
    fault: str = ""
    detail: str = ""
    confidence: Confidence = "high"
    alternatives: tuple[str, ...] = ()  # other names that no measurement here separates from `fault`

    @property
    def cause(self) -> str:
        return "; or ".join(CAUSES[name][0] for name in (self.fault, *self.alternatives) if name)

    @property
    def cure(self) -> str:
        return CAUSES[self.fault][1] if self.fault else ""

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "verdict": self.verdict.value, "cause": self.cause, "cure": self.cure}


def ok(figure: str, *, detail: str = "", probe: str = "") -> Finding:
    return Finding(probe=probe, verdict=Verdict.OK, figure=figure, detail=detail)


def fault(
    name: str, figure: str, *, confidence: Confidence = "high", detail: str = "", alternatives: tuple[str, ...] = ()
) -> Finding:
    return Finding(
        verdict=Verdict.FAULT,
        figure=figure,
        fault=name,
        confidence=confidence,
        detail=detail,
        alternatives=alternatives,
    )


def cannot_tell(why: str, *, figure: str = "-", probe: str = "") -> Finding:
    return Finding(probe=probe, verdict=Verdict.CANNOT_TELL, figure=figure, detail=why)


@record
class DoctorReport:
    engine: str
    model: str
    facts: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.FAULT)

    @property
    def exit_code(self) -> int:
        return 1 if self.faults else 0

    @property
    def summary(self) -> str:
        if self.faults:
            first = self.faults[0]
            more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
            return f"{first.cause}{more}; {first.cure}"
        unknown = sum(finding.verdict is Verdict.CANNOT_TELL for finding in self.findings)
        return f"no fault found by {len(self.findings) - unknown} probes; {unknown} could not tell"

    def to_json(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "model": self.model,
            "ok": not self.faults,
            "summary": self.summary,
            "facts": dict(self.facts),
            "findings": [finding.to_json() for finding in self.findings],
        }


def settle(findings: Sequence[Finding]) -> list[Finding]:
    """One fault shows in several probes: its consequences become "cannot tell"."""
    follows, settled = dict(FOLLOWS), list[Finding]()
    if any(one.probe == DRAWS and one.verdict is Verdict.OK for one in findings):
        # Reports of the temperature that the engine samples at are right.
        follows["temperature_ignored"] = (*follows["temperature_ignored"], "sampled_temperature")
    for one in findings:
        earlier = next((other.fault for other in findings if one.fault in follows.get(other.fault, ())), None)
        why = f"{one.figure}; follows from {earlier}"
        settled.append(one if earlier is None else cannot_tell(why, probe=one.probe))
    return settled


TABLE = """
# other
engine_refused | the engine refuses or breaks the probe's requests | read the engine's message in the detail and its log
tokenizer | the engine's tokenizer splits text differently | serve with the tokenizer files of the trainer's model
special_tokens | the engine's special tokens have other ids | serve with the tokenizer files of the trainer's model
template | the engine's chat template renders other ids | start the engine with the trainer's template (--chat-template)
other_model | the engine serves a model of another vocabulary | serve the model directory that the trainer loads
raw_logprobs | log-probabilities are of temperature 1, not of the sampled distribution |
  vLLM: --logprobs-mode processed_logprobs; SGLang: unset SGLANG_RETURN_ORIGINAL_LOGPROB
temperature_ignored | the engine samples at another temperature than asked for | check its sampling defaults
wire_precision | log-probabilities lose digits between the engine and the client | return float32 in full; check proxies
bad_logprobs | log-probabilities are missing, cut off or sentinels | update the engine; do not replace them by a number
off_by_one | each log-probability belongs to the neighbouring token | align them with the token that they score
unstable | the same request gives other numbers | turn off what is not deterministic in the engine; check for data races
# read
filters_ignored | log-probabilities are those before top-k or top-p | vLLM: processed_logprobs; or set no filters
sampled_temperature | log-probabilities are of another temperature | score at the sampled one; compare logit_scale
# compared
other_reports | log-probabilities are of another distribution than samples | report the target model's, no draft's
log_base | log-probabilities are no natural logarithms | convert them to base e before training
prompt_changed | the engine does not process the ids that it was sent | send ids, not text, and add no special ones
bos_added | the engine puts a token before the prompt | turn off add_special_tokens (or add_bos_token)
context_truncated | the engine drops the beginning of long prompts | raise its context length; turn off truncation
dtype_bfloat16 | the engine computes in bfloat16 | serve with the trainer's dtype, or correct for this spread
dtype_float16 | the engine computes in float16 | serve with the trainer's dtype, or correct for this spread
dtype_tf32 | the engine multiplies matrices in TF32 | turn TF32 off (torch.backends.cuda.matmul.allow_tf32)
dtype_kv_cache | the engine's KV cache has a coarser dtype | set the engine's KV-cache dtype to the model's
head_dtype | the engine's output layer computes in a coarser dtype | compute logits in float32, as the trainer does
rope | the engine's rotary position settings differ | compare rope_theta and rope scaling of both configurations
bias_dropped | the engine ignores the biases of its linear layers | check its model class and its weight loader
tied_head | the engine uses the embedding as output layer | set tie_word_embeddings as the checkpoint has it
attention_scale | the engine scales attention scores differently | compare head_dim and query_pre_attn_scalar
sliding_window | the engine's attention window differs | compare sliding_window and layer_types of both configurations
decode_positions | tokens have other positions than the model's | check position ids of decoding and of chunks
norm_epsilon | the engine's norms use another epsilon | compare rms_norm_eps of both configurations
norm_missing | the engine leaves norms or their weights out | check the engine's model class and its weight loader
activation | the engine uses another activation function | compare hidden_act of both configurations
embedding_scale | the engine scales embeddings differently | check the engine's model class and its embedding multiplier
logit_softcap | the engine caps logits differently | compare final_logit_softcapping of both configurations
vocab_padding | unused rows of the output layer take part in the softmax | mask padded rows before the softmax
stop_banned | the engine removes stop tokens before the softmax | unset min_tokens and ignore_eos, or score the same way
sampled_penalty | the engine applies a penalty that nobody asked for | check its generation_config.json
sampled_filters | tokens are drawn under a filter that nobody asked for | check its generation_config.json
logit_bias | the engine adds a bias to some tokens' logits | check logit_bias and its sampling defaults
attention_mask | tokens attend to other places than they should | check attention backend, page tables and masks
residual | the engine adds up its residual stream differently | update the engine's model class
weights_missing | weights of the engine are 0 in a part of the model | check the weight loader's list of missing tensors
weight_scale | what a part of the engine's model returns is scaled | check scales of quantised weights and caches
expert_order | experts are in another order or place | check the expert map of expert parallelism and the weight loader
layer_skipped | the engine skips a layer or a part of one | check the engine's weight loader and pipeline split
layer_order | two layers of the engine are exchanged | check the engine's weight loader and pipeline split
partial_sum | a part of a layer's sum is missing | check the all-reduce of tensor parallelism in these layers
projection_order | heads or projections are in another order | check how the weight loader fuses and splits them
experts_per_token | another number of experts a token is used | compare num_experts_per_tok of both configurations
expert_weights | the engine weighs experts differently | compare norm_topk_prob and routed_scaling_factor
router_dtype | the router computes in a coarser dtype | run it in float32, or record the routing and replay it
adapter_missing | the engine scales the adapter differently, or to 0 | load the adapter; compare lora_alpha and r
stale_weights | the engine still has previous weights, all or some | check that each replica took the whole update
# left
unknown | the engine computes something else than the model directory | make the measurement that the detail names
routing | the engine's router chooses other experts | record the routing and replay it in the trainer
# images
image_count | the engine makes another number of tokens of an image | serve with the trainer's preprocessor_config.json
image_ignored | the engine's model does not see the images | check that it serves the vision tower; update the engine
image_pixels | the engine makes other pixels of an image | compare its image processor and library versions
image_cache | the engine shows the model another image, or one that old weights encoded | reset its prefix and encoder caches
image_positions | the engine's positions (M-RoPE) in or after images differ | update the engine; compare mrope_section
# repeat
batch_variant | numbers depend on what else is in the batch, beyond rounding | use batch-invariant kernels
prefix_cache | a cached prefix gives other numbers than a computed one | flush the prefix cache at every weight update
prefill_decode | prefill and decode disagree beyond rounding | check chunked prefill, attention backend, KV dtype
"""
QUANTISED = {"int8": "int8", "int4": "4 bits", "fp8": "float8"}
_SECTIONS: dict[str, list[list[str]]] = {
    kind: [list[str](line.split(" | ")) for line in lines]
    for kind, *lines in (section.strip().splitlines() for section in TABLE.replace("|\n  ", "| ").split("# ")[1:])
}
for _kind, _words in QUANTISED.items():
    _weights = (
        f"the engine's weights are quantised to {_words}",
        "serve unquantised weights, or correct for the mismatch",
    )
    _cache = f"the engine's KV cache is quantised to {_words}", "set the engine's KV-cache dtype to the model's"
    _SECTIONS["compared"] += [[f"{_kind}_weights", *_weights], [f"{_kind}_kv_cache", *_cache]]
CAUSES: Mapping[str, tuple[str, str]] = {
    name: (cause, cure) for rows in _SECTIONS.values() for name, cause, cure in rows
}
"""Cause and cure of every fault. "read": by what reported numbers mean; "compared", "left": with the reference's;
"repeat": the engine with itself."""
READ, NAMED, LEFT, REPEATS = ([name for name, *_ in _SECTIONS[kind]] for kind in ("read", "compared", "left", "repeat"))
MEANING = (*READ, "raw_logprobs", "temperature_ignored")
FOLLOWS: Mapping[str, Sequence[str]] = {
    # A cause that explains the numbers explains what else is odd about them.
    **{name: (*REPEATS, *READ, "routing") for name in NAMED},
    "tokenizer": ("special_tokens", "template"),
    "special_tokens": ("template",),
    "off_by_one": (*NAMED, *LEFT, *READ, *REPEATS),
    # Reports before the temperature are before filters and penalties, too.
    "raw_logprobs": ("sampled_temperature", "filters_ignored"),
    "temperature_ignored": ("raw_logprobs", "filters_ignored"),
    "wire_precision": (*NAMED, *LEFT, *REPEATS),
    "unstable": (*REPEATS, *NAMED, *LEFT, *MEANING),
    **dict.fromkeys(("batch_variant", "prefix_cache"), ("unknown", "prefill_decode", *MEANING)),
    "unknown": ("prefill_decode",),  # a symptom of whatever it is
    "routing": ("unknown",),
}
"""What each fault explains: findings of these names beside it are its consequences."""
