"""Define the results that the functions of `from_python.py` return, and their display."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from whale_train.checkpoints.checkpoint_files import MODEL
from whale_train.launcher.modes.evaluate import results_table
from whale_train.launcher.modes.verification import Verification
from whale_train.launcher.planning.plan_request import Resolved
from whale_train.launcher.ranks.run_dir import METRICS
from whale_train.launcher.ui.html import as_html
from whale_train.launcher.ui.progress import summary_line
from whale_train.launcher.ui.show_resolved import resolved_view
from whale_train.launcher.ui.show_verify import verdict_line, verification_view
from whale_train.launcher.ui.terminal import Portable
from whale_train.strategies.plan.plan import Plan


class ShownPlan(Plan):
    """A Plan that rich's consoles and notebooks display as `mode=plan` does."""

    _view: RenderableType = ""

    @classmethod
    def of(cls, resolved: Resolved, names: Mapping[str, str]) -> "ShownPlan":
        """Return the plan of a request.

        names: the chosen option of each config group, by group.
        """
        plan = cls(**{part.name: getattr(resolved.plan, part.name) for part in fields(Plan)})
        object.__setattr__(plan, "_view", resolved_view(resolved, names))
        return plan

    def __rich__(self) -> RenderableType:
        return self._view or super().__repr__()

    def _repr_html_(self) -> str:
        return as_html(self.__rich__())

    def __repr__(self) -> str:
        graphs = ", ".join(task_graph.name for task_graph in self.task_graphs)
        return f"<plan of {graphs} for {self.world_size} ranks of {self.cluster}>"


@dataclass(frozen=True)
class TrainResult:
    """The result of a finished training.

    run_dir: the run directory, absolute.
    summary: the content of `summary.json`: the loss of the last step (`final_loss`), speed, memory;
        empty where an earlier attempt died after the last step, and this call wrote `model/` alone.
    """

    run_dir: Path
    summary: Mapping[str, Any]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every step: the lines of `metrics.jsonl`, parsed."""
        with (self.run_dir / METRICS).open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    @property
    def model(self) -> Path | None:
        """Return the folder of the trained weights; None where the run wrote none."""
        folder = self.run_dir / MODEL
        return folder if folder.is_dir() else None

    def __rich__(self) -> RenderableType:
        line = summary_line(self.summary, self.run_dir) if self.summary else str(self.run_dir)
        return Portable(line)

    def _repr_html_(self) -> str:
        return as_html(self.__rich__())


@dataclass(frozen=True)
class EvaluateResult:
    """The results of an evaluation.

    run_dir: the run directory, absolute.
    sets: the value of each metric by name, by the name of the set: `sets["test"]["loss"]`.
    """

    run_dir: Path
    sets: Mapping[str, Mapping[str, float | None]]

    def __rich__(self) -> RenderableType:
        return Portable(results_table(self.sets))

    def _repr_html_(self) -> str:
        return as_html(self.__rich__())


@dataclass(frozen=True)
class PredictResult:
    """The predictions for all samples of named sets.

    run_dir: the run directory, absolute.
    files: the file of predictions by the name of the set, with one line for each sample, in order.
    """

    run_dir: Path
    files: Mapping[str, Path]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the predictions of a set, one mapping for each sample, with the keys `sample` and
        `predicted`, and `target` and `probability` if known.

        name: the name of the set.
        """
        with self.files[name].open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class VerifyResult:
    """The comparison of a plan's first steps with the same steps on one process.

    run_dir: the run directory, absolute.
    verification: all differences, with their allowances.
    """

    run_dir: Path
    verification: Verification

    @property
    def equal(self) -> bool:
        """Return whether the plan computed the same as one process, within the tolerance."""
        return self.verification.equal

    def __str__(self) -> str:
        return verdict_line(self.verification)

    def __rich__(self) -> RenderableType:
        view = verification_view(self.verification)
        return view if self.equal else Group(view, Text(str(self), style="bold red"))

    def _repr_html_(self) -> str:
        return as_html(self.__rich__())
