"""The files of images beside a samples file: `FILE.images/SHA256.png`, written before the samples file has its name."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokentrue.errors import AuditError
from tokentrue.images import EXTENSIONS, find_media_type, hash_image, open_image
from tokentrue.types import PromptImage, Sample

_NAME = re.compile("[0-9a-f]{64}")


def check_name(sha256: str) -> None:
    """A sample is from a file or a server: its names must not lead out of the folder."""
    if not _NAME.fullmatch(sha256):
        raise AuditError(f"{sha256[:80]!r} is no SHA-256 of an image")


class ImageFolder:
    """Files by hash. They are written before the samples file has its name, so it never refers to a missing one."""

    def __init__(self, samples: str | Path) -> None:
        self.path = Path(f"{Path(samples).resolve()}.images")
        self._written: set[str] = set()

    def write(self, sample: Sample, read: Callable[[str, str], bytes]) -> None:
        for run in sample.images:
            if run.sha256 not in self:
                self.add(run.sha256, read(sample.session_id, run.sha256))

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._written

    def add(self, sha256: str, data: bytes) -> None:
        check_name(sha256)
        if hash_image(data) != sha256:
            raise AuditError(f"the bytes of image {sha256} do not fit its hash")
        target = self.path / f"{sha256}{EXTENSIONS[find_media_type(data)]}"
        scratch = target.with_name(f".{target.name}.{os.getpid()}.part")
        self.path.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(data)
        os.replace(scratch, target)
        self._written.add(sha256)

    def read(self, sha256: str) -> tuple[bytes, str]:
        """The bytes, checked against their hash, and the media type."""
        check_name(sha256)
        for media_type, extension in EXTENSIONS.items():
            path = self.path / f"{sha256}{extension}"
            if path.is_file():
                data = path.read_bytes()
                if hash_image(data) != sha256:
                    raise AuditError(f"{path.name} does not fit its hash: the file was changed")
                return data, media_type
        raise AuditError(f"image {sha256} is not in {self.path.name}")

    def open(self, sha256: str) -> Any:
        """A `PIL.Image` in RGB, upright, for a trainer's own processor."""
        return open_image(self.read(sha256)[0])

    def load(self, sample: Sample) -> list[PromptImage]:
        found: list[PromptImage] = []
        for run in sample.images:
            data, media_type = self.read(run.sha256)
            found.append(PromptImage(run=run, data=data, media_type=media_type))
        return found
