"""The OpenAPI document: every path there is, what it takes, and what it may answer."""

from __future__ import annotations

from typing import Any

from tokentrue.gateway.admin.session_handlers import MOST_LISTED

Json = dict[str, Any]
SESSION: Json = {
    "name": "session_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"},
}
TEXT: Json = {"type": "string"}
FREE: Json = {"type": "object"}
ERRORS = ("400", "401", "403", "404", "409", "413", "422", "429", "502", "503", "504")


def document() -> Json:
    from tokentrue import __version__

    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokentrue gateway",
            "version": __version__,
            "description": "Token-in, token-out model calls for agents.",
        },
        "paths": {**_model_paths(), **_google_paths(), **_session_paths(), **_admin_paths(), **_health_paths()},
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": {"type": "object", "required": ["error"], "properties": {"error": FREE}}},
        },
        "security": [{"bearer": []}],
    }


def _operation(
    summary: str,
    *,
    body: Json | None = None,
    parameters: tuple[Json, ...] = (),
    status: str = "200",
    media: str = "json",
) -> Json:
    error = {
        "description": "refused",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    kinds = {"json": "application/json", "text": "text/plain", "either": "application/json"}
    good: Json = {"description": summary, "content": {kinds[media]: {"schema": {}}}}
    if media == "either":
        good["content"]["text/event-stream"] = {"schema": FREE}
    operation: Json = {"summary": summary, "responses": {status: good, **dict.fromkeys(ERRORS, error)}}
    if parameters:
        operation["parameters"] = list(parameters)
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _page_responses() -> Json:
    no_key: Json = {"description": "the admin key is missing or wrong", "content": {"text/plain": {"schema": {}}}}
    page: Json = {"description": "the page", "content": {"text/html": {"schema": {}}}}
    return {
        "200": page,
        "307": {"description": "the page is at /view/"},
        "401": no_key,
        "403": no_key,
        "405": {"description": "use GET"},
    }


def _object(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


CHAT_MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT},
}
CHAT: Json = _object(
    {
        "model": TEXT,
        "messages": {"type": "array", "minItems": 1, "items": CHAT_MESSAGE},
        "stream": {"type": "boolean"},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 1024},
        "n": {"type": "integer", "minimum": 1, "maximum": 4},
        "seed": {"type": "integer", "minimum": 0, "maximum": 2**31},
        "stop": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
        "tools": {"type": "array", "items": FREE},
        "user": TEXT,
    },
    "messages",
)
RESPONSES: Json = _object(
    {
        "model": TEXT,
        "input": {"type": "array", "minItems": 1, "items": CHAT_MESSAGE},
        "instructions": TEXT,
        "stream": {"type": "boolean"},
        "store": {"type": "boolean"},
        "previous_response_id": TEXT,
        "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 1024},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "tools": {"type": "array", "items": FREE},
    },
    "input",
)
MESSAGES: Json = _object(
    {
        "model": TEXT,
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 1024},
        "messages": {"type": "array", "minItems": 1, "items": CHAT_MESSAGE},
        "system": TEXT,
        "stream": {"type": "boolean"},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "stop_sequences": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
        "tools": {"type": "array", "items": FREE},
    },
    "model",
    "max_tokens",
    "messages",
)
COUNT: Json = _object({"model": TEXT, "messages": MESSAGES["properties"]["messages"], "system": TEXT}, "messages")
CONTENT: Json = {
    "type": "object",
    "required": ["role", "parts"],
    "properties": {
        "role": {"enum": ["user", "model"]},
        "parts": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "object", "required": ["text"], "properties": {"text": TEXT}},
        },
    },
}
CONTENTS: Json = {"type": "array", "minItems": 1, "items": CONTENT}
GENERATION_CONFIG: Json = _object(
    {
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "maxOutputTokens": {"type": "integer", "minimum": 1, "maximum": 1024},
        "candidateCount": {"type": "integer", "minimum": 1, "maximum": 4},
        "seed": {"type": "integer", "minimum": 0, "maximum": 2**31},
        "stopSequences": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
        "responseLogprobs": {"type": "boolean"},
    }
)
GENERATE: Json = _object(
    {
        "contents": CONTENTS,
        "systemInstruction": CONTENT,
        "tools": {"type": "array", "items": FREE},
        "generationConfig": GENERATION_CONFIG,
    },
    "contents",
)
MODEL: Json = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]+$"},
}
EVENTS: Json = {"name": "alt", "in": "query", "required": True, "schema": {"enum": ["sse"]}}


def _google_paths() -> Json:
    calls: list[tuple[str, Json, str, tuple[Json, ...]]] = [
        ("generateContent", GENERATE, "json", ()),
        ("streamGenerateContent", GENERATE, "either", (EVENTS,)),
        ("countTokens", _object({"contents": CONTENTS}, "contents"), "json", ()),
    ]
    paths: Json = {}
    for verb, body, media, more in calls:
        for root, parameters in (("", (MODEL,)), ("/sessions/{session_id}", (SESSION, MODEL))):
            operation = _operation(f"Google {verb}", body=body, parameters=(*parameters, *more), media=media)
            paths[f"{root}/v1beta/models/{{model}}:{verb}"] = {"post": operation}
    return paths


def _model_paths() -> Json:
    calls: list[tuple[str, str, Json | None]] = [
        ("chat/completions", "OpenAI Chat Completions", CHAT),
        ("responses", "OpenAI Responses", RESPONSES),
        ("messages", "Anthropic Messages", MESSAGES),
        ("messages/count_tokens", "Anthropic token count", COUNT),
        ("models", "The model served here", None),
    ]
    paths: Json = {}
    for path, summary, body in calls:
        method = "get" if body is None else "post"
        media = "json" if body is None or path.endswith("count_tokens") else "either"
        paths[f"/v1/{path}"] = {method: _operation(f"{summary}; the key names the session", body=body, media=media)}
        named = _operation(f"{summary}; the URL names the session", body=body, parameters=(SESSION,), media=media)
        paths[f"/sessions/{{session_id}}/v1/{path}"] = {method: named}
    return paths


def _session_paths() -> Json:
    create = _object(
        {
            "session_id": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"},
            "group": TEXT,
            "metadata": FREE,
            "sampling": FREE,
            "history": {"enum": ["keep", "template"]},
            "training": {"type": "boolean"},
            "pin": {"type": "array", "items": {"enum": ["system"]}},
        }
    )
    reward = _object({"reward": {"type": "number"}, "leaf": TEXT, "metadata": FREE, "group": TEXT}, "reward")
    filters: Json = {
        "offset": {"type": "integer", "minimum": 0},
        "limit": {"type": "integer", "minimum": 0, "maximum": MOST_LISTED},
        "state": {"enum": ["open", "ended"]},
        "group": TEXT,
        "after": {"type": "string", "description": "`created,session_id` of a listed session: those behind it"},
    }
    query = tuple({"name": name, "in": "query", "schema": schema} for name, schema in filters.items())
    purge: Json = {"name": "purge", "in": "query", "schema": {"type": "boolean"}}
    format_: Json = {"name": "format", "in": "query", "schema": TEXT}
    one = "/sessions/{session_id}"
    return {
        "/sessions": {
            "post": _operation("Create a session", body=create, status="201"),
            "get": _operation("List sessions, newest first", parameters=query),
        },
        one: {
            "get": _operation("One session: its tree, coverage, state", parameters=(SESSION,)),
            "delete": _operation("End a session", parameters=(SESSION, purge)),
        },
        f"{one}/key": {"post": _operation("A new API key for a session; the old one ends", parameters=(SESSION,))},
        f"{one}/reward": {"post": _operation("Give a reward", body=reward, parameters=(SESSION,))},
        f"{one}/samples": {"get": _operation("Training samples", parameters=(SESSION, format_))},
    }


def _admin_paths() -> Json:
    seconds = {"type": "number", "minimum": 0, "maximum": 600}
    pause = _object({"drain": {"type": "boolean"}, "abort": {"type": "boolean"}, "timeout_s": seconds})
    version = _object({"version": {"type": "integer", "minimum": 0, "maximum": 2**53}}, "version")
    return {
        "/admin/pause": {"post": _operation("Hold generations back", body=pause)},
        "/admin/resume": {"post": _operation("Let generations go on", body=_object({}))},
        "/admin/version": {"post": _operation("Note the engine's policy version", body=version)},
    }


def _health_paths() -> Json:
    return {
        "/health": {"get": _operation("The process is alive")},
        "/ready": {"get": _operation("The engine answers")},
        "/metrics": {"get": _operation("Prometheus metrics", media="text")},
        "/openapi.json": {"get": _operation("This document")},
        "/view": {"get": {"summary": "The viewer, a web page", "responses": _page_responses()}},
    }
