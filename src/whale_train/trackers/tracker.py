"""Define what a tracker is: four moments of a run, and the description of the run that it gets.

A tracker keeps the curves of runs somewhere else than in the run directory. A class of a user's own
is one if it has the four methods.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from whale_train.own_code import TargetKind
from whale_train.validation import as_yaml

Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class RunDescription:
    """Description of a run, or of the part of a run that begins.

    name: name of the run directory.
    folder: the run directory, absolute.
    step: optimizer step after which this part begins; 0 for a new run. Rows of an earlier part with
        a larger step are to be replaced.
    config: the request, and facts of the plan under `plan`, as plain nested data.
    files: files of the run directory that belong to the run: the plan, the request, the inventory,
        the environment and Hydra's config.
    note: function that tells the user a sentence, in the log at once and on the terminal at the
        end.
    """

    name: str
    folder: Path
    step: int
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    note: Callable[[str], None]

    @property
    def parameters(self) -> dict[str, str]:
        """Return the values of `config` as text, by their keys with dots. A list is one value."""
        return dict(_flat("", self.config))


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, as_yaml(value)


class Tracker(Protocol):
    """Keeper of a run's curves.

    Rank 0 alone has trackers. Each is called from one thread, which is not the main thread, in
    order: `open`, then `log` and `state`, then `close`. Training waits for none of them but
    `state` and `close`. What one raises is reported, and the training goes on.
    """

    def open(self, run: RunDescription, state: dict[str, Any] | None) -> None:
        """Begin a run, or go on with the run of `state`, from which rows after `run.step` are
        removed.

        state: what `state()` returned when the checkpoint was saved from which the training goes
            on; None for a run without an earlier part.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of optimizer step `step`, by their names in `metrics.jsonl`.

        Names and values are those of the step alone: an evaluation is there after steps that had
        one. A number that is not finite is left out.
        """

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """End this part of the run.

        summary: content of `summary.json`; empty for a run that failed.
        """

    def state(self) -> dict[str, Any]:
        """Return the place of this run's curve, such as its id, as JSON data.

        All rows logged before are kept for good when it returns: it is called when a checkpoint is
        saved.
        """


_METHODS = ("open", "log", "close", "state")
TRACKER = TargetKind(
    "whale_train.trackers.tracker.Tracker",
    lambda made: all(callable(getattr(made, name, None)) for name in _METHODS),
)
