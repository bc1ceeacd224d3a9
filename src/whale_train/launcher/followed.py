"""Say what a job tells about itself while it runs, and how it is ended by somebody who hears it."""

from collections.abc import Mapping
from typing import Any, Protocol


class Follower(Protocol):
    """A reader of the metrics of a running job, which may have the job ended."""

    def begin(self, steps: int) -> None:
        """Take the number of optimizer steps of the job, before any line."""

    def hear(self, record: Mapping[str, Any]) -> None:
        """Take a new line of `metrics.jsonl`."""

    @property
    def ends(self) -> bool:
        """Return whether the job is to end, as by SIGTERM."""
