"""Images in rendered prompts: finds their parts in messages, and turns each placeholder that the template wrote into a
run. Text that spells one is shielded and stays text."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import cast

from tokentrue.errors import MessageError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, is_array, is_object
from tokentrue.records import record
from tokentrue.renderers.codec import Codec, strings_in
from tokentrue.types import ImageRun, Messages, PromptSpan
from tokentrue.vision.families import Vision

IMAGE = "image"
SEEN_ROLES = ("user", "tool")
PROVEN = "proven"


@record
class ImageInputs:
    """`vision`: the model's family, or why it has none; `roles`: "proven" or why its images are refused."""

    vision: Vision | str
    roles: Mapping[str, str]

    def find(self, messages: Messages, field: str = "messages", *, safe: bool) -> list[JsonMapping]:
        """The image parts, in order; MessageError if one cannot be rendered. `safe`: content is shielded."""
        found: list[JsonMapping] = []
        for index, message in enumerate(messages):
            content = message.get("content")
            if not is_array(content):
                continue
            for place, part in enumerate(content):
                if is_object(part) and part.get("type") == IMAGE:
                    self._check(part, str(message.get("role")), f"{field}[{index}].content[{place}]")
                    found.append(part)
        if found and not safe:
            self._check_text(messages, field)
        return found

    def _check(self, part: JsonMapping, role: str, field: str) -> None:
        if isinstance(self.vision, str):
            raise MessageError(f"images are refused: {self.vision}", field=field)
        outcome = self.roles.get(role, "only user and tool messages may hold them")
        if outcome != PROVEN:
            raise MessageError(f"images in {role} messages: {outcome}", field=field)
        sizes = part.get("width"), part.get("height")
        if not all(type(size) is int and size > 0 for size in sizes) or not isinstance(part.get("sha256"), str):
            raise MessageError("an image part needs its sha256, width and height", field=field)

    def _check_text(self, messages: Messages, field: str) -> None:
        """Without a shield, text must not spell a placeholder."""
        vision = cast("Vision", self.vision)
        if any(vision.placeholder in text or vision.repeated in text for text in strings_in(list(messages))):
            raise MessageError(
                f"spells a placeholder of {vision.family} beside images; injection='engine' cannot tell them apart",
                field=field,
            )

    def write(self, codec: Codec, text: str, mark: str) -> str:
        """With what the processor writes for each placeholder, the repeated token once."""
        vision = cast("Vision", self.vision)
        if vision.written == vision.placeholder:
            return text
        out: list[str] = []
        done = 0
        for plain, literal, end in codec.split(text, mark):
            start = done + len(plain)
            out += (plain, vision.written if literal == vision.placeholder else text[start:end])
            done = end
        return "".join(out)

    def expand(
        self, codec: Codec, ids: TokenIds, spans: Sequence[PromptSpan], images: Sequence[JsonMapping]
    ) -> tuple[TokenIds, tuple[PromptSpan, ...], tuple[ImageRun, ...]]:
        """`ids` hold each image's repeated token once; returns them with all runs, the spans moved to fit, the runs."""
        vision = cast("Vision", self.vision)
        token = codec.literals.get(vision.repeated)
        places = [place for place, id_ in enumerate(ids) if id_ == token]
        if token is None or len(places) != len(images):
            raise MessageError(f"the template writes {len(places)} of {len(images)} images", field="messages")
        pieces: list[TokenIds] = []
        runs: list[ImageRun] = []
        done = length = 0
        for place, image in zip(places, images, strict=True):
            count, grid = vision.measure(image["width"], image["height"])
            length += place - done
            run = ImageRun(sha256=image["sha256"], start=length, count=count, grid=grid, processor=vision.processor)
            runs.append(run)
            pieces += (ids[done:place], TokenIds([token] * count))
            done, length = place + 1, length + count
        grown = [0, *accumulate(run.count - 1 for run in runs)]

        def move(place: int) -> int:
            return place + grown[bisect_left(places, place)]

        moved = (replace(span, start=move(span.start), end=move(span.end)) for span in spans)
        return TokenIds.concat([*pieces, ids[done:]]), tuple(moved), tuple(runs)
