"""The suite of the specification of token-faithful rollouts (docs/specification.md), for any gateway, as a black box.

An adapter imports `Row`, `Session`, `Target` and `merge_calls`. Nothing here imports the gateway, the renderers or the
samples: the judge must not share their mistakes.
"""

from tokentrue.conformance.oracle import Row, merge_calls
from tokentrue.conformance.target import Session, Target

__all__ = ["Row", "Session", "Target", "merge_calls"]
