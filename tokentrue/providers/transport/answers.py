"""What an engine may answer: one table of typed records. Anything else is an `EngineContractError` with the engine's
own words.

msgspec decodes and checks in one pass; an answer of another shape is named by its path
(`$.meta_info.completion_tokens`).
Unknown fields are ignored: engines add them with every release.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from tokentrue.errors import EngineContractError, EngineRejected
from tokentrue.providers.transport.http import rejected
from tokentrue.types import UNVERSIONED

T = TypeVar("T")
MAX_VERSION = 2**63 - 1  # what the journal's integer column holds
QUOTED_BYTES = 200


class EngineFault(msgspec.Struct):
    """The error object of both engines; some versions send a plain text in its place."""

    message: str | None = None


class SGLangFinish(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class SGLangMeta(msgspec.Struct):
    """`output_token_logprobs` rows are (log-probability, id, text)."""

    completion_tokens: int
    output_token_logprobs: list[tuple[float | None, int, str | None]]
    prompt_tokens: int | None = None
    finish_reason: SGLangFinish | str | None = None
    weight_version: str | int | None = None
    output_token_sampling_logprobs: list[float | None] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] | None = None
    routed_experts: str | None = None


class SGLangAnswer(msgspec.Struct):
    """A whole answer of /generate, or one event of its stream."""

    meta_info: SGLangMeta | None = None
    output_ids: list[int] | None = None
    error: EngineFault | str | None = None


class SGLangInfo(msgspec.Struct):
    """/model_info, which older servers call /get_model_info."""

    model_path: str | None = None
    weight_version: str | int | None = None


class SGLangUpdate(msgspec.Struct):
    success: bool = False
    message: str | None = None


class VLLMTop(msgspec.Struct):
    token_id: int
    logprob: float | None


class VLLMToken(msgspec.Struct):
    token_id: int
    logprob: float | None
    top_logprobs: list[VLLMTop] = []


class VLLMLogprobs(msgspec.Struct):
    """Rows on the token route (`content`); columns on /v1/completions, where tokens are spelled "token_id:N"."""

    content: list[VLLMToken] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class VLLMVersions(msgspec.Struct):
    start: int
    end: int
    version: str | int


class VLLMChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: VLLMLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VLLMVersions] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class VLLMUsage(msgspec.Struct):
    prompt_tokens: int | None = None


class VLLMAnswer(msgspec.Struct):
    """A whole answer, or one event of a stream; the event with the usage has no choices."""

    choices: list[VLLMChoice] = []
    usage: VLLMUsage | None = None
    error: EngineFault | str | None = None


class VLLMScored(msgspec.Struct):
    logprob: float | None = None


class VLLMScoredChoice(msgspec.Struct):
    """By prompt token: the ids that have a log-probability there, the prompt's own among them; null for the first."""

    prompt_logprobs: list[dict[str, VLLMScored] | None] | None = None


class VLLMScores(msgspec.Struct):
    choices: list[VLLMScoredChoice] = []


class VLLMModel(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class VLLMModels(msgspec.Struct):
    data: list[VLLMModel]


class VLLMWeights(msgspec.Struct):
    """/weight_info."""

    weight_version: str | int | None = None


class Tokenized(msgspec.Struct):
    """/tokenize of both engines."""

    tokens: list[int]


def decode_answer(data: bytes, kind: type[T], *, where: str) -> T:
    """`data` as a record of the table."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # a ValidationError is one, too
        words = data[:QUOTED_BYTES].decode("utf-8", "replace")
        raise EngineContractError(f"{where} answered something unexpected ({error}): {words}") from error


def raise_fault(engine: str, fault: EngineFault | str | None) -> None:
    """Raises where the engine reported an error inside a 200 answer or a stream."""
    if fault is not None:
        raise rejected(f"{engine}: {fault if isinstance(fault, str) else fault.message or 'error without a message'}")


def version_from(text: str | int | None) -> int:
    """The integer at the end of an engine's weight version ("7", "step-7"); engines start with a word such as
    "default"."""
    digits = re.search(r"(\d+)\s*$", str(text)) if text is not None else None
    version = int(digits.group(1)) if digits else UNVERSIONED
    if version > MAX_VERSION:
        raise EngineContractError(f"weight version {text!r} does not fit 64 bits; publish versions that count steps")
    return version


def require_version(engine: str, reported: int, version: int) -> None:
    """Raises where an engine does not say that it has the weights which were just loaded."""
    if reported != version:
        raise EngineRejected(f"{engine} reports weight version {reported} after loading version {version}")
