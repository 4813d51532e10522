"""Every real chat template at hand, proven or refused; `python -m tests.renderers.templates_page` writes
docs/templates.md."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests import parts
from tests.renderers.standins import standin, tokenizer_for
from tokentrue.errors import TokenTrueError
from tokentrue.renderers import Proof, renderer_of
from tokentrue.renderers.prove import ROLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`proof` is None where the template or tokenizer is refused as a whole, for `error`."""

    name: str
    tokenizer: str
    proof: Proof | None
    error: str = ""


def rows(names: set[str] | None = None, *, real: bool = True) -> Iterator[Row]:
    for name, text in parts.templates().items():
        if names is not None and name not in names:
            continue
        kind, tokenizer = tokenizer_for(text) if real else ("stand-in", standin(text))
        try:
            yield Row(name=name, tokenizer=kind, proof=renderer_of(tokenizer, chat_template=text).proof)
        except TokenTrueError as error:
            yield Row(name=name, tokenizer=kind, proof=None, error=str(error))


def reasons(row: Row) -> str:
    """The refused roles with their codes, shortest form."""
    if row.proof is None:
        return row.error[:100]
    out: list[str] = []
    for role in ROLES:
        codes = sorted(
            {case.why for case in row.proof.cases if case.role == role and case.outcome in {"refused", "unsupported"}}
        )
        whole = row.proof.roles[role] == "refused"
        if codes:
            out.append(f"{role}{'' if whole else ' (some shapes)'}: {', '.join(codes)}")
    return "; ".join(out)


def page(found: list[Row]) -> str:
    counts = {role: Counter(row.proof.roles[role] if row.proof else "refused" for row in found) for role in ROLES}
    wrong = sum(case.outcome == "wrong" for row in found if row.proof for case in row.proof.cases)
    cases = sum(len(row.proof.cases) for row in found if row.proof)
    real = sum(row.tokenizer != "stand-in" for row in found)
    carriers = Counter(row.name.partition("/")[0] for row in found)
    lines = [
        "# Chat templates, proven or refused",
        "",
        f"{len(found)} distinct templates of released models, {cases} cases (shapes of conversation × roles appended).",
        f"{real} run on a real tokenizer with all their tokens, the others on a byte-level BPE with exactly those tokens.",
        "Each case compares the ids that `extend` adds with those that the real history's render has behind the last turn's stop token.",
        "Of the templates, each counted where its text was first found: "
        + ", ".join(f"{name} {n}" for name, n in carriers.items())
        + ".",
        "llama.cpp's are in the PyPI sdist `llama-cpp-python` 0.3.36, trl's, xinference's and axolotl's in their PyPI wheels, those of",
        "Ollama's models in the npm package `@huggingface/ollama-utils`; vllm's, sglang's and miles' are in their source repositories.",
        "",
        f"**Silently wrong: {wrong}.**",
        "",
        "| appended | proven | added ids depend on earlier turns | refused |",
        "|---|---|---|---|",
        *(
            f"| {role} | {counts[role]['proven']} | {counts[role]['history']} | {counts[role]['refused']} |"
            for role in ROLES
        ),
        "",
        "A template is code that comes with a model: [confined, not bounded](renderers.md#what-a-template-is).",
        "`tokentrue verify MODEL --template FILE` prints the same for one template, with every case. The table is written by",
        "`python -m tests.renderers.templates_page` and checked by `pytest tests/renderers/test_all_templates.py -m slow`.",
        "",
        "What the reasons mean: `message_dropped` the template leaves the message out without raising; `message_moved` it puts it",
        "elsewhere (a system message hoisted to the top) or twice; `template` it refuses such a conversation itself; `no_stop` it",
        "ends the turn with no token; `calls_dropped` it does not show the turn's last call; `ambiguous_stop` it writes the stop",
        "twice; `turn_lost` the turn does not show, or more than once.",
        "",
        "| template | tokenizer | " + " | ".join(ROLES) + " | stop: text, call | refused: why |",
        "|---|---|" + "---|" * len(ROLES) + "---|---|",
    ]
    for row in found:
        roles = [row.proof.roles[role] if row.proof else "refused" for role in ROLES]
        stops = (
            ", ".join(f"`{text}`" for kind in ("text", "call") for text in row.proof.stops[kind]) if row.proof else ""
        )
        cells = [row.name, row.tokenizer, *roles, stops.replace("|", "&#124;"), reasons(row).replace("|", "&#124;")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


TARGET = parts.ROOT / "docs" / "templates.md"

if __name__ == "__main__":
    import os

    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        TARGET.write_text(page(list(rows())), encoding="utf-8")
