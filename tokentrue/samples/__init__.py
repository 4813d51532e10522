"""Records become training samples, with coverage, certificates and exporters."""

from tokentrue.samples.assemble import Assembly, assemble, coverage_to_json
from tokentrue.samples.survivors import given_up

__all__ = ["Assembly", "assemble", "coverage_to_json", "given_up"]
