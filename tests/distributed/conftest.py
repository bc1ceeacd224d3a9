"""What tests of whole jobs have in common."""

from collections.abc import Iterator

import pytest
from tests.distributed.equality import Jobs


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The process of a module's jobs."""
    jobs = Jobs(tmp_path_factory.mktemp("jobs"))
    yield jobs
    jobs.close()
