"""What lets a third party verify a sample: one row per node on its path, and a seal over the rest.

The certificate's chain binds ids, log-probabilities and versions. The seal binds mask, spans, reward, names,
coverage, node rows, routing, sampling mask, top log-probabilities and images.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from hashlib import sha256
from typing import Annotated

import msgspec

from tokentrue.errors import FileFormatError
from tokentrue.json_types import JsonObject
from tokentrue.samples.shape import decode
from tokentrue.sessions.tree import Node
from tokentrue.types import Count, Coverage, Sample, Sampling

_SHAPING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "extra",
)  # fmt: skip


class NodeRow(msgspec.Struct, kw_only=True):
    """A turn, the certificate's link after it, and which prompt the engine was sent (older files do not say). `copies`
    are ranges of its given tokens (start, end, node) that repeat what another node sampled."""

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
    rows, defaults = list[JsonObject](), Sampling()
    for node in path:
        settings = {name: getattr(node.sampling, name) for name in _SHAPING}
        rows.append(
            {
                "node": node.id,
                "given": len(node.given_ids),
                "sampled": len(node.sampled_ids),
                "chain": node.chain.hex(),
                "versions": [[span.start, span.end, span.version] for span in node.versions],
                "finish": node.finish.value,
                "why": node.edge_reason,
                "projection": node.projection,
                "temperature": node.sampling.temperature,
                "sampling": {name: value for name, value in settings.items() if value != getattr(defaults, name)},
                "prompt_sha256": node.prompt_digest.hex(),
                **({"copies": [list(copy) for copy in node.copies]} if node.copies else {}),
            }
        )
    return rows


def seal(sample: Sample) -> str:
    """SHA-256 over everything in a sample that its chain does not cover, except the seal."""
    own = {key: value for key, value in sample.metadata.get("tokentrue", {}).items() if key != "seal"}
    spans = [[s.start, s.end, s.kind, s.role, s.turn, s.policy_version, s.trainable, s.why] for s in sample.spans]
    held = {
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
