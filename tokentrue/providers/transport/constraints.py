"""What a request wants enforced while sampling, in each engine's own words.

Two names of `Sampling.extra` are every engine's: `response_format` as Chat Completions has it, and `tool_choice`, a
structural tag of the model's own call format (`Renderer.call_tag`). An engine that cannot enforce them refuses them by
name. The mask that enforces them is part of the distribution that is sampled from, so the reported log-probabilities
are those under the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson

from tokentrue.errors import SamplingError
from tokentrue.json_types import JsonMapping, JsonObject

CONSTRAINTS = frozenset({"response_format", "tool_choice"})


def for_sglang(extra: JsonMapping) -> JsonObject:
    """`json_schema` and `structural_tag`, both JSON text."""
    asked = _one(extra, others=("json_schema", "regex", "ebnf", "structural_tag"))
    if asked == "tool_choice":
        return {"structural_tag": _text(_tag(extra))}
    if asked == "response_format":
        schema = _schema(extra["response_format"])
        return {"json_schema": _text({"type": "object"} if schema is None else schema)}
    return {}


def for_vllm(extra: JsonMapping) -> JsonObject:
    """`structured_outputs`, with one constraint in it."""
    asked = _one(extra, others=("structured_outputs",))
    if asked == "tool_choice":
        return {"structured_outputs": {"structural_tag": _text(_tag(extra))}}
    if asked == "response_format":
        schema = _schema(extra["response_format"])
        return {"structured_outputs": {"json_object": True} if schema is None else {"json": schema}}
    return {}


def refuse_constraints(engine: str, extra: JsonMapping) -> None:
    """For engines that sample without a mask."""
    for name in sorted(CONSTRAINTS & extra.keys()):
        cure = "leave it out, or serve the model with sglang or vllm"
        raise SamplingError(f"{name}: engine {engine!r} cannot force its output into a format; {cure}")


def plain(extra: JsonMapping) -> JsonObject:
    """What is the engine's own already."""
    return {name: value for name, value in extra.items() if name not in CONSTRAINTS}


def _one(extra: JsonMapping, *, others: tuple[str, ...]) -> str | None:
    given = [name for name in (*sorted(CONSTRAINTS), *others) if extra.get(name) is not None]
    if len(given) > 1:
        raise SamplingError(f"{' and '.join(given)} cannot be enforced together; send one of them")
    return given[0] if given and given[0] in CONSTRAINTS else None


def _tag(extra: JsonMapping) -> JsonMapping:
    tag = _object(extra["tool_choice"])
    if tag.get("type") != "structural_tag":
        raise SamplingError("tool_choice: must be a structural tag, as the renderer's call_tag gives it")
    return tag


def _object(value: Any) -> JsonMapping:
    """A JSON object; anything else reads as an empty one."""
    return cast("JsonMapping", value) if isinstance(value, Mapping) else {}


def _schema(format_: Any) -> JsonMapping | None:
    """The schema that is asked for; None for any object."""
    format_ = _object(format_)
    kind = format_.get("type")
    if kind == "json_object":
        return None
    schema = _object(format_.get("json_schema")).get("schema")
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise SamplingError("response_format: must be of type json_object, or json_schema with a json_schema.schema")
    return cast("JsonMapping", schema)


def _text(value: Any) -> str:
    return dump_settings(value).decode()


def dump_settings(value: Any) -> bytes:
    """The JSON that an engine is sent. Schemas and strings come from the client: what JSON cannot hold in them is its
    mistake."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise SamplingError(f"the sampling settings cannot be sent to an engine: {error}") from error
