"""Runs all refused requests of the session two at a time, while the tests look at them."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cli.command import Answer
from tests.cli.refused import Case

AT_A_TIME = 2


@pytest.fixture(scope="session")
def refusal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Case], tuple[Path, Answer]]]:
    """The folder and the answer of a case that some collected test is parametrised with."""
    specifications = (getattr(item, "callspec", None) for item in request.session.items)
    cases = [spec.params["case"] for spec in specifications if spec and "case" in spec.params]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        running: dict[str, tuple[Path, Future[Answer]]] = {}
        for case in cases:
            if isinstance(case, Case) and case.name not in running:
                folder = tmp_path_factory.mktemp(case.name)
                running[case.name] = (folder, pool.submit(case.run, folder))

        def answer(case: Case) -> tuple[Path, Answer]:
            folder, future = running[case.name]
            return folder, future.result()

        yield answer
        pool.shutdown(cancel_futures=True)
