from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.renderers.talk import loaded


@pytest.fixture(scope="session", autouse=True)
def own_proof_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Proofs of this run only: a kept one must never stand in for the code under test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
    loaded.cache_clear()
