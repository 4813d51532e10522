from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.mismatch import peers


@pytest.fixture(scope="session")
def verl() -> SimpleNamespace:
    try:
        return peers.verl()
    except peers.Missing as why:
        pytest.skip(str(why))


@pytest.fixture(scope="session")
def trl() -> SimpleNamespace:
    try:
        return peers.trl()
    except peers.Missing as why:
        pytest.skip(str(why))
