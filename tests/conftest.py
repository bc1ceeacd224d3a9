"""What all tests have in common: profiles of models are kept for the session, and nowhere else."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that tests start inherit it: a model of several tests is measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHALE_TRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
