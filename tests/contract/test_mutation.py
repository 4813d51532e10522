"""The suite must be able to fail: with the derivation of boundaries switched off it does, wherever there is a boundary
to derive.

Switched off means what a text diff of two renders gives: what the template writes after the rendered turn, as if the
recorded ids ended
where that render ends. They do not: a model stops at its stop token, and the newline behind it was never sampled.
"""

from __future__ import annotations

from typing import Any

import pytest

import tokentrue as tt
from tests.contract.subjects import BY_NAME, Subject
from tests.contract.suite import Case, as_template_wants, cases


class Undriven:
    """A renderer without boundaries: everything else is the real one."""

    def __init__(self, subject: Subject) -> None:
        self._real, self._subject = subject.renderer(), subject

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def extend(self, prefix_ids: Any, messages: Any, new: Any, tools: Any = None) -> tt.Extension | tt.Refusal:
        history = [as_template_wants(message, objects=True) for message in messages]
        fresh = [as_template_wants(message, objects=True) for message in new]
        kwargs = {"tools": tools, **self._real.template_kwargs}
        try:
            before = self._subject.truth(history, add_generation_prompt=False, **kwargs)
            after = self._subject.truth([*history, *fresh], add_generation_prompt=True, **kwargs)
        except Exception as error:
            return tt.Refusal(why="template_raises", detail=str(error) or "raised")
        if not after.startswith(before):
            return tt.Refusal(why="history_rewritten", detail="the render of the history is no prefix")
        added = self._subject.judge().encode(after[len(before) :], add_special_tokens=False)
        return tt.Extension(prefix_ids=prefix_ids, added_ids=tuple(added))


def failing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Case], int]:
    mutant = Undriven(subject)
    monkeypatch.setattr(Subject, "renderer", lambda self: mutant)
    failed, count = [], 0
    for case in cases(subject):
        count += 1
        try:
            case.check()
        except Exception:
            failed.append(case)
    return failed, count


# how many cases of the suite fail once boundaries are not derived, of how many; docs/evidence.md prints the same
FAIL = {
    "own-k2v3": (45, 54),
    "own-qwen3": (45, 54),
    "own-glm": (45, 54),
    "own-minimax": (41, 54),
    "own-harmony": (13, 30),
}


@pytest.mark.parametrize("name", FAIL)
def test_without_boundaries_the_suite_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, count = failing(BY_NAME[name], monkeypatch)
    assert (len(failed), count) == FAIL[name]
    kinds = {case.name.split("-")[0] for case in failed}
    assert {"trajectory", "append", "flow"} <= kinds
    assert "roundtrip" not in kinds and "wiring" not in kinds, "parsing and wiring do not depend on boundaries"


@pytest.mark.parametrize("name", ["own-kimi", "own-deepseek"])
def test_where_there_is_no_boundary_nothing_depends_on_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, _ = failing(BY_NAME[name], monkeypatch)
    assert not [case.name for case in failed]
