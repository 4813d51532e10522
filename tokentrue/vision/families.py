"""Vision families: how a model's image processor turns an image of some size into placeholder tokens.

Read from the model's directory, without torch and without pixels, by the formulas of transformers' classes, which
tests/renderers/test_vision.py compares. A family that is not in `FAMILIES` is refused by name.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

from tokentrue.errors import ConfigError, MessageError
from tokentrue.json_types import JsonMapping, JsonValue, is_object, read_table
from tokentrue.protocols import find_plugins, load_plugin
from tokentrue.records import record

Grid = tuple[int, int, int]
Backend = Literal["pil", "torchvision"]
LIBRARIES: Mapping[str, str] = {"pil": "pillow", "torchvision": "torchvision"}
_KINDS = ("image", "video", "audio")
DEFAULTS: Mapping[str, JsonMapping] = read_table(__file__, "defaults.json")
"""Settings that decide about pixels and counts, with transformers' values where a file omits them."""


@record
class Vision:
    """A model's image processor. In a prompt the template writes `placeholder` for an image; the processor writes
    `written` in its place, with `repeated` as often as `measure` counts.
    """

    family: str
    processor: str  # identity: class, backend, versions, settings
    settings: JsonMapping
    placeholder: str = "<|image_pad|>"
    written: str = "<|image_pad|>"
    repeated: str = "<|image_pad|>"

    def measure(self, width: int, height: int) -> tuple[int, Grid]:
        """Placeholder tokens of an image, and its grid in patches (time, height, width)."""
        raise NotImplementedError


@record
class QwenVision(Vision):
    """Qwen2.5-VL, Qwen3-VL, Qwen3.5: patches of the image at about its own size, merged by squares."""

    def measure(self, width: int, height: int) -> tuple[int, Grid]:
        settings, size = self.settings, self.settings["size"]
        patch, merge = settings["patch_size"], settings["merge_size"]
        most, least, factor = size["longest_edge"], size["shortest_edge"], patch * merge
        if max(width, height) > 200 * min(width, height):
            raise MessageError(f"an image of {width}x{height}: {self.family} takes at most 200 times as long as wide")
        tall, wide = round(height / factor) * factor, round(width / factor) * factor
        if tall * wide > most:
            beta = math.sqrt(height * width / most)
            tall, wide = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
        elif tall * wide < least:
            beta = math.sqrt(least / (height * width))
            tall, wide = (math.ceil(side * beta / factor) * factor for side in (height, width))
        if not tall * wide:
            raise MessageError(f"an image of {width}x{height} has no patch; send a larger one")
        return tall * wide // factor**2, (1, tall // patch, wide // patch)


@record
class GemmaVision(Vision):
    """Gemma-3: every image is resized to one square and takes `tokens`; its grid counts squares."""

    tokens: int

    def measure(self, width: int, height: int) -> tuple[int, Grid]:
        return self.tokens, (1, 1, 1)


def make_qwen(family: str, settings: JsonMapping, processor: JsonMapping) -> Vision:
    resolved = resolve_settings(settings, "Qwen2VLImageProcessor")
    if not resolved["do_resize"] or not all(map(resolved["size"].get, ("shortest_edge", "longest_edge"))):
        raise ConfigError("its image processor does not resize between two numbers of pixels")
    return QwenVision(family=family, processor=identify_processor(settings), settings=resolved)


def make_gemma(family: str, settings: JsonMapping, processor: JsonMapping) -> Vision:
    resolved = resolve_settings(settings, "Gemma3ImageProcessor")
    if not resolved["do_resize"] or resolved["do_pan_and_scan"]:
        raise ConfigError("its image processor cuts images (do_pan_and_scan) or does not resize them")
    return GemmaVision(
        family=family,
        processor=identify_processor(settings),
        settings=resolved,
        placeholder="<start_of_image>",
        written="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
        repeated="<image_soft_token>",
        tokens=processor.get("image_seq_length", 256),
    )


MakeVision = Callable[[str, JsonMapping, JsonMapping], Vision]
"""(model_type, settings of the image processor, processor_config.json) -> Vision, or ConfigError."""

_QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
FAMILIES: Mapping[str, MakeVision] = {**dict.fromkeys(_QWEN, make_qwen), "gemma3": make_gemma}
"""By `model_type` of config.json. Other packages add theirs as entry points `tokentrue.vision` of that name."""


def load_vision(directory: Path | None) -> Vision | str:
    """The vision family of a model's directory, or why it has none."""
    config = read_config(directory)
    kind = str(config.get("model_type", ""))
    if directory is None or not kind:
        return "the model's directory has no config.json with a model_type"
    if "vision_config" not in config and not list_placeholder_ids(config):
        return f"a model of model_type {kind!r} takes text only"
    plugin = find_plugins("vision").get(kind)
    make: MakeVision | None = load_plugin(plugin) if plugin is not None else FAMILIES.get(kind)
    if make is None:
        known = ", ".join(FAMILIES)
        return f"model_type {kind!r} is not among the proven vision families ({known}); docs/new-vision-family.md"
    processor = _read_json(directory / "processor_config.json")
    nested = processor.get("image_processor")
    settings = nested if is_object(nested) else _read_json(directory / "preprocessor_config.json")
    if not settings:
        return f"its directory has no preprocessor_config.json, which {kind} needs for images"
    try:
        return make(kind, settings, processor)
    except ConfigError as error:
        return f"{kind}: {error}"


def read_config(directory: Path | None) -> JsonMapping:
    return {} if directory is None else _read_json(directory / "config.json")


def list_placeholder_ids(config: JsonMapping) -> tuple[int, ...]:
    """Ids that mean "here is an image" (video, sound). A model must not sample one: nothing belongs to it."""
    names = [f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index")]
    return tuple(dict.fromkeys(config[name] for name in names if isinstance(config.get(name), int)))


def resolve_settings(settings: JsonMapping, expected: str | None = None) -> JsonMapping:
    """Two files that mean the same become equal. Takes a file's content, or a processor's `to_dict()`."""
    name = _find_class(settings)
    if name not in DEFAULTS or expected not in (None, name):
        raise ConfigError(f"its image processor is {name!r}; proven is {expected or ', '.join(DEFAULTS)}")
    defaults = DEFAULTS[name]
    given = {key: value for key, value in settings.items() if value is not None}
    out = {key: _plain(given.get(key, default), like=default) for key, default in defaults.items()}
    for edge, old in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if "patch_size" in defaults and old in given:
            out["size"][edge] = int(given[old])
    return out


def identify_processor(settings: JsonMapping, backend: Backend = "pil") -> str:
    """What pixels depend on besides the file: class, backend, library versions, SHA-256 of the settings."""
    resolved = json.dumps(resolve_settings(settings), sort_keys=True)
    digest = hashlib.sha256(resolved.encode()).hexdigest()
    versions = " ".join(f"{name}={_find_version(name)}" for name in ("transformers", LIBRARIES[backend]))
    return f"{_find_class(settings)} {backend} {versions} settings={digest}"


def _find_class(settings: JsonMapping) -> str:
    """Without the suffix that names a backend."""
    return str(settings.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")


def _find_version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"


def _plain(value: JsonValue, *, like: JsonValue) -> JsonValue:
    if isinstance(like, dict):
        found = value if is_object(value) else dict(value)
        return {key: int(found[key]) for key in like if found.get(key) is not None}
    if isinstance(like, list):
        return [float(item) for item in value]
    return type(like)(value)


def _read_json(path: Path) -> JsonMapping:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from error
    return found if is_object(found) else {}
