"""A file of samples as a source of training groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokentrue.errors import FileFormatError, RenderError
from tokentrue.hub import load_config
from tokentrue.samples.files import read_sound_samples, require_model
from tokentrue.types import Sample


def require_samples_of(samples: Sequence[Sample], model: str) -> None:
    """`model` is a directory or a hub id; raises FileFormatError."""
    from tokentrue.renderers import load_renderer

    try:
        tokenizer = load_renderer(model).tokenizer_hash
    except RenderError:  # a model without tokenizer or template still has a vocabulary
        tokenizer = None
    require_model(samples, model=model, tokenizer=tokenizer, vocabulary=read_vocabulary_size(model))


def read_vocabulary_size(model: str) -> int:
    return int(load_config(model).get_text_config().vocab_size)


class SampleFile:
    """A file's groups, in the order of their first sample. A sample without a group forms one with its session.
    Samples without a reward are dropped, and `notes` counts them."""

    def __init__(self, path: Path, *, model: str, trust: bool = False) -> None:
        samples = read_sound_samples(path, trust=trust)
        require_samples_of(samples, model)
        self._groups: dict[str, list[Sample]] = {}
        unrewarded = 0
        for sample in samples:
            if sample.reward is None:
                unrewarded += 1
            else:
                self._groups.setdefault(sample.group or f"session {sample.session_id}", []).append(sample)
        if not self._groups:
            raise FileFormatError(f"{path}: all {len(samples)} samples are without reward; score their sessions first")
        self.notes = [f"{len(samples) - unrewarded} samples in {len(self._groups)} groups from {path}"]
        if unrewarded:
            self.notes.append(f"left out: {unrewarded} samples without reward")
        alone = sum(len({sample.session_id for sample in group}) == 1 for group in self._groups.values())
        if alone:
            self.notes.append(f"{alone} groups have one session: a group baseline gives them advantage 0")

    def __len__(self) -> int:
        return len(self._groups)

    def groups(self) -> Iterator[list[Sample]]:
        yield from self._groups.values()
