"""What the probes found, as data: a verdict, a figure, the likely cause, the cure, and how sure the probe is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Literal, TypeAlias

from tokentrue.records import record

Confidence: TypeAlias = Literal["high", "medium", "low"]


class Verdict(StrEnum):
    OK = "ok"
    FAULT = "fault"
    CANNOT_TELL = "cannot_tell"


@record
class Finding:
    """One probe's answer. `fault` is the stable name of what is wrong, one of `CAUSES`; empty where nothing is."""

    probe: str = ""  # the name of the probe, which `exam.probe` fills in
    verdict: Verdict
    figure: str
    fault: str = ""
    detail: str = ""
    confidence: Confidence = "high"

    @property
    def cause(self) -> str:
        return CAUSES[self.fault][0] if self.fault else ""

    @property
    def cure(self) -> str:
        return CAUSES[self.fault][1] if self.fault else ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "verdict": self.verdict.value, "cause": self.cause, "cure": self.cure}


def ok(figure: str, *, detail: str = "", probe: str = "") -> Finding:
    return Finding(probe=probe, verdict=Verdict.OK, figure=figure, detail=detail)


def fault(name: str, figure: str, *, confidence: Confidence = "high", detail: str = "", probe: str = "") -> Finding:
    return Finding(probe=probe, verdict=Verdict.FAULT, figure=figure, fault=name, confidence=confidence, detail=detail)


def cannot_tell(why: str, *, figure: str = "-", probe: str = "") -> Finding:
    return Finding(probe=probe, verdict=Verdict.CANNOT_TELL, figure=figure, detail=why)


@record
class DoctorReport:
    """All findings of one run, in the order of the probes."""

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
    """Turns the consequences of another fault into "cannot tell": one fault shows in several probes."""
    settled: list[Finding] = []
    for finding in findings:
        earlier = next((one.fault for one in findings if finding.fault in FOLLOWS.get(one.fault, ())), None)
        if finding.verdict is Verdict.FAULT and earlier is not None:
            finding = cannot_tell(f"{finding.figure}; follows from {earlier}", probe=finding.probe)
        settled.append(finding)
    return settled


TABLE = """
# other
engine_refused | the engine refuses or breaks the probe's requests | read the engine's message in the detail and its log
tokenizer | the engine's tokenizer splits text differently | serve with the tokenizer files of the trainer's model directory
special_tokens | the engine's special tokens have other ids | serve with the tokenizer files of the trainer's model
template | the engine's chat template renders other ids | start the engine with the trainer's chat template (--chat-template)
other_model | the engine serves a model of another vocabulary | serve the model directory that the trainer loads
raw_logprobs | log-probabilities are of temperature 1, not of the sampled distribution | vLLM: --logprobs-mode processed_logprobs; SGLang: unset SGLANG_RETURN_ORIGINAL_LOGPROB
temperature_ignored | the engine samples at another temperature than it is asked for | check the engine's sampling defaults
wire_precision | log-probabilities lose digits between the engine and the client | return float32 log-probabilities in full; check proxies
bad_logprobs | log-probabilities are missing or sentinels | update the engine; do not replace them by a number
off_by_one | each log-probability belongs to the neighbouring token | align log-probabilities with the token that they score
unstable | the same request gives other numbers | turn off what is not deterministic in the engine; check for data races
# read
filters_ignored | log-probabilities under top-k or top-p are those before the filter | use an engine that renormalises (vLLM processed_logprobs), or train without filters
greedy_logprobs | greedy log-probabilities are not those of temperature 1 | do not train on greedy samples of this engine
penalties_ignored | log-probabilities under penalties are those before the penalty | use an engine that reports the penalised distribution, or sample without penalties
sampled_temperature | log-probabilities are of another temperature or logit scale | score at the temperature that was sampled with; compare logit_scale
# compared
prompt_changed | the engine does not process the ids that it was sent | send ids, not text, and turn off added special tokens
bos_added | the engine puts a beginning-of-sequence token before the prompt | turn off add_special_tokens (or add_bos_token)
context_truncated | the engine drops the beginning of long prompts | raise the engine's context length; turn off truncation
dtype_bfloat16 | the engine computes in bfloat16 | serve with the trainer's dtype, or expect this spread and correct for it
dtype_float16 | the engine computes in float16 | serve with the trainer's dtype, or expect this spread and correct for it
rope | the engine's rotary position settings differ | compare rope_theta and rope scaling of both configurations
bias_dropped | the engine ignores the biases of its linear layers | update the engine's model class; check the weight loader
tied_head | the engine uses the embedding as output layer | set tie_word_embeddings as the checkpoint has it
dtype_tf32 | the engine multiplies matrices in TF32 | turn TF32 off (torch.backends.cuda.matmul.allow_tf32)
head_dtype | the engine's output layer computes in a coarser dtype | compute logits in float32, as the trainer does
dtype_kv_cache | the engine's KV cache has a coarser dtype | set the engine's KV-cache dtype to the model's
attention_scale | the engine scales attention scores differently | compare head_dim and query_pre_attn_scalar; update the engine
sliding_window | the engine's attention window differs | compare sliding_window and layer_types of both configurations
decode_positions | sampled tokens have other positions than the model's | check position ids of decoding; update the engine
norm_epsilon | the engine's norms use another epsilon | compare rms_norm_eps of both configurations
norm_weight | the engine's norm weights are off by one | check the engine's model class: weight or 1 + weight
activation | the engine uses another activation function | compare hidden_act of both configurations
embedding_scale | the engine scales embeddings differently | check the engine's model class and its embedding multiplier
logit_softcap | the engine caps logits differently | compare final_logit_softcapping of both configurations
vocab_padding | unused rows of the output layer take part in the softmax | mask padded vocabulary rows before the softmax
stop_banned | the engine removes stop tokens before the softmax | unset min_tokens and ignore_eos, or score the same way
sampled_penalty | the engine applies a penalty that nobody asked for | check the engine's sampling defaults (generation_config.json)
layer_skipped | the engine skips a layer | check the engine's weight loader and pipeline split
layer_order | two layers of the engine are exchanged | check the engine's weight loader and pipeline split
experts_per_token | the engine uses another number of experts a token | compare num_experts_per_tok of both configurations
expert_weights | the engine weighs experts differently | compare norm_topk_prob and routed_scaling_factor of both configurations
router_dtype | the engine's router computes in a coarser dtype | run the router in float32, or record the routing and replay it
shared_expert | the engine leaves the shared expert out | update the engine's model class; check the weight loader
adapter_missing | the engine samples without the adapter, or scales it differently | load the adapter; compare lora_alpha and r; or publish merged weights
stale_weights | the engine still has previous weights, in all of the model or in a part | await the weight update; check that every replica took all of it
unknown | the engine computes something else than the model directory | make the measurement that the detail names; do not train on these numbers yet
routing | the engine's router chooses other experts | record the routing and replay it in the trainer
sampled_filters | tokens are drawn under a filter that nobody asked for | check the engine's sampling defaults (generation_config.json)
# repeat
batch_variant | numbers depend on what else is in the batch, beyond rounding | use batch-invariant kernels, or update the engine
prefix_cache | a cached prefix gives other numbers than a computed one | flush the prefix cache at every weight update; turn off KV-cache quantisation
prefill_decode | prefill and decode disagree beyond rounding | check chunked prefill, attention backend and KV-cache dtype
pause | a paused generation resumes with other numbers | update the engine; abort generations before pausing it
preemption | a preempted generation resumes with other numbers | give the KV cache more memory; update the engine
"""
"""Every fault by its stable name: the cause, the cure. "compared": found with the reference's numbers; "read": by what
reported numbers mean; "repeat": the engine with itself."""


def _read_table() -> Iterator[tuple[str, str, str, str]]:
    for section in TABLE.split("# ")[1:]:
        kind, *lines = section.strip().splitlines()
        for name, cause, cure in (line.split(" | ") for line in lines):
            yield kind, name, cause, cure
    for kind, words in {"int8": "int8", "int4": "4 bits", "fp8": "float8"}.items():
        for part, cure in {
            "weights": "serve unquantised weights, or correct for the mismatch",
            "KV cache": "set the engine's KV-cache dtype to the model's",
        }.items():
            name = f"{kind}_{part.lower().replace(' ', '_')}"
            yield "compared", name, f"the engine's {part} {'is' if 'KV' in part else 'are'} quantised to {words}", cure


_ROWS = list(_read_table())
CAUSES: Mapping[str, tuple[str, str]] = {name: (cause, cure) for _, name, cause, cure in _ROWS}
COMPARED, READ, REPEATS = (
    tuple(name for kind, name, *_ in _ROWS if kind == wanted) for wanted in ("compared", "read", "repeat")
)
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    # A cause that explains the numbers explains what else is odd about them.
    **{name: (*REPEATS, *READ, "routing") for name in COMPARED if name not in ("unknown", "routing")},
    "tokenizer": ("special_tokens", "template"),
    "special_tokens": ("template",),
    "off_by_one": (*COMPARED, *READ, *REPEATS),
    # Reports before the temperature are before filters and penalties, too.
    "raw_logprobs": ("sampled_temperature", "filters_ignored", "penalties_ignored"),
    "temperature_ignored": ("raw_logprobs", "filters_ignored", "penalties_ignored"),
    "sampled_temperature": ("greedy_logprobs",),
    "wire_precision": (*COMPARED, *REPEATS),
    "unstable": (*REPEATS, *COMPARED, *READ, "raw_logprobs", "temperature_ignored"),
    **dict.fromkeys(
        ("batch_variant", "prefix_cache"), ("unknown", "prefill_decode", *READ, "raw_logprobs", "temperature_ignored")
    ),
    "unknown": ("prefill_decode",),  # a symptom of whatever it is
    "routing": ("unknown",),
    "pause": ("preemption",),
}
"""What each fault explains: findings of these names beside it are its consequences."""
