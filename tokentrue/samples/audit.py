"""Audits exported samples from the file alone: certificates, masks, log-probabilities, prefix identity, coverage.

Every link of the chain is recomputed from the file's ids, log-probabilities and versions, and every field of a
trainer's row is rebuilt from its sample. A finding names the sample, the turn and the tokens. A passing file is
undamaged; this does not prove that nobody rewrote it entirely: for that, compare `certificate.chain` with the one
that the gateway reported.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from tokentrue.errors import FileFormatError
from tokentrue.ids import EMPTY, TokenIds
from tokentrue.samples.formats import ExportedSample
from tokentrue.samples.seal import BLOCK, NodeRow, SealedRecord, block_checksums, read_sealed_record, seal
from tokentrue.sessions.tree import float_bytes, format_digest, next_link, start_link
from tokentrue.types import Coverage, Sample, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """A violation, at tokens `[start, end)` if known."""

    sample: str
    what: str
    start: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        place = "" if self.start is None else f" tokens [{self.start}, {self.end})"
        return f"{self.sample}{place}: {self.what}"


@dataclass(slots=True)
class Audit:
    samples: int = 0
    tokens: int = 0
    sampled: int = 0
    trained: int = 0
    sessions: dict[str, _SessionAudit] = field(default_factory=dict[str, "_SessionAudit"])
    findings: list[AuditFinding] = field(default_factory=list[AuditFinding])

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def coverage(self) -> float:
        """The trained share of all tokens sampled in the file's sessions."""
        sampled = sum(session.claimed.sampled for session in self.sessions.values() if session.claimed is not None)
        return self.trained / sampled if sampled else 1.0


@dataclass(slots=True)
class _SessionAudit:
    claimed: Coverage | None = None
    seen: set[str] = field(default_factory=set[str])
    links: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])  # node -> its chain and start
    sampled: dict[str, bytes] = field(default_factory=dict[str, bytes])  # node -> SHA-256 of its sampled ids
    copies: list[_Copy] = field(default_factory=list["_Copy"])
    trained_by: dict[str, str] = field(default_factory=dict[str, str])
    trained: int = 0


@dataclass(frozen=True, slots=True)
class _Copy:
    """Given tokens `[start, end)` of a sample that repeat what `node` sampled."""

    sample: str
    start: int
    end: int
    node: str
    digest: bytes


def audit(samples: Iterable[Sample]) -> Audit:
    return audit_exported(ExportedSample(sample=sample, where=sample.sample_id) for sample in samples)


def audit_exported(rows: Iterable[ExportedSample]) -> Audit:
    """Also checks the rows themselves."""
    result = Audit()
    for row in rows:
        sample = row.sample
        result.samples += 1
        result.tokens += len(sample.token_ids)
        result.sampled += sum(value is not None for value in sample.rollout_logprobs)
        result.trained += sum(sample.loss_mask)
        session = result.sessions.setdefault(sample.session_id, _SessionAudit())
        result.findings += (
            AuditFinding(sample=sample.sample_id, what=f"the trainer's row: {what}") for what in row.differences
        )
        try:
            own = read_sealed_record(sample)
        except FileFormatError as error:
            result.findings.append(AuditFinding(sample=sample.sample_id, what=str(error)))
            continue
        result.findings += _check_columns(sample)
        result.findings += _check_links(sample, own.nodes)
        result.findings += _check_replay(sample)
        result.findings += _check_seal(sample, own)
        result.findings += _check_session(sample, own, session)
    for name, session in result.sessions.items():
        result.findings += _check_copies(session)
        result.findings += _check_coverage(name, session)
    return result


def _check_columns(sample: Sample) -> Iterator[AuditFinding]:
    at = 0
    for span in sample.spans:
        if span.start != at or span.end <= span.start:
            yield _finding(sample, f"spans leave a gap or overlap before token {span.start}", at, span.start)
        at = span.end
        if span.trainable and span.kind != "sampled":
            yield _finding(sample, "given tokens are marked trainable", span.start, span.end)
        for index in range(span.start, min(span.end, len(sample.token_ids))):
            if sample.loss_mask[index] != int(span.trainable):
                yield _at(
                    sample,
                    index,
                    f"loss_mask is {sample.loss_mask[index]}, its span says {int(span.trainable)} ({span.why})",
                )
            value = sample.rollout_logprobs[index]
            if (value is None) != (span.kind == "given"):
                yield _at(sample, index, f"log-probability is {value} on a {span.kind} token")
            elif value is not None and not (math.isfinite(value) and value <= 0.0):
                yield _at(sample, index, f"{value} is not a log-probability")
    if at != len(sample.token_ids):
        length = len(sample.token_ids)
        yield _finding(sample, f"spans end at token {at} of {length}", at, length)


def _check_replay(sample: Sample) -> Iterator[AuditFinding]:
    routed, mask = sample.routed_experts, sample.sampling_mask
    inputs = max(0, len(sample.token_ids) - 1)
    if routed is not None and (routed.start, routed.end) != (0, inputs):
        what = f"routed experts cover positions [{routed.start}, {routed.end}) of {inputs} inputs"
        yield _finding(sample, what, 0, inputs)
    for index in range(len(sample.token_ids)) if mask is not None else ():
        row = mask.row(index) if mask is not None else EMPTY
        if row and sample.rollout_logprobs[index] is None:
            yield _at(sample, index, "the sampling mask keeps ids at a token that was not sampled")
        elif row and sample.token_ids[index] not in row:
            yield _at(sample, index, "the token is not among the ids that its sampling mask kept")


def _finding(sample: Sample, what: str, start: int | None = None, end: int | None = None) -> AuditFinding:
    return AuditFinding(sample=sample.sample_id, what=what, start=start, end=end)


def _at(sample: Sample, index: int, what: str) -> AuditFinding:
    return _finding(sample, what, index, index + 1)


def _check_seal(sample: Sample, own: SealedRecord) -> Iterator[AuditFinding]:
    try:
        holds = own.seal == seal(sample)
    except RecursionError:
        yield _finding(sample, "metadata.tokentrue is nested too deeply to be checked")
        return
    if not holds:
        yield _finding(sample, "the seal is broken: mask, spans, reward, names or coverage were changed")


def _check_links(sample: Sample, nodes: list[NodeRow]) -> Iterator[AuditFinding]:
    """Locates a broken link by its block checksums."""
    previous = start_link(template=sample.certificate.template, tokenizer=sample.certificate.tokenizer)
    at, sent = 0, sha256()  # over the sample's own ids, up to each turn
    for turn, node in enumerate(nodes):
        given_end, end = at + node.given, at + node.given + node.sampled
        if end > len(sample.token_ids):
            yield _finding(sample, f"turn {turn} ends at token {end} of {len(sample.token_ids)}", at, end)
            return
        values = sample.rollout_logprobs[given_end:end]
        if None in values:
            yield _finding(sample, f"turn {turn}: sampled tokens without log-probability", given_end, end)
            return
        link = _link(sample, node, previous, at, given_end, end)
        if link.hex() != node.chain:
            yield from _locate_change(sample, node, turn, at, given_end, end)
        sent.update(TokenIds(sample.token_ids[at:given_end]).tobytes())
        if node.prompt_sha256 is not None and sent.hexdigest() != node.prompt_sha256:
            what = f"turn {turn}: the prompt in this sample is not what the engine was sent (prompt_sha256 of node {node.node})"
            yield _finding(sample, what, 0, given_end)
        sent.update(TokenIds(sample.token_ids[given_end:end]).tobytes())
        previous, at = bytes.fromhex(node.chain), end
    if at != len(sample.token_ids):
        length = len(sample.token_ids)
        yield _finding(sample, f"the nodes end at token {at} of {length}", at, length)
    if format_digest(previous) != sample.certificate.chain:
        yield _finding(sample, "certificate.chain is not the chain of its last node")


def _link(sample: Sample, node: NodeRow, previous: bytes, at: int, given_end: int, end: int) -> bytes:
    return next_link(
        previous,
        given_ids=TokenIds(sample.token_ids[at:given_end]),
        sampled_ids=TokenIds(sample.token_ids[given_end:end]),
        logprobs=array("d", [value for value in sample.rollout_logprobs[given_end:end] if value is not None]),
        versions=[VersionSpan(start=s, end=e, version=v) for s, e, v in _versions(sample, node, given_end, end)],
    )


def _versions(sample: Sample, node: NodeRow, given_end: int, end: int) -> list[tuple[int, int, int]]:
    """Read from the spans, because the trainer reads those."""
    if not node.versions:
        return []
    return [
        (span.start - given_end, span.end - given_end, span.policy_version)
        for span in sample.spans
        if span.kind == "sampled" and given_end <= span.start < end and span.policy_version is not None
    ]


def _locate_change(
    sample: Sample, node: NodeRow, turn: int, at: int, given_end: int, end: int
) -> Iterator[AuditFinding]:
    ids = TokenIds(sample.token_ids[at:end]).tobytes()
    numbers = array("d", [value for value in sample.rollout_logprobs[given_end:end] if value is not None])
    found = False
    for column, data, width, base in (
        ("token_ids", ids, 4, at),
        ("rollout_logprobs", float_bytes(numbers), 8, given_end),
    ):
        now, then = block_checksums(data, width), node.ids_check if width == 4 else node.logprobs_check
        for block in range(max(len(now), len(then)) // 8):
            if now[block * 8 : block * 8 + 8] != then[block * 8 : block * 8 + 8]:
                found = True
                start = base + block * BLOCK
                what = f"turn {turn}: {column} changed (the certificate's chain breaks at node {node.node})"
                yield _finding(sample, what, start, min(start + BLOCK, end))
    if not found:
        what = f"turn {turn}: versions, hashes or the order of nodes changed (the chain breaks at node {node.node})"
        yield _finding(sample, what, at, end)


def _check_session(sample: Sample, own: SealedRecord, session: _SessionAudit) -> Iterator[AuditFinding]:
    if sample.sample_id in session.seen:
        yield _finding(sample, "this sample is in the file twice")
    session.seen.add(sample.sample_id)
    if session.claimed is not None and session.claimed != own.coverage:
        yield _finding(sample, "samples of one session disagree about its coverage")
    session.claimed = session.claimed or own.coverage
    at, unnamed = 0, {(span.start, span.end) for span in sample.spans if span.why == "sampled_elsewhere"}
    for turn, node in enumerate(own.nodes):
        start, given_end, end = at, at + node.given, at + node.given + node.sampled
        at = end
        if session.links.setdefault(node.node, (node.chain, start)) != (node.chain, start):
            what = f"turn {turn}: node {node.node} has another history in another sample"
            yield _finding(sample, what, start, end)
        if any(sample.loss_mask[start:given_end]):
            what = f"turn {turn}: given tokens are trained (node {node.node} sampled [{given_end}, {end}) alone)"
            yield _finding(sample, what, start, given_end)
        session.sampled[node.node] = TokenIds(sample.token_ids[given_end:end]).sha256()
        for begin, stop, copied in node.copies:
            ids = TokenIds(sample.token_ids[start + begin : start + min(stop, node.given)])
            session.copies.append(_Copy(sample.sample_id, start + begin, start + stop, copied, ids.sha256()))
            unnamed.discard((start + begin, start + stop))
        trained = sum(sample.loss_mask[given_end:end])
        if not trained:
            continue
        session.trained += trained
        first = session.trained_by.setdefault(node.node, sample.sample_id)
        if first != sample.sample_id:
            what = f"turn {turn}: trained here and in sample {first}"
            yield _finding(sample, what, given_end, end)
    for start, end in sorted(unnamed):
        yield _finding(sample, "given as sampled elsewhere, and no node is named that sampled it", start, end)


def _check_copies(session: _SessionAudit) -> Iterator[AuditFinding]:
    untrained = {item.node for item in session.claimed.untrained} if session.claimed is not None else set[str]()
    for copy in session.copies:
        what = ""
        if copy.node in session.sampled and session.sampled[copy.node] != copy.digest:
            what = f"not what node {copy.node} sampled, though given as that"
        elif copy.node not in session.sampled and copy.node not in untrained:
            what = f"given as what node {copy.node} sampled, which is in no sample and not listed as untrained"
        if what:
            yield AuditFinding(sample=copy.sample, what=what, start=copy.start, end=copy.end)


def _check_coverage(name: str, session: _SessionAudit) -> Iterator[AuditFinding]:
    claimed = session.claimed
    if claimed is None:
        return
    missing = sum(item.tokens for item in claimed.untrained)
    if claimed.sampled != claimed.trained + missing:
        what = (
            f"coverage does not add up: {claimed.sampled} sampled, {claimed.trained} trained, {missing} accounted for"
        )
        yield AuditFinding(sample=f"session {name}", what=what)
    if session.trained != claimed.trained:
        found = f"{session.trained} tokens are trained in this file, the session has {claimed.trained}"
        what = f"{found}: samples are missing or masks changed"
        yield AuditFinding(sample=f"session {name}", what=what)
