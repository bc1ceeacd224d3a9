"""Define what a callback is: code of the user's own at six moments of a run.

A class is one if it has at least one of the six methods; those that it lacks are not called.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from whale_train.own_code import TargetKind
from whale_train.trackers.tracker import RunDescription, Status

Wish = Literal["save", "end"] | None  # what a callback asks the run for


class Callback(Protocol):
    """Code that is called at moments of a run, on rank 0, in the thread that trains."""

    def start(self, run: RunDescription) -> None:
        """Begin. The weights are there, and no step was taken since `run.step`."""

    def step(self, step: int, values: Mapping[str, Any]) -> Wish:
        """Take note of optimizer step `step`, with its line of `metrics.jsonl`.

        It is called while the step after it is computed. Returns "save" for a checkpoint after one
        of the next two steps, "end" for the end of the run there, or None.
        """

    def evaluation(self, step: int, values: Mapping[str, float]) -> Wish:
        """Take note of the evaluation after `step`. Returns as `step` does."""

    def save(self, step: int, folder: Path) -> None:
        """Take note of the checkpoint after `step`, which is whole."""

    def failure(self, error: BaseException) -> None:
        """Take note of the exception that ends this rank, and with it the run."""

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        """End. `summary` is the content of `summary.json`."""


MOMENTS = ("start", "step", "evaluation", "save", "failure", "end")
CALLBACK = TargetKind(
    "whale_train.callbacks.callback.Callback",
    lambda made: any(callable(getattr(made, name, None)) for name in MOMENTS),
    wanted=f"name a class with one of the methods {', '.join(MOMENTS)}",
)
