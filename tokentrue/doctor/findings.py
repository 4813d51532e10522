"""What the probes found, as data: a verdict, a figure, the likely cause, the cure, and how sure the probe is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


DTYPES = ("dtype_bfloat16", "dtype_float16")
NUMBERS = ("other_weights", "rope", "int8_weights", "fp8_weights", "fp8_kv_cache", "routing")
REPEATS = ("batch_variant", "prefix_cache", "prefill_decode", "pause", "preemption")
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "tokenizer": ("special_tokens", "template"),
    "special_tokens": ("template",),
    "off_by_one": (*NUMBERS, *DTYPES, "sampled_temperature", "greedy_logprobs", "prefill_decode"),
    "raw_logprobs": ("sampled_temperature",),
    "temperature_ignored": ("raw_logprobs",),
    "wire_precision": (*NUMBERS, *DTYPES, "prefill_decode", "batch_variant"),
    "unstable": (*REPEATS, *NUMBERS, *DTYPES),
    "dtype_bfloat16": REPEATS,  # a coarser dtype rounds differently in every batch
    "dtype_float16": REPEATS,
    "batch_variant": (*NUMBERS, "prefill_decode"),
    "prefix_cache": (*NUMBERS, "prefill_decode"),
    "pause": ("preemption",),
    "sampled_temperature": ("greedy_logprobs",),
    "context_truncated": ("prefill_decode",),
}
"""What each fault explains: findings of these names beside it are its consequences."""

CAUSES: Mapping[str, tuple[str, str]] = {
    "engine_refused": ("the engine refuses or breaks the probe's requests", "read the engine's message in the detail and its log"),
    "tokenizer": ("the engine's tokenizer splits text differently", "serve with the tokenizer files of the trainer's model directory"),
    "special_tokens": ("the engine's special tokens have other ids", "serve with the tokenizer files of the trainer's model"),
    "template": ("the engine's chat template renders other ids", "start the engine with the trainer's chat template (--chat-template)"),
    "other_model": ("the engine serves a model of another vocabulary", "serve the model directory that the trainer loads"),
    "raw_logprobs": (
        "log-probabilities are of temperature 1, not of the sampled distribution",
        "vLLM: --logprobs-mode processed_logprobs; SGLang: unset SGLANG_RETURN_ORIGINAL_LOGPROB",
    ),
    "temperature_ignored": ("the engine samples at another temperature than it is asked for", "check the engine's sampling defaults"),
    "filters_ignored": (
        "log-probabilities under top-k or top-p are those before the filter",
        "use an engine that renormalises (vLLM processed_logprobs, SGLang's sampling mask), or train without filters",
    ),
    "greedy_logprobs": ("greedy log-probabilities are not those of temperature 1", "do not train on greedy samples of this engine"),
    "wire_precision": (
        "log-probabilities lose digits between the engine and the client",
        "return float32 log-probabilities in full; check proxies and the engine's log-softmax dtype",
    ),
    "bad_logprobs": ("log-probabilities are missing or sentinels", "update the engine; do not replace them by a number"),
    "off_by_one": ("each log-probability belongs to the neighbouring token", "align log-probabilities with the token that they score"),
    "prompt_changed": ("the engine does not process the ids that it was sent", "send ids, not text, and turn off added special tokens"),
    "bos_added": ("the engine puts a beginning-of-sequence token before the prompt", "turn off add_special_tokens (or add_bos_token)"),
    "context_truncated": ("the engine drops the beginning of long prompts", "raise the engine's context length; turn off truncation"),
    "unstable": ("the same request gives other numbers", "turn off what is not deterministic in the engine; check for data races"),
    "batch_variant": ("numbers depend on what else is in the batch, beyond rounding", "use batch-invariant kernels, or update the engine"),
    "prefix_cache": (
        "a cached prefix gives other numbers than a computed one",
        "flush the prefix cache at every weight update; turn off KV-cache quantisation",
    ),
    "prefill_decode": ("prefill and decode disagree beyond rounding", "check chunked prefill, attention backend and KV-cache dtype"),
    "pause": ("a paused generation resumes with other numbers", "update the engine; abort generations before pausing it"),
    "preemption": ("a preempted generation resumes with other numbers", "give the KV cache more memory; update the engine"),
    "penalties_ignored": (
        "log-probabilities under penalties are those before the penalty",
        "use an engine that reports the penalised distribution (vLLM processed_logprobs), or sample without penalties",
    ),
    "dtype_bfloat16": ("the engine computes in bfloat16", "serve with the trainer's dtype, or expect this spread and correct for it"),
    "dtype_float16": ("the engine computes in float16", "serve with the trainer's dtype, or expect this spread and correct for it"),
    "int8_weights": ("the engine's weights are quantised to int8", "serve unquantised weights, or correct for the mismatch"),
    "fp8_weights": ("the engine's weights are quantised to float8", "serve unquantised weights, or correct for the mismatch"),
    "fp8_kv_cache": ("the engine's KV cache is quantised to float8", "set the engine's KV-cache dtype to the model's"),
    "rope": ("the engine's rotary position settings differ", "compare rope_theta and rope scaling of both configurations"),
    "bias_dropped": ("the engine ignores the biases of its linear layers", "update the engine's model class; check the weight loader"),
    "tied_head": ("the engine uses the embedding as output layer", "set tie_word_embeddings as the checkpoint has it"),
    "adapter_missing": ("the engine samples without the adapter", "load the adapter, or publish merged weights"),
    "stale_weights": ("the engine still has the previous weights", "await the weight update; check that every replica took it"),
    "other_weights": (
        "the engine's weights are not those of the model directory",
        "publish again and await it: stale after an update, or another checkpoint",
    ),
    "routing": ("the engine's router chooses other experts", "record the routing and replay it in the trainer"),
    "sampled_filters": ("the samples were drawn with filters that the trainer does not apply", "record the kept ids; or sample without"),
    "sampled_temperature": ("the samples' log-probabilities are of another temperature", "score at the temperature that was sampled with"),
}  # fmt: skip
"""Every fault by its stable name: the cause and the cure in words."""
