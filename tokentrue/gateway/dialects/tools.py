"""Tool definitions, as every dialect checks them: in the words of Chat Completions."""

from __future__ import annotations

from typing import Any

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import object_of


def check_function(value: Any, where: str) -> None:
    function = object_of(value, where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageError("must be a non-empty string", field=f"{where}.name")
    if not isinstance(function.get("description") or "", str):
        raise MessageError("must be a string", field=f"{where}.description")
    if not isinstance(function.get("parameters") or {}, dict):
        raise MessageError("must be a JSON schema object", field=f"{where}.parameters")
