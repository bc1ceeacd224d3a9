"""What all tests have in common: profiles of models are kept for the session, and nowhere else;
no property is held to a time."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests.pairs import IS_FULL, examples
from tests.progress import SECONDS, UNKNOWN_S, Progress, file_of, seconds_of_files

settings.register_profile("tests", max_examples=examples(100), deadline=None)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", action="store_true", help=f"write {SECONDS.name} anew")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs in a full run alone (`make test-all`)")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Progress(config, seconds_of_files()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a full run alone runs, and sort the files that take longest to the front."""
    left_out = [item for item in items if item.get_closest_marker("full") and not IS_FULL]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    seconds = seconds_of_files()
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), UNKNOWN_S))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that tests start inherit it: a model of several tests is measured once, by whichever
    of the processes that share the tests has it first."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHALE_TRAIN_CACHE", str(root / "cache"))
        yield
