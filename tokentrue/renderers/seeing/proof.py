"""Proves by trial where a template writes images, for each role: rendered whole, and appended to a recorded turn. The
truth is the template's text of the whole conversation, with each placeholder replaced by all that the processor writes,
encoded at once."""

import re
from collections.abc import Iterator, Sequence
from functools import partial

from tokentrue.errors import TokenTrueError
from tokentrue.json_types import JsonObject, JsonValue
from tokentrue.renderers.prove import TOOLS, find_stop, find_truth, make_calls
from tokentrue.renderers.renderer import Renderer
from tokentrue.renderers.seeing.images import PROVEN, SEEN_ROLES
from tokentrue.types import Extension, Message
from tokentrue.vision.families import Vision

SIZES = ((56, 56), (640, 427), (300, 900), (1366, 768), (31, 33))
Trial = tuple[str, tuple[Message, ...], tuple[Message, ...]]


class Refuted(Exception):
    """Why images of the role are refused."""


def _image(index: int) -> JsonObject:
    width, height = SIZES[index % len(SIZES)]
    return {"type": "image", "sha256": f"{index:064x}", "media_type": "image/png", "width": width, "height": height}


def _see(role: str, *parts: str | int, **more: JsonValue) -> Message:
    content = [_image(part) if isinstance(part, int) else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": content, **more}


def _list_trials(role: str, spelled: str) -> Iterator[Trial]:
    """(what is tried, the recorded conversation, what follows it). `spelled`: text like a placeholder."""
    contents: dict[str, tuple[str | int, ...]] = {
        "an image at the start": (0, "zn0z"),
        "an image at the end": ("zn0z", 1),
        "an image between words": ("zn0z", 2, "zn1z"),
        "two adjacent images": ("zn0z", 3, 4, "zn1z"),
        "three images": (4, 0, "zn0z", 1),
        "an image beside text like a placeholder": (f"zn0z {spelled} zn1z", 1, f"{spelled} zn2z"),
    }
    ask: Message = {"role": "user", "content": "Ask zaz"}
    say: Message = {"role": "assistant", "content": "Say zlastz"}
    if role == "user":
        for what, parts in contents.items():
            yield what, (ask, say), (_see(role, *parts),)
        past = (_see(role, 0, "Ask zaz"), {"role": "assistant", "content": "Say zbz"}, _see(role, "zcz", 1, 2), say)
        yield "images in the history", past, (_see(role, "zn0z", 3),)
        yield "an image in the history alone", (_see(role, 3), say), ({"role": "user", "content": "New zn0z"},)
        return
    ids = [{"tool_call_id": f"callid{index:03d}", "name": name} for index, name in enumerate(("weather", "clock"))]
    for what, parts in contents.items():
        yield what, (ask, make_calls("zlastz")), (_see(role, *parts, **ids[0]),)
    past = (ask, make_calls("zbz"), _see(role, "zcz", 0, **ids[0]), make_calls("zlastz"))
    yield "images in the history", past, (_see(role, "zn0z", 3, **ids[0]),)
    both = (_see(role, "zn0z", 2, **ids[0]), _see(role, 4, "zn1z", **ids[1]))
    yield "two results with images", (ask, make_calls("zbz", "zlastz")), both
    yield "user and tool", (_see("user", 1, "zaz"), make_calls("zlastz")), (_see(role, 0, "zn0z", **ids[0]),)


def prove_images(renderer: Renderer, vision: Vision) -> dict[str, str]:
    """By role "proven", or why its images are refused."""
    literals = renderer.codec.literals
    lacking = [text for text in (vision.placeholder, vision.repeated) if text not in literals]
    if lacking:
        return dict.fromkeys(SEEN_ROLES, f"the tokenizer has no token {lacking[0]}")
    return {role: _prove_role(renderer, vision, role) for role in SEEN_ROLES}


def _prove_role(renderer: Renderer, vision: Vision, role: str) -> str:
    try:
        for trial, bare in zip(_list_trials(role, vision.placeholder), _list_trials(role, ""), strict=True):
            _try(renderer, vision, trial, bare)
        return PROVEN
    except Refuted as error:
        return str(error)
    except TokenTrueError as error:
        return f"the template refuses them ({str(error)[:160]})"


def _try(renderer: Renderer, vision: Vision, trial: Trial, bare: Trial) -> None:
    """`bare`: the same without text like a placeholder."""
    what, past, new = trial
    messages, tools = [*past, *new], TOOLS if past[-1].get("tool_calls") else None
    plain = [*bare[1], *bare[2]]
    text = renderer.render_plain(plain, tools)
    _check_places(text, plain, vision)
    rendered, token = renderer.render(messages, tools), renderer.codec.literals[vision.repeated]
    counts = [vision.measure(part["width"], part["height"])[0] for part in _list_images(messages)]
    runs = [rendered.token_ids[run.start : run.start + run.count].tolist() for run in rendered.images]
    if runs != [[token] * count for count in counts] or rendered.token_ids.count(token) != sum(counts):
        raise Refuted(f"{what}: the runs in the prompt are not those of its images")
    if (stop := find_stop(renderer, past)) is None:
        raise Refuted("no token is known to end the turn before them")
    found = renderer.extend([renderer.codec.literals[stop]], past, new, tools)
    if not isinstance(found, Extension) or len(found.images) != len(_list_images(new)):
        raise Refuted(f"{what}: {getattr(found, 'detail', 'not every image follows the recorded turn')}")
    if plain == messages:
        processed = partial(write_all, vision=vision, counts=counts)
        whole = renderer.codec.encode(processed(text))
        tail = find_truth(renderer, past, new, tools, stop, found.join, write=processed)
    else:  # no processor tells such text apart, so the prompt is compared with what it must say
        if f"zn0z {vision.placeholder} zn1z" not in renderer.decode(rendered.token_ids):
            raise Refuted(f"{what}: the text is lost")
        whole, tail = rendered.token_ids, rendered.token_ids[-len(found.added_ids) :]
    if (whole, tail) != (rendered.token_ids, found.added_ids):
        raise Refuted("the ids differ from those of the whole conversation")


def write_all(text: str, vision: Vision, counts: Sequence[int]) -> str:
    """As the processor hands the text to the tokenizer."""
    first, *rest = text.split(vision.placeholder)
    runs = (vision.written.replace(vision.repeated, vision.repeated * count) for count in counts)
    return first + "".join(run + after for run, after in zip(runs, rest, strict=True))


def _check_places(text: str, messages: Sequence[Message], vision: Vision) -> None:
    """Every image must be in the text once, between the words around it."""
    marks = re.compile(r"z[a-z0-9]+z|" + re.escape(vision.placeholder))
    contents = (message["content"] for message in messages)
    parts = [part for each in contents for part in ([{"text": each}] if isinstance(each, str) else each)]
    expected = [mark for part in parts for mark in marks.findall(part.get("text", vision.placeholder))]
    found = [mark for mark in marks.findall(text) if mark in expected]
    if found.count(vision.placeholder) < expected.count(vision.placeholder):
        raise Refuted("the template drops them")
    if found != expected:
        raise Refuted("the template does not write them where they are in the message")


def _list_images(messages: Sequence[Message]) -> list[JsonObject]:
    contents = (message["content"] for message in messages if not isinstance(message["content"], str))
    return [part for content in contents for part in content if part["type"] == "image"]
