"""What tests of whole jobs share for a session: the process that runs them, and what they found."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.distributed.apart import HostApart, hosts_apart
from tests.distributed.cases import Run
from tests.distributed.equality import Jobs
from tests.distributed.jobs import Job, job_in
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import write_arrays
from tests.distributed.test_verify import Sides


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Give the process that runs functions of test files."""
    served = Served()
    yield served
    served.close()


@pytest.fixture(scope="session")
def jobs(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Run jobs by their overrides, equal ones once."""
    return Jobs(tmp_path_factory.mktemp("jobs"), served)


@pytest.fixture(scope="session")
def run(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run cases, equal ones once."""
    return Run(tmp_path_factory.mktemp("equality"), jobs)


@pytest.fixture(scope="session")
def sides(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """Run sides of verifications, those of one process once."""
    return Sides(tmp_path_factory.mktemp("verify"), served)


@pytest.fixture(scope="session")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the arrays that the models of `test_parallel_strategies` read."""
    folder = tmp_path_factory.mktemp("arrays")
    write_arrays(folder)
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Give a job of processes, in a folder of its own, of which nothing is left afterwards."""
    (tmp_path / "job").mkdir()
    with job_in(tmp_path / "job") as job:
        yield job


@pytest.fixture
def hosts(job: Job) -> Iterator[list[HostApart]]:
    """Give two hosts that share no files, of which the first has the job's folder."""
    with hosts_apart(job.folder, ("apple", "pear")) as hosts:
        yield hosts
