"""The records of a proof: what holds for one template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokentrue.json_types import JsonMapping, JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`outcome`: "proven" (a dummy context suffices), "history", "refused", "unsupported" (the template cannot render
    it) or "wrong"."""

    shape: str
    role: str
    outcome: str
    why: str = ""
    detail: str = ""

    def to_json(self) -> dict[str, str]:
        return {"shape": self.shape, "role": self.role, "outcome": self.outcome, "why": self.why, "detail": self.detail}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The whole result; `boundary` is the text between the stop and the next turn's content, per role, as far as it is
    proven."""

    roles: Mapping[str, str]
    why: Mapping[str, str]
    stops: Mapping[str, Sequence[str]]
    boundary: Mapping[str, str]
    rewrites: Mapping[str, bool]
    cases: tuple[Case, ...]
    template_hash: str
    tokenizer_hash: str
    tools: Literal["rendered", "ignored", ""] = ""  # whether the template shows a request's tools to the model
    warnings: tuple[str, ...] = ()
    short_plans: bool = True  # what the template asks of earlier messages is known, and was tried
    inputs: JsonMapping = field(default_factory=JsonObject)

    @property
    def ok(self) -> bool:
        """Nothing is wrong, and both an answer and a tool's result can follow the model's turn."""
        settled = all(self.roles.get(role) in {"proven", "history"} for role in ("user", "tool"))
        return settled and not any(case.outcome == "wrong" for case in self.cases)

    def to_json(self) -> JsonObject:
        return {
            "ok": self.ok,
            "roles": dict(self.roles),
            "why": dict(self.why),
            "stops": {kind: list(texts) for kind, texts in self.stops.items()},
            "boundary": dict(self.boundary),
            "rewrites": dict(self.rewrites),
            "cases": [case.to_json() for case in self.cases],
            "tools": self.tools,
            "warnings": list(self.warnings),
            "inputs": dict(self.inputs),
            "short_plans": self.short_plans,
            "template_hash": self.template_hash,
            "tokenizer_hash": self.tokenizer_hash,
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> Proof:
        fields = {
            key: data[key]
            for key in (
                "roles",
                "why",
                "boundary",
                "rewrites",
                "inputs",
                "tools",
                "short_plans",
                "template_hash",
                "tokenizer_hash",
            )
        }
        stops = {kind: tuple(texts) for kind, texts in data["stops"].items()}
        return cls(
            **fields, stops=stops, cases=tuple(Case(**case) for case in data["cases"]), warnings=tuple(data["warnings"])
        )


UNPROVEN = Proof(roles={}, why={}, stops={}, boundary={}, rewrites={}, cases=(), template_hash="", tokenizer_hash="")
"""Of a renderer that is about to be proven."""
