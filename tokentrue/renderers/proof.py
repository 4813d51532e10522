"""Records of a proof: what holds for one template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tokentrue.json_types import JsonObject
from tokentrue.renderers.template import InputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`outcome`: "proven" (a dummy context suffices), "history", "refused", "unsupported" (cannot be rendered) or
    "wrong".
    """

    shape: str
    role: str
    outcome: str
    why: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`roles`: "proven", "history" (needs the real history as context) or "refused"; `why`: the refused shapes.
    `stops`: token strings per kind of turn; `boundary`: the text between a stop and the next turn's content;
    `rewrites`: the template changes earlier turns once such a message follows.
    """

    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    why: Mapping[str, str] = field(default_factory=dict[str, str])
    stops: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    boundary: Mapping[str, str] = field(default_factory=dict[str, str])
    rewrites: Mapping[str, bool] = field(default_factory=dict[str, bool])
    cases: tuple[Case, ...] = ()
    tools: Literal["rendered", "ignored", ""] = ""  # whether the template shows a request's tools to the model
    warnings: tuple[str, ...] = ()
    inputs: InputFormat = field(default_factory=InputFormat)
    short_plans: bool = True  # the template's use of earlier messages is known and was tested
    template_hash: str = ""
    tokenizer_hash: str = ""

    @property
    def ok(self) -> bool:
        """Nothing is wrong, and user and tool messages can follow the model's turn."""
        settled = all(self.roles.get(role) in {"proven", "history"} for role in ("user", "tool"))
        return settled and not any(case.outcome == "wrong" for case in self.cases)

    def to_json(self) -> JsonObject:
        return {"ok": self.ok, **msgspec.to_builtins(self)}


UNPROVEN = Proof()
"""Placeholder while a renderer is being proven."""
