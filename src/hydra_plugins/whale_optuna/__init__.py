"""Have Hydra find the sweeper of `hydra/sweeper=optuna`, which looks for plugins here alone.

Every Hydra application of this environment imports this file and gets nothing from it: no config is
registered here. Those of whale-train are in `whale_train/conf/hydra`.
"""

import sys
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """A sweep whose values Optuna chooses: the Hydra side of `whale_train.launcher.study`."""

    def __init__(self, **settings: Any) -> None:
        """Take the keys of `hydra.sweeper`, which `setup` gets too, within the config."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what `sweep` needs."""
        self._of_hydra = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        """Run the study, and exit where its status is not 0."""
        from whale_train.launcher.study.run_study import run_study

        status = run_study(*self._of_hydra, arguments)
        if status:
            sys.exit(status)
