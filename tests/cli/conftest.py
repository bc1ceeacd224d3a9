"""Runs every refused request of the session once, when a test first looks at it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.command import Answer
from tests.cli.refused import Case


@pytest.fixture(scope="session")
def refusal(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Case], tuple[Path, Answer]]:
    """Give the folder and the answer of a case."""
    done: dict[str, tuple[Path, Answer]] = {}

    def answer(case: Case) -> tuple[Path, Answer]:
        if case.name not in done:
            folder = tmp_path_factory.mktemp(case.name)
            done[case.name] = (folder, case.run(folder))
        return done[case.name]

    return answer
