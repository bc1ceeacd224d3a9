"""Define trackers: four moments of a run, and the description of the run that a tracker gets.

A tracker keeps the curves of runs outside of the run directory. A user's own class is a tracker if
it has the four methods.
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
        """Return the values of `config` as text, by dotted key. A list is one value."""
        return dict(_flat("", self.config))


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of every value in nested mappings."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, as_yaml(value)


class Tracker(Protocol):
    """Keeper of a run's curves.

    Only rank 0 has trackers. Every tracker is called from one thread, which is not the main thread,
    in this order: `open`, then `log` and `state`, then `close`. Training waits for `state` and
    `close` only. An exception is reported, and training goes on.
    """

    def open(self, run: RunDescription, state: dict[str, Any] | None) -> None:
        """Begin a run, or continue the run of `state` after removing its rows after `run.step`.

        state: the result of `state()` at the checkpoint that training resumes from; None for a new
            run.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of optimizer step `step`, by their names in `metrics.jsonl`.

        `values` has the numbers of this step alone: results of an evaluation come with the step
        before it. Numbers that are not finite are left out.
        """

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """End this part of the run.

        summary: content of `summary.json`; empty for a run that failed.
        """

    def state(self) -> dict[str, Any]:
        """Return the place of this run's curve, such as its id, as JSON data.

        It is called when a checkpoint is saved. All rows logged before must be stored when it
        returns.
        """


_METHODS = ("open", "log", "close", "state")
TRACKER = TargetKind(
    "whale_train.trackers.tracker.Tracker",
    lambda made: all(callable(getattr(made, name, None)) for name in _METHODS),
)
