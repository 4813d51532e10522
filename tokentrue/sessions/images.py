"""The images of one session. A request brings their bytes, except those of an earlier reply's conversation."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tokentrue.conversation import Conversation, Conversations
from tokentrue.conversation.images import ImageReader, find_references, has_images
from tokentrue.conversation.reading import ParsedConversation
from tokentrue.errors import LimitExceeded, MessageError, SessionNotFound
from tokentrue.images import ImageFile, ImageSettings
from tokentrue.protocols import Provider, Seeing
from tokentrue.sessions.journal import Journal
from tokentrue.sessions.tree import Tree
from tokentrue.types import ImageRun, Message, PromptImage

# Two at a time: each holds the pixels of one image, and other threads must not wait for slow hosts.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokentrue-images")


async def add_parsed(conversations: Conversations, parsed: ParsedConversation) -> Conversation:
    images = None
    if has_images(parsed.messages):
        images = await asyncio.get_running_loop().run_in_executor(_THREADS, conversations.read_images, parsed)
    return conversations.add(parsed, images)


class SessionImages:
    def __init__(
        self,
        session_id: str,
        settings: ImageSettings | None,
        journal: Journal | None,
        tree: Tree,
        *,
        refusal: str | None = None,
    ) -> None:
        self._session, self._journal = session_id, journal
        self.reader = ImageReader(settings, refusal=refusal)
        self._kept: dict[str, ImageFile] = {}  # without a journal
        for node in tree.nodes.values():
            self.reader.recorded |= {part["sha256"]: dict(part) for part in find_references(tree.given_messages(node))}
        self._bytes = journal.count_image_bytes(session_id) if journal is not None and self.reader.recorded else 0

    def find_new(self, messages: Iterable[Message], files: Mapping[str, ImageFile]) -> list[ImageFile]:
        names = dict.fromkeys(part["sha256"] for part in find_references(messages))
        new = [files[name] for name in names if name not in self.reader.recorded]
        total = self._bytes + sum(len(image.data) for image in new)
        for name, count in (("max_per_session", len(self.reader.recorded) + len(new)), ("max_session_bytes", total)):
            if new and count > (most := getattr(self.reader.settings, name)):
                raise LimitExceeded(f"the session's images reach {count}, beyond images.{name}={most}; open another")
        return new

    def add(self, images: Sequence[ImageFile]) -> None:
        """Call it when they are in the journal."""
        for image in images:
            if image.sha256 not in self.reader.recorded:
                self._bytes += len(image.data)
                self.reader.recorded[image.sha256] = image.part
                if self._journal is None:
                    self._kept[image.sha256] = image

    def read(self, sha256: str) -> tuple[bytes, str]:
        if self._journal is not None:
            return self._journal.read_image(self._session, sha256)
        if sha256 not in self._kept:
            raise SessionNotFound(f"no image {sha256!r} in session {self._session!r}")
        return self._kept[sha256].data, self._kept[sha256].media_type

    async def load(self, runs: Sequence[ImageRun], files: Mapping[str, ImageFile]) -> list[PromptImage]:
        found = {name: (file.data, file.media_type) for name, file in files.items()}
        for name in {run.sha256 for run in runs} - found.keys():
            found[name] = await asyncio.to_thread(self.read, name)
        return [PromptImage(run=run, data=data, media_type=kind) for run in runs for data, kind in [found[run.sha256]]]


async def check_engine(provider: Provider) -> None:
    if not isinstance(provider, Seeing):
        raise MessageError(f"the engine {provider.name!r} takes no images", field="messages")
    await provider.check_images()
