"""The contract suite for every family; suite.py says what a case is. Own subjects run anywhere, real ones where their parts are."""

from __future__ import annotations

import pytest

from tests.contract.subjects import OWN, REAL, Subject
from tests.contract.suite import cases


@pytest.mark.parametrize("subject", [*OWN, *REAL], ids=lambda subject: subject.name)
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
