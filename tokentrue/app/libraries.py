"""Keeps the output of libraries out of ours, and sets their threads."""

from __future__ import annotations

import os


def quiet_libraries(threads: int | None = None) -> None:
    """Progress bars and warnings of libraries stay out of our output."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(min(threads, os.cpu_count() or 1))
