"""What all tests have in common: profiles of models are kept for the session, and nowhere else;
no property is held to a time."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests.pairs import examples

settings.register_profile("tests", max_examples=examples(100), deadline=None)
settings.load_profile("tests")


# Files that take minutes, the longest first. Workers take whole files: with these begun first, none
# is left alone with one at the end.
LONG = (
    *("test_elastic", "test_parallel_strategies", "test_odd_models", "test_same_mathematics"),
    *("test_hangs", "test_checkpoints", "test_faults", "test_final_weights", "test_resume"),
    *("test_auto", "test_folding", "test_command", "test_restarts"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files LONG before the others."""
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that tests start inherit it: a model of several tests is measured once, by whichever
    of the processes that share the tests has it first."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHALE_TRAIN_CACHE", str(root / "cache"))
        yield
