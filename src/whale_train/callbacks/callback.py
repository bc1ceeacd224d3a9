"""Define callbacks: the user's own code at six moments of a run.

A class is a callback if it has at least one of the six methods. The others are not called.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from whale_train.own_code import TargetKind
from whale_train.trackers.tracker import RunDescription, Status

Wish = Literal["save", "end"] | None  # a callback's request to the run


class Callback(Protocol):
    """Code that is called at moments of a run, on rank 0, in the thread that trains."""

    def start(self, run: RunDescription) -> None:
        """Begin. The weights are loaded, and no step after `run.step` has been taken."""

    def step(self, step: int, values: Mapping[str, Any]) -> Wish:
        """Take note of optimizer step `step`. `values` is the step's line of `metrics.jsonl`.

        The call comes while the next step is computed. Returns "save" to write a checkpoint after
        one of the next two steps, "end" to end the run after one of them, or None.
        """

    def evaluation(self, step: int, values: Mapping[str, float]) -> Wish:
        """Take note of the results of the evaluation after `step`. Returns "save", "end" or None,
        as `Callback.step` does."""

    def save(self, step: int, folder: Path) -> None:
        """Take note of the complete checkpoint in `folder`, written after `step`."""

    def failure(self, error: BaseException) -> None:
        """Take note of the exception that ends this rank and the run."""

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        """End. `summary` is the content of `summary.json`."""


MOMENTS = ("start", "step", "evaluation", "save", "failure", "end")
CALLBACK = TargetKind(
    "whale_train.callbacks.callback.Callback",
    lambda made: any(callable(getattr(made, name, None)) for name in MOMENTS),
    wanted=f"name a class with one of the methods {', '.join(MOMENTS)}",
)
