"""The images of one session: which ones its record refers to, and their bytes.

A request brings the bytes of its images each time, except for those of an earlier reply's conversation: they are read
from the journal. A session without a journal keeps the bytes of its record in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from tokentrue.conversation import Conversation, Conversations, ParsedConversation
from tokentrue.conversation.images import ImageReader, find_references, has_images
from tokentrue.errors import LimitExceeded, MessageError, SessionNotFound, TokenContractError
from tokentrue.images import ImageFile, ImageSettings
from tokentrue.protocols import Provider, Seeing
from tokentrue.sessions.journal import Journal
from tokentrue.sessions.tree import Tree
from tokentrue.types import ImageRun, Message, PromptImage

P = ParamSpec("P")
T = TypeVar("T")
# Two at a time: each holds the pixels of one image, and other threads must not wait for slow hosts.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokentrue-images")


async def run_in_image_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *args, **kwargs))


async def add_parsed(conversations: Conversations, parsed: ParsedConversation) -> Conversation:
    """Reads images in a thread; a conversation without new ones is added without awaiting."""
    images = None
    if has_images(parsed.messages):
        images = await run_in_image_thread(conversations.read_images, parsed)
    return conversations.add(parsed, images)


class SessionImages:
    def __init__(self, session_id: str, settings: ImageSettings | None, journal: Journal | None, tree: Tree) -> None:
        self._session, self._journal = session_id, journal
        self.reader = ImageReader(settings)
        self._kept: dict[str, ImageFile] = {}  # without a journal
        for node in tree.nodes.values():
            self._note(find_references(tree.given_messages(node)))
        self._bytes = journal.count_image_bytes(session_id) if journal is not None and self.reader.recorded else 0

    def _note(self, parts: Iterable[Mapping[str, object]]) -> None:
        for part in parts:
            self.reader.recorded.setdefault(str(part["sha256"]), dict(part))

    def find_new(self, messages: Iterable[Message], files: Mapping[str, ImageFile]) -> list[ImageFile]:
        """The files that `messages` refer to and the record lacks."""
        recorded = self.reader.recorded
        names = dict.fromkeys(str(part["sha256"]) for part in find_references(messages))
        if lost := [name for name in names if name not in recorded and name not in files]:
            raise TokenContractError(f"the request has no bytes of image {lost[0]}")
        return [files[name] for name in names if name not in recorded]

    def check_limits(self, new: Sequence[ImageFile]) -> None:
        settings = self.reader.settings
        for name, count in (
            ("max_per_session", len(self.reader.recorded) + len(new)),
            ("max_session_bytes", self._bytes + sum(len(image.data) for image in new)),
        ):
            if new and count > (most := getattr(settings, name)):
                what = "images" if name == "max_per_session" else "bytes of images"
                raise LimitExceeded(f"the session would have {count} {what}, at most images.{name}={most} are taken")

    def add(self, images: Sequence[ImageFile]) -> None:
        """Call it when they are in the journal."""
        for image in images:
            if image.sha256 not in self.reader.recorded:
                self._bytes += len(image.data)
                self._note([image.part])
                if self._journal is None:
                    self._kept[image.sha256] = image

    def read(self, name: str) -> ImageFile:
        """By its hash. Blocks."""
        part = self.reader.recorded.get(name)
        if part is None:
            raise SessionNotFound(f"no image {name!r} in session {self._session!r}")
        if self._journal is None:
            return self._kept[name]
        data, media_type = self._journal.read_image(self._session, name)
        return ImageFile(sha256=name, media_type=media_type, width=part["width"], height=part["height"], data=data)

    async def load(self, runs: Sequence[ImageRun], files: Mapping[str, ImageFile]) -> list[PromptImage]:
        """A prompt's images for an engine. `files` are those of the request."""
        missing = list(dict.fromkeys(run.sha256 for run in runs if run.sha256 not in files))
        if missing:
            files = {
                **files,
                **{each.sha256: each for each in await run_in_image_thread(list, map(self.read, missing))},
            }
        found = [files[run.sha256] for run in runs]
        return [
            PromptImage(run=run, data=file.data, media_type=file.media_type)
            for run, file in zip(runs, found, strict=True)
        ]


async def check_engine(provider: Provider) -> None:
    if not isinstance(provider, Seeing):
        raise MessageError(f"the engine {provider.name!r} takes no images", field="messages")
    await provider.check_images()
