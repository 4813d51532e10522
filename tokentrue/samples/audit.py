"""Audits exported samples from the file alone: certificates, masks, log-probabilities, prefix identity, coverage.

A passing file is undamaged; this does not prove that nobody rewrote it entirely: for that, compare `certificate.chain`
with the one that the gateway reported.
"""

import math
from array import array
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import chain

from msgspec import Struct

from tokentrue.errors import AuditError, FileFormatError
from tokentrue.ids import TokenIds
from tokentrue.records import record
from tokentrue.samples.formats import ExportedSample
from tokentrue.samples.images import ImageFolder
from tokentrue.samples.recorded_turns import NodeRow, SealedRecord, read_sealed_record, seal
from tokentrue.sessions.tree import format_digest, next_link, start_link
from tokentrue.types import Coverage, Sample, VersionSpan, shift_images

Fault = tuple[str, int | None, int | None]
"""What is wrong, at tokens `[start, end)` if known."""


@record
class AuditFinding:
    sample: str
    what: str
    start: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        place = "" if self.start is None else f" tokens [{self.start}, {self.end})"
        return f"{self.sample}{place}: {self.what}"


class Audit(Struct):
    samples: int = 0
    tokens: int = 0
    sampled: int = 0
    trained: int = 0
    images: set[str] = set()  # their hashes
    are_files_checked: bool = False
    sessions: "dict[str, _SessionAudit]" = {}
    findings: list[AuditFinding] = []

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def coverage(self) -> float:
        """A file with duplicates has no more than 1."""
        sampled = sum(session.claimed.sampled for session in self.sessions.values() if session.claimed is not None)
        return min(1.0, self.trained / sampled) if sampled else 1.0

    @property
    def untrained(self) -> list[str]:
        claimed = [session.claimed for session in self.sessions.values() if session.claimed is not None]
        return sorted({reason for coverage in claimed for reason in coverage.untrained_by_reason})


class _SessionAudit(Struct):
    claimed: Coverage | None = None
    seen: set[str] = set()
    links: dict[str, tuple[str, int]] = {}  # node -> its chain and start
    sampled: dict[str, bytes] = {}  # node -> SHA-256 of its sampled ids
    # Given tokens [start, end) of a sample that repeat what a node sampled: (sample, start, end, node, their SHA-256)
    copies: list[tuple[str, int, int, str, bytes]] = []
    trained_by: dict[str, str] = {}
    trained: int = 0


def audit(samples: Iterable[Sample]) -> Audit:
    return audit_exported(ExportedSample(sample=sample, where=sample.sample_id) for sample in samples)


def audit_exported(rows: Iterable[ExportedSample], images: ImageFolder | None = None) -> Audit:
    result = Audit(are_files_checked=images is not None and images.path.is_dir())
    for row in rows:
        sample = row.sample
        result.samples += 1
        result.tokens += len(sample.token_ids)
        result.sampled += sum(value is not None for value in sample.rollout_logprobs)
        result.trained += sum(sample.loss_mask)
        session = result.sessions.setdefault(sample.session_id, _SessionAudit())
        faults: list[Fault] = [(f"the trainer's row: {what}", None, None) for what in row.differences]
        try:
            own = read_sealed_record(sample)
            checks = (_check_columns(sample), _check_links(sample, own.nodes), _check_replay(sample))
            faults += chain(
                *checks, _check_images(sample), _check_seal(sample, own), _check_session(sample, own, session)
            )
        except FileFormatError as error:
            faults.append((str(error), None, None))
        for run in sample.images:
            if run.sha256 in result.images:
                continue
            result.images.add(run.sha256)
            if images is not None and result.are_files_checked:
                try:
                    images.read(run.sha256)
                except (AuditError, OSError) as error:
                    faults.append((str(error), run.start, run.start + run.count))
        for what, start, end in faults:
            result.findings.append(AuditFinding(sample=sample.sample_id, what=what, start=start, end=end))
    for name, session in result.sessions.items():
        result.findings += _check_copies(session)
        result.findings += (AuditFinding(sample=f"session {name}", what=what) for what in _check_coverage(session))
    return result


def _check_columns(sample: Sample) -> Iterator[Fault]:
    at, length = 0, len(sample.token_ids)
    for span in sample.spans:
        if span.start != at or span.end <= span.start:
            yield f"spans leave a gap or overlap before token {span.start}", at, span.start
        at = span.end
        if span.trainable and span.kind != "sampled":
            yield "given tokens are marked trainable", span.start, span.end
        for index in range(span.start, min(span.end, length)):
            bit, value = sample.loss_mask[index], sample.rollout_logprobs[index]
            if bit != int(span.trainable):
                yield f"loss_mask is {bit}, its span says {int(span.trainable)} ({span.why})", index, index + 1
            if (value is None) != (span.kind == "given"):
                yield f"log-probability is {value} on a {span.kind} token", index, index + 1
            elif value is not None and not (math.isfinite(value) and value <= 0.0):
                yield f"{value} is not a log-probability", index, index + 1
    if at != length:
        yield f"spans end at token {at} of {length}", at, length


def _check_replay(sample: Sample) -> Iterator[Fault]:
    routed, mask, inputs = sample.routed_experts, sample.sampling_mask, max(0, len(sample.token_ids) - 1)
    if routed is not None and (routed.start, routed.end) != (0, inputs):
        yield f"routed experts cover positions [{routed.start}, {routed.end}) of {inputs} inputs", 0, inputs
    tops = sample.top_logprobs
    if tops is not None and not all(-math.inf < value <= 0.0 for value in array("d", tops.logprobs)):
        yield "top_logprobs holds a value that is not a log-probability", None, None
    if mask is None and tops is None:
        return
    for index, (token, value) in enumerate(zip(sample.token_ids, sample.rollout_logprobs, strict=True)):
        row = () if mask is None else mask.row(index)
        if row and value is None:
            yield "the sampling mask keeps ids at a token that was not sampled", index, index + 1
        elif row and token not in row:
            yield "the token is not among the ids that its sampling mask kept", index, index + 1
        if value is None and tops is not None and tops.row(index):
            yield "top log-probabilities at a token that was not sampled", index, index + 1


def _check_images(sample: Sample) -> Iterator[Fault]:
    at = 0
    for run in sample.images:
        start, end = run.start, run.start + run.count
        is_given = end <= len(sample.token_ids) and set(sample.rollout_logprobs[start:end]) == {None}
        if start < at or not is_given:
            yield f"image {run.sha256[:12]} overlaps another, or is not within given tokens", start, end
        at = end


def _check_seal(sample: Sample, own: SealedRecord) -> Iterator[Fault]:
    try:
        if own.seal != seal(sample):
            yield "the seal is broken: mask, spans, reward, names or coverage were changed", None, None
    except RecursionError:
        yield "metadata.tokentrue is nested too deeply to be checked", None, None


def _check_links(sample: Sample, nodes: list[NodeRow]) -> Iterator[Fault]:
    previous = start_link(template=sample.certificate.template, tokenizer=sample.certificate.tokenizer)
    at, length, sent = 0, len(sample.token_ids), sha256()  # over the sample's own ids, up to each turn
    for turn, node in enumerate(nodes):
        given_end, end = at + node.given, at + node.given + node.sampled
        if end > length:
            yield f"turn {turn} ends at token {end} of {length}", at, end
            return
        values = [value for value in sample.rollout_logprobs[given_end:end] if value is not None]
        if len(values) < node.sampled:
            yield f"turn {turn}: sampled tokens without log-probability", given_end, end
            return
        given, sampled = TokenIds(sample.token_ids[at:given_end]), TokenIds(sample.token_ids[given_end:end])
        logprobs = array("d", values)
        versions = [  # read from the spans, because the trainer reads those
            VersionSpan(start=span.start - given_end, end=span.end - given_end, version=span.policy_version)
            for span in (sample.spans if node.versions else ())
            if span.kind == "sampled" and given_end <= span.start < end and span.policy_version is not None
        ]
        images = shift_images((run for run in sample.images if at <= run.start < end), -at)
        link = next_link(
            previous, given_ids=given, sampled_ids=sampled, logprobs=logprobs, versions=versions, images=images
        )
        if link.hex() != node.chain:
            what = "ids, log-probabilities, versions, images or the order of nodes changed"
            yield f"turn {turn}: {what} (the chain breaks at node {node.node})", at, end
        sent.update(given.tobytes())
        if node.prompt_sha256 is not None and sent.hexdigest() != node.prompt_sha256:
            what = "the prompt in this sample is not what the engine was sent"
            yield f"turn {turn}: {what} (prompt_sha256 of node {node.node})", 0, given_end
        sent.update(sampled.tobytes())
        previous, at = bytes.fromhex(node.chain), end
    if at != length:
        yield f"the nodes end at token {at} of {length}", at, length
    if format_digest(previous) != sample.certificate.chain:
        yield "certificate.chain is not the chain of its last node", None, None


def _check_session(sample: Sample, own: SealedRecord, session: _SessionAudit) -> Iterator[Fault]:
    if sample.sample_id in session.seen:
        yield "this sample is in the file twice", None, None
    session.seen.add(sample.sample_id)
    if session.claimed is not None and session.claimed != own.coverage:
        yield "samples of one session disagree about its coverage", None, None
    session.claimed = session.claimed or own.coverage
    at, unnamed = 0, {(span.start, span.end) for span in sample.spans if span.why == "sampled_elsewhere"}
    for turn, node in enumerate(own.nodes):
        start, given_end, end = at, at + node.given, at + node.given + node.sampled
        at = end
        if session.links.setdefault(node.node, (node.chain, start)) != (node.chain, start):
            yield f"turn {turn}: node {node.node} has another history in another sample", start, end
        if any(sample.loss_mask[start:given_end]):
            sampled = f"node {node.node} sampled [{given_end}, {end}) alone"
            yield f"turn {turn}: given tokens are trained ({sampled})", start, given_end
        session.sampled[node.node] = TokenIds(sample.token_ids[given_end:end]).sha256()
        for begin, stop, copied in node.copies:
            ids = TokenIds(sample.token_ids[start + begin : start + min(stop, node.given)])
            session.copies.append((sample.sample_id, start + begin, start + stop, copied, ids.sha256()))
            unnamed.discard((start + begin, start + stop))
        if trained := sum(sample.loss_mask[given_end:end]):
            session.trained += trained
            first = session.trained_by.setdefault(node.node, sample.sample_id)
            if first != sample.sample_id:
                yield f"turn {turn}: trained here and in sample {first}", given_end, end
    for start, end in sorted(unnamed):
        yield "given as sampled elsewhere, and no node is named that sampled it", start, end


def _check_copies(session: _SessionAudit) -> Iterator[AuditFinding]:
    untrained = {item.node for item in session.claimed.untrained} if session.claimed is not None else set[str]()
    for sample, start, end, node, digest in session.copies:
        what = ""
        if node in session.sampled and session.sampled[node] != digest:
            what = f"not what node {node} sampled, though given as that"
        elif node not in session.sampled and node not in untrained:
            what = f"given as what node {node} sampled, which is in no sample and not listed as untrained"
        if what:
            yield AuditFinding(sample=sample, what=what, start=start, end=end)


def _check_coverage(session: _SessionAudit) -> Iterator[str]:
    claimed = session.claimed
    if claimed is None:
        return
    missing = sum(item.tokens for item in claimed.untrained)
    if claimed.sampled != claimed.trained + missing:
        sums = f"{claimed.sampled} sampled, {claimed.trained} trained, {missing} accounted for"
        yield f"coverage does not add up: {sums}"
    if session.trained != claimed.trained:
        found = f"{session.trained} tokens are trained in this file, the session has {claimed.trained}"
        yield f"{found}: samples are missing or masks changed"
