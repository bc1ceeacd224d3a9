"""How far a run of the tests is, and how long the rest will take.

Files take from milliseconds to a minute, so that the number of tests that are done says little of
the time that is left. `seconds.json` has the seconds that each file took in a run with
`--write-seconds`, which replaces it. They also order the files: the longest first, so that no
worker is left alone with one at the end.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

SECONDS = Path(__file__).with_name("seconds.json")
UNKNOWN_S = 1.0  # of a file that the seconds do not name
PARTS = 10  # of a run, with a line after each
SHORT_S = 10.0  # until then nothing is said


def seconds_of_files() -> dict[str, float]:
    """Return the seconds of every file's tests, by the file's path below `tests`."""
    kept: dict[str, float] = json.loads(SECONDS.read_text())
    return kept


def file_of(test: str) -> str:
    """Return the path below `tests` of the file of a test, by the test's id."""
    return test.partition("::")[0].removeprefix("tests/")


class Progress:
    """Prints, at every tenth of a run, the time since its start and the time that is left."""

    def __init__(self, config: pytest.Config, seconds: Mapping[str, float]) -> None:
        self._config, self._seconds = config, seconds
        self._left: Counter[str] = Counter()  # tests by file
        self._counts: Counter[str] = Counter()
        self._spent: Counter[str] = Counter()  # seconds by file, of this run
        self._began = time.monotonic()
        self._told = 0  # parts

    def pytest_xdist_node_collection_finished(self, node: Any, ids: Iterable[str]) -> None:
        self._expect(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect(item.nodeid for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self._spent[file] += report.duration
        if report.when == "teardown":
            self._left[file] -= 1
            self._tell()

    def pytest_sessionfinish(self) -> None:
        if self._config.getoption("write_seconds"):
            rounded = {file: round(spent, 1) for file, spent in sorted(self._spent.items())}
            SECONDS.write_text(json.dumps(rounded, indent=0) + "\n")

    def _expect(self, ids: Iterable[str]) -> None:
        """Note the tests to come, which all workers collect alike."""
        if not self._counts:
            self._counts = Counter(map(file_of, ids))
            self._left = Counter(self._counts)
            self._began = time.monotonic()

    def _tell(self) -> None:
        done = 1 - self._work(self._left) / (self._work(self._counts) or 1.0)
        parts, passed = int(done * PARTS + 1e-6), time.monotonic() - self._began
        if not self._told < parts < PARTS or passed < SHORT_S:
            return
        self._told = parts
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            rest = passed * (1 - done) / done
            reporter.write(
                f"\n{done:.0%} of the work after {_clock(passed)}, about {_clock(rest)} to go\n"
            )

    def _work(self, tests: Mapping[str, int]) -> float:
        """Return the seconds that these numbers of tests take by file, one after the other."""
        return sum(
            self._seconds.get(file, UNKNOWN_S) * count / self._counts[file]
            for file, count in tests.items()
        )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
