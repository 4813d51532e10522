"""Samples from a file that is not trusted: what `audit` checks is checked before anybody trains on them.

`require_sound` is the audit itself. `require_model` compares the tokenizer that the samples were recorded with, and
their ids, with the model that is to score them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokentrue.errors import AuditError, FileFormatError
from tokentrue.samples.audit import audit_exported
from tokentrue.samples.exporters import ExportedSample
from tokentrue.samples.files import read_exported, read_samples
from tokentrue.types import Sample


def read_sound_samples(path: str | Path, *, trust: bool = False) -> list[Sample]:
    """All samples of a file. With `trust` certificates, masks and duplicates are not checked."""
    if trust:
        samples = list(read_samples(path))
    else:
        rows = list(read_exported(path))
        require_sound(rows, str(path))
        samples = [row.sample for row in rows]
    if not samples:
        raise FileFormatError(f"{path}: holds no sample")
    return samples


def require_sound(rows: Sequence[ExportedSample], where: str) -> None:
    """Raises AuditError with the first finding of an audit, if there is one."""
    found = audit_exported(rows).findings
    if found:
        more = f", and {len(found) - 1} more (`tokentrue audit {where}` lists them)" if len(found) > 1 else ""
        raise AuditError(f"{where}: {found[0]}{more}; --trust skips these checks")


def require_model(samples: Sequence[Sample], *, model: str, tokenizer: str | None, vocabulary: int) -> None:
    """Raises FileFormatError where samples cannot have been sampled from `model`.

    `tokenizer` is the hash of the model's tokenizer (None where it has none); `vocabulary` is the number of its
    embeddings.
    """
    for sample in samples:
        recorded = sample.certificate.tokenizer
        if tokenizer is not None and recorded != tokenizer:
            raise FileFormatError(
                f"sample {sample.sample_id} was recorded with another tokenizer ({short(recorded)}) than {model} has ({short(tokenizer)}); "
                "use the model that it was sampled from"
            )
        kept = () if sample.sampling_mask is None else sample.sampling_mask.token_ids
        largest = max(max(sample.token_ids, default=0), max(kept, default=0))
        if largest >= vocabulary:
            raise FileFormatError(
                f"sample {sample.sample_id} holds token id {largest}, beyond the vocabulary of {model} ({vocabulary}); "
                "use the model that it was sampled from"
            )


def short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12] or "none"
