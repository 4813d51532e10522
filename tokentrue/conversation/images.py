"""Replaces the images of messages by references: the one place through which images enter a session."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokentrue.conversation.match_keys import read_role
from tokentrue.errors import ConfigError, InputError, LimitExceeded, MessageError
from tokentrue.images import ImageFile, ImageSettings, check_image, hash_image, read_url
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.records import record
from tokentrue.types import Message, Messages

SENT, REFERENCE = "image_url", "image"
_TAKING_ROLES = ("user", "tool")


def list_parts(message: Message, *kinds: str) -> list[JsonMapping]:
    content: Any = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, (list, tuple)) else ()
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") in kinds]


def has_images(messages: Messages) -> bool:
    return any(list_parts(message, SENT) for message in messages)


@record
class ReadImages:
    messages: list[Message]
    files: Mapping[str, ImageFile]


class ImageReader:
    """`recorded`: the references of the session's record, by hash. `refusal`: why the model takes no images."""

    def __init__(self, settings: ImageSettings | None = None, *, refusal: str | None = None) -> None:
        self.settings, self.refusal = settings or ImageSettings(), refusal
        self.recorded: dict[str, JsonObject] = {}

    def read(self, messages: Messages, *, first: int = 0, before: int = 0) -> ReadImages:
        """`first` is the index of `messages[0]`, `before` the number of images in earlier messages. Blocks."""
        most = self.settings.max_per_request
        count = before + sum(len(list_parts(message, SENT, REFERENCE)) for message in messages)
        if count > most:
            raise LimitExceeded(f"the request has {count} images, at most images.max_per_request={most} are taken")
        files: dict[str, ImageFile] = {}
        read = [self._read_message(message, f"messages[{at}]", files) for at, message in enumerate(messages, first)]
        return ReadImages(messages=read, files=files)

    def _read_message(self, message: Message, where: str, files: dict[str, ImageFile]) -> Message:
        if not list_parts(message, SENT, REFERENCE):
            return message
        if (role := read_role(message, where)) not in _TAKING_ROLES:
            raise MessageError(
                f"images are taken in user messages and tool results, not in {role} messages", field=f"{where}.content"
            )
        content: list[Any] = []
        for index, part in enumerate(message["content"]):
            kind, at = part.get("type") if isinstance(part, Mapping) else None, f"{where}.content[{index}]"
            if kind == SENT:
                if self.refusal is not None:  # before its bytes are judged: no other picture would do
                    raise MessageError(f"images are refused: {self.refusal}", field=str(part.get("field") or at))
                file = self._read_part(part, str(part.get("field") or at))
                files[file.sha256] = file
                content.append(file.part)
                continue
            if kind == REFERENCE and self.recorded.get(str(part.get("sha256"))) != part:
                raise MessageError("refers to an image that is not in this session's record; send its bytes", field=at)
            content.append(part)
        return {**message, "content": content}

    def _read_part(self, part: JsonMapping, where: str) -> ImageFile:
        source = part.get(SENT)
        if not isinstance(source, Mapping) or not isinstance(url := source.get("url"), str):
            raise MessageError("must be an object with a url", field=f"{where}.image_url")
        # `detail` is OpenAI's hint for its own resizing; cache marks are hints, too.
        unknown = [name for name in part if name not in ("type", SENT, "field", "cache_control")]
        unknown += [f"{SENT}.{name}" for name in source if name not in ("url", "detail")]
        if unknown:
            raise MessageError("unknown field", field=f"{where}.{unknown[0]}")
        try:
            data, declared = read_url(url, self.settings)
            known = self.recorded.get(hash_image(data))  # it need not be decoded again
            if known is not None and declared in (None, known["media_type"]):
                return ImageFile(data=data, **{name: value for name, value in known.items() if name != "type"})
            return check_image(data, declared, self.settings)
        except LimitExceeded as error:
            raise LimitExceeded(f"{where}: {error}") from None
        except (MessageError, ConfigError):
            raise
        except InputError as error:
            raise MessageError(f"the image {error}", field=where) from None


def find_references(messages: Iterable[Message]) -> Iterator[JsonMapping]:
    for message in messages:
        yield from list_parts(message, REFERENCE)
