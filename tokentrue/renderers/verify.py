"""`verify`: the proof of a model's template, as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.renderers.load import load_renderer
from tokentrue.renderers.proving.proof import Case, Proof
from tokentrue.renderers.proving.roundtrip import check_roundtrip


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`roles`: "proven", "history" (the real history must be the context) or "refused"; `why` names the refused shapes
    of a role.

    `stops` are token strings per kind of turn; `boundary` the text between a stop and the next turn's content;
    `rewrites` says whether the template itself writes earlier turns otherwise once such a message follows; `parse` how
    a rendered turn parses back; `tools` is "ignored" where the template shows no request's tools to the model.
    """

    model: str
    ok: bool
    roles: Mapping[str, str]
    why: Mapping[str, str]
    stops: Mapping[str, Sequence[str]]
    boundary: Mapping[str, str]
    rewrites: Mapping[str, bool]
    cases: Sequence[Case]
    parse: Mapping[str, str]
    tools: str
    warnings: Sequence[str]
    family: str
    template_hash: str
    tokenizer_hash: str

    def to_json(self) -> JsonObject:
        return {
            "model": self.model,
            "ok": self.ok,
            "roles": dict(self.roles),
            "why": dict(self.why),
            "stops": {kind: list(texts) for kind, texts in self.stops.items()},
            "boundary": dict(self.boundary),
            "rewrites": dict(self.rewrites),
            "parse": dict(self.parse),
            "cases": [case.to_json() for case in self.cases],
            "tools": self.tools,
            "warnings": list(self.warnings),
            "family": self.family,
            "template_hash": self.template_hash,
            "tokenizer_hash": self.tokenizer_hash,
        }


def verify(
    model: str | Path, chat_template: str | None = None, template_kwargs: JsonMapping | None = None
) -> Verification:
    """Proves or refutes, in id space, that the model's template can be extended; works offline on a directory."""
    renderer = load_renderer(model, chat_template=chat_template, template_kwargs=template_kwargs)
    proof: Proof = renderer.proof
    return Verification(
        model=str(model),
        ok=proof.ok,
        roles=proof.roles,
        why=proof.why,
        stops=proof.stops,
        boundary=proof.boundary,
        rewrites=proof.rewrites,
        cases=proof.cases,
        parse=check_roundtrip(renderer),
        tools=proof.tools,
        warnings=proof.warnings,
        family=renderer.family.name,
        template_hash=proof.template_hash,
        tokenizer_hash=proof.tokenizer_hash,
    )
