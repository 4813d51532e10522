"""Builds training samples from records, with coverage, certificates and exporters."""

from tokentrue.samples.assemble import Assembly, assemble, coverage_of, coverage_to_json, find_left_out
from tokentrue.samples.audit import Audit, AuditFinding, audit, audit_exported
from tokentrue.samples.files import export_bytes, read_exported, read_samples, write_samples
from tokentrue.samples.shape import sample_from_json, sample_to_json

__all__ = [
    "Assembly", "Audit", "AuditFinding", "assemble", "audit", "audit_exported", "coverage_of", "coverage_to_json",
    "export_bytes", "find_left_out", "read_exported", "read_samples", "sample_from_json", "sample_to_json",
    "write_samples",
]  # fmt: skip
