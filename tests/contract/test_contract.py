"""The contract suite for every family; suite.py says what a case is. Own subjects run anywhere, real ones where their
parts are."""

from __future__ import annotations

import pytest

from tests.contract.subjects import OWN, REAL, Subject
from tests.contract.suite import NoTruth, Walk, assistant, cases
from tests.marks import slow_except

FAST = {"own-qwen3", "own-glm", "own-kimi", "own-deepseek", "own-minimax", "own-harmony", "qwen3"}


def name_of(subject: Subject) -> str:
    return subject.name


@pytest.mark.parametrize("subject", slow_except(FAST, [*OWN, *REAL], name=name_of), ids=name_of)
def test_contract(subject: Subject) -> None:
    failed: list[str] = []
    count = 0
    for case in cases(subject):
        count += 1
        try:
            case.check()
        except AssertionError as error:
            failed.append(f"{case.name}: {str(error)[:300]}")
    assert not failed, f"{len(failed)} of {count} cases failed:\n" + "\n".join(failed)


@pytest.mark.parametrize(
    "subject",
    slow_except(FAST, [one for one in (*OWN, *REAL) if one.dialect.calls is not None], name=name_of),
    ids=name_of,
)
def test_a_late_result_is_rendered_from_the_real_history(subject: Subject) -> None:
    """A result that answers an older call, after the model has gone on: what a dummy context cannot know, the history
    does."""
    on = Walk(subject)
    asked = on.sample(assistant(subject, 0, 1, thinking=False))
    try:
        on.append([{"role": "user", "content": "Meanwhile? new1q"}], may_refuse=True)
        on.sample(assistant(subject, 1, 0, thinking=False))
        late = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "late new2q"}
        on.append([late], may_refuse=True)
    except NoTruth:
        return  # refused with its reason, or the template has no such conversation
    assert on.messages[-1] == late
