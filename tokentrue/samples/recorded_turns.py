"""What a sample holds in `metadata.tokentrue`: a row for each turn on its path, and a seal, with which a third party
verifies it.

The certificate's chain binds ids, log-probabilities and versions; the seal binds mask, spans, reward, names, coverage,
rows, routing, sampling mask, top log-probabilities and images. Samples of other programs record no turns, or only
`given` and `sampled` of each.
"""

import json
from collections.abc import Sequence
from dataclasses import astuple
from hashlib import sha256
from typing import Annotated

import msgspec

from tokentrue.errors import FileFormatError, TokenContractError
from tokentrue.json_types import JsonObject
from tokentrue.records import record
from tokentrue.samples.shape import decode
from tokentrue.sessions.tree import Node
from tokentrue.types import PENALTIES, TRUNCATIONS, Count, Coverage, Sample, Sampling, is_temperature


class TurnRow(msgspec.Struct, kw_only=True):
    """`sampling`: settings that differ from the defaults; `versions`: (start, end, policy version)."""

    given: Count
    sampled: Count
    node: str | None = None
    temperature: float | None = None
    sampling: JsonObject = {}
    versions: list[tuple[int, int, int]] = []
    finish: str | None = None
    why: str | None = None
    projection: str | None = None


class MalformedCall(msgspec.Struct, kw_only=True):
    turn: Count
    status: str


class SampleRecord(msgspec.Struct, kw_only=True):
    leaf: str | None = None
    nodes: list[TurnRow] = []
    coverage: Coverage | None = None
    malformed_calls: list[MalformedCall] = []


@record
class RecordedTurn:
    start: int
    end: int
    row: TurnRow


def read_record(sample: Sample) -> SampleRecord:
    return decode(sample.metadata.get("tokentrue", {}), SampleRecord, f"sample {sample.sample_id}: metadata.tokentrue")


def read_turns(sample: Sample) -> list[RecordedTurn]:
    turns: list[RecordedTurn] = []
    at, name = 0, f"sample {sample.sample_id}"
    for row in read_record(sample).nodes:
        if row.temperature is not None and not is_temperature(row.temperature):
            raise TokenContractError(f"{name}: no turn can be scored at temperature {row.temperature}")
        start, at = at + row.given, at + row.given + row.sampled
        turns.append(RecordedTurn(start=start, end=at, row=row))
    if turns and at != len(sample.token_ids):
        raise TokenContractError(f"{name}: its recorded turns hold {at} tokens, the sample {len(sample.token_ids)}")
    return turns


def why_not_scorable(sample: Sample, turn: RecordedTurn) -> str:
    if penalties := ", ".join(name for name in PENALTIES if name in turn.row.sampling):
        cure = "a penalty depends on the text before the token, and no trainer scores it; sample without it"
        return f"sampled under {penalties}: {cure}"
    truncations = ", ".join(name for name in TRUNCATIONS if name in turn.row.sampling)
    if truncations and sample.sampling_mask is None:
        cure = "have it return its sampling mask (docs/training.md), or sample without filters"
        return f"sampled under {truncations}, and the engine did not report which ids were kept; {cure}"
    return ""


def scoring_temperatures(sample: Sample, default: float = 1.0) -> list[float]:
    """Each token's temperature; `default` if none is recorded and in greedy turns, which engines report at 1. Raises
    TokenContractError for a trained turn that cannot be scored."""
    found = [default] * len(sample.token_ids)
    for number, turn in enumerate(read_turns(sample)):
        if any(sample.loss_mask[turn.start : turn.end]) and (why := why_not_scorable(sample, turn)):
            raise TokenContractError(f"sample {sample.sample_id}, turn {number}: {why}")
        found[turn.start : turn.end] = [turn.row.temperature or default] * (turn.end - turn.start)
    return found


_SHAPING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "extra",
)  # fmt: skip
_DEFAULTS = Sampling()


class NodeRow(msgspec.Struct, kw_only=True):
    """A turn, the certificate's link after it, and which prompt the engine was sent (older files do not say). `copies`:
    ranges of its given tokens (start, end, node) that another node sampled."""

    node: str
    given: Count
    sampled: Count
    versions: list[tuple[int, int, int]] = []
    chain: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    prompt_sha256: str | None = None
    copies: tuple[tuple[Count, Count, str], ...] = ()


class SealedRecord(msgspec.Struct, kw_only=True):
    nodes: list[NodeRow]
    coverage: Coverage | None = None
    seal: str = ""


def read_sealed_record(sample: Sample) -> SealedRecord:
    if "tokentrue" not in sample.metadata:
        raise FileFormatError("metadata.tokentrue is missing: nothing to check against")
    return decode(sample.metadata["tokentrue"], SealedRecord, "metadata.tokentrue")


def node_rows(path: Sequence[Node]) -> list[JsonObject]:
    return list(map(_node_row, path))


def _node_row(node: Node) -> JsonObject:
    settings = {name: getattr(node.sampling, name) for name in _SHAPING}
    return {
        "node": node.id,
        "given": len(node.given_ids),
        "sampled": len(node.sampled_ids),
        "chain": node.chain.hex(),
        "versions": [[span.start, span.end, span.version] for span in node.versions],
        "finish": node.finish.value,
        "why": node.edge_reason,
        "projection": node.projection,
        "temperature": node.sampling.temperature,
        "sampling": {name: value for name, value in settings.items() if value != getattr(_DEFAULTS, name)},
        "prompt_sha256": node.prompt_digest.hex(),
        **({"copies": list(map(list, node.copies))} if node.copies else {}),
    }


def seal(sample: Sample) -> str:
    """SHA-256 over everything in a sample that its chain does not cover, except the seal."""
    own = {key: value for key, value in sample.metadata.get("tokentrue", {}).items() if key != "seal"}
    spans = [[s.start, s.end, s.kind, s.role, s.turn, s.policy_version, s.trainable, s.why] for s in sample.spans]
    held: JsonObject = {
        "sample_id": sample.sample_id,
        "session_id": sample.session_id,
        "group": sample.group,
        "chain": sample.certificate.chain,
        "template": sample.certificate.template,
        "tokenizer": sample.certificate.tokenizer,
        "spans": spans,
        "reward": None if sample.reward is None else float(sample.reward).hex(),
        "finish_reason": sample.finish_reason,
        "tokentrue": own,
    }
    if sample.images:
        held["images"] = list(map(astuple, sample.images))
    state = sha256(json.dumps(held, sort_keys=True, separators=(",", ":")).encode())
    state.update(bytes(sample.loss_mask))
    if sample.routed_experts is not None:
        state.update(repr((sample.routed_experts.start, *sample.routed_experts.shape)).encode())
        state.update(sample.routed_experts.data)
        state.update(sample.routed_experts.weights or b"")
    for rows in (sample.sampling_mask, sample.top_logprobs):
        if rows is not None:
            state.update(rows.offsets.tobytes())
            state.update(rows.token_ids.tobytes())
    if sample.top_logprobs is not None:
        state.update(sample.top_logprobs.logprobs)
    return f"sha256:{state.hexdigest()}"
