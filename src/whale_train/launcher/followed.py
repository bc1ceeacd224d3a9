"""Define the interface through which a sweep follows a running job and can stop it early."""

from collections.abc import Mapping
from typing import Any, Protocol


class Follower(Protocol):
    """A reader of a running job's metrics that can stop the job."""

    def begin(self, steps: int) -> None:
        """Receive the job's number of optimizer steps, before the first metrics record."""

    def hear(self, record: Mapping[str, Any]) -> None:
        """Receive one new line of `metrics.jsonl`, parsed."""

    @property
    def ends(self) -> bool:
        """Return whether the job is to stop, in the way that SIGTERM stops it."""
