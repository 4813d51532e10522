"""Records become training samples, with coverage, certificates and exporters."""

from tokentrue.samples.assemble import Assembly, assemble, coverage_of, coverage_to_json
from tokentrue.samples.audit import Audit, Finding, audit
from tokentrue.samples.files import exported, read_samples, write_samples
from tokentrue.samples.shape import sample_from_json, sample_to_json
from tokentrue.samples.survivors import given_up

__all__ = [
    "Assembly",
    "Audit",
    "Finding",
    "assemble",
    "audit",
    "coverage_of",
    "coverage_to_json",
    "exported",
    "given_up",
    "read_samples",
    "sample_from_json",
    "sample_to_json",
    "write_samples",
]
