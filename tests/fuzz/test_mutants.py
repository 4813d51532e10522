"""Does the fuzz bite? Defects are put back into a copy of the package, one at a time; each must be found within a
minute."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fuzz.gateway import ROOT
from tests.fuzz.run import Settings, run

SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`changes` are (file, text, text instead); `rules` are those of which one must be reported broken."""

    name: str
    changes: Sequence[tuple[str, str, str]]
    rules: Sequence[str]


MUTANTS = (
    Mutant(
        name="a streamed call is closed under the next call's name",
        changes=[
            (
                "gateway/dialects/openai_responses.py",
                "        waits = self.head.options.logprobs\n",
                '        if kind == "call" and last is not None and last.kind == "call":\n'
                "            last.tool = self.head.options.served.get(call.name) or ServedTool(call.name)\n"
                "        waits = self.head.options.logprobs\n",
            )
        ],
        rules=["a stream is sound", "calls must be served as sampled"],
    ),
    Mutant(
        name="an older request with the same settings is gone on with, and the turns after it are taken as new messages",
        changes=[
            (
                "turn.py",
                "        resolution = await self._matcher.resolve(conversation, named=request.continues)\n",
                "        resolution = await self._matcher.resolve(conversation, named=request.continues)\n"
                '        remembered = self.__dict__.setdefault("_remembered", {})\n'
                "        older = remembered.get(repr(request.sampling))\n"
                "        if older is not None and older in self.tree.path(resolution.parent)[:-1]:\n"
                "            later = tuple(conversation[len(self.tree.messages(older)) :])\n"
                "            resolution = replace(resolution, parent=older, given=later)\n",
            ),
            (
                "turn.py",
                "                replies = await self._commit(choices, turn, prompt)\n",
                "                replies = await self._commit(choices, turn, prompt)\n"
                "                remembered[repr(request.sampling)] = self.tree.get(replies[0].node)\n",
            ),
        ],
        rules=["a replay must be recognised"],
    ),
    Mutant(
        name="among siblings the newest is taken, however well another fits",
        changes=[
            (
                "sessions/matching.py",
                "        equal = [(node, fit) for node, fit in fits if fit.num_changes == best]\n",
                "        equal = [(node, fit) for node, fit in fits if fit.num_changes >= best]\n",
            )
        ],
        rules=["a replay must be recognised"],
    ),
    Mutant(
        name="a return to recorded tools begins a new root",
        changes=[
            (
                "sessions/matching.py",
                "            nodes = [node for node in nodes if self._may_have_same_tools(node)]\n",
                "            nodes = []\n",
            )
        ],
        rules=["a return to recorded tools rejoins their branch"],
    ),
    Mutant(
        name="a loose key names a request in flight",
        changes=[
            (
                "conversation/reading.py",
                '        return digest(b"".join(map(_DIGEST, self.facts)), self.tools_digest)\n',
                "        return digest(self.keys[-1], self.tools_digest)\n",
            )
        ],
        rules=["a request is its exact text"],
    ),
    Mutant(
        name="what the engine reported before it failed is dropped",
        changes=[
            (
                "turn.py",
                "if await choice.parse_partial(outcome)]",
                'if await choice.parse_partial(outcome) and outcome != "engine_failed"]',
            ),
        ],
        rules=["every sampled token is in the record"],
    ),
    Mutant(
        name="what was sampled before a session was deleted is dropped",
        changes=[
            (
                "turn.py",
                "if await choice.parse_partial(outcome)]",
                'if await choice.parse_partial(outcome) and outcome != "deleted"]',
            ),
        ],
        rules=["every sampled token is in the record"],
    ),
)


def test_every_mutant_fits_the_source() -> None:
    """Whoever renames what a mutant changes learns it at once, not in the next long run."""
    for mutant in MUTANTS:
        for name, text, _ in mutant.changes:
            assert (ROOT / "tokentrue" / name).read_text(encoding="utf-8").count(text) == 1, f"{mutant.name}: {name}"


@pytest.mark.fuzz
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_found(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tokentrue", tmp_path / "tokentrue", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text, instead in mutant.changes:
        path = tmp_path / "tokentrue" / name
        source = path.read_text(encoding="utf-8")
        assert source.count(text) == 1, f"{name}: the text to change is there {source.count(text)} times"
        path.write_text(source.replace(text, instead), encoding="utf-8")
    outcome = asyncio.run(run(Settings(seconds=SECONDS, turns=10**6, seed=1, tree=tmp_path, minimize=False)))
    assert {found.rule for found in outcome.found} & set(mutant.rules), outcome.report()
