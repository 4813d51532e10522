"""A process that needs no torch does not load it, also where it is installed.

Loading a tokenizer imports transformers, which imports torch wherever it finds it: seconds of start-up and hundreds of
megabytes per gateway process. There is no switch for that in transformers, so torch is hidden while transformers looks
for it; transformers looks once
and remembers. Only for processes of our own whose engine is elsewhere: after this, transformers has no models in this
process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from tokentrue.providers.registry import ENGINES


@contextmanager
def without_torch(engine: str) -> Generator[None, None, None]:
    """Within the block transformers is loaded without torch, where `engine` runs elsewhere and torch is not loaded
    already."""
    kind = ENGINES.get(engine)
    if kind is None or kind.needs_torch or "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say: not importable
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found": as intended
    try:
        yield
    finally:
        del sys.modules["torch"]
