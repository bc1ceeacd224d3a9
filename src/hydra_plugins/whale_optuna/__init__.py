"""Define the sweeper of `hydra/sweeper=optuna` in the only package where Hydra looks for plugins.

Every Hydra application in this environment imports this file. It registers no config, so that other
applications are not affected; whale-train's configs are in `whale_train/conf/hydra`.
"""

import sys
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """A sweep whose values Optuna chooses, run by `whale_train.launcher.study`."""

    def __init__(self, **settings: Any) -> None:
        """Accept the keys of `hydra.sweeper`; they are read from the config that `setup` gets."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store Hydra's context, task function and config for `sweep`."""
        self._of_hydra = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        """Run the study, and exit the process if the exit status is not 0.

        arguments: the overrides of the command line.
        """
        from whale_train.launcher.study.run_study import run_study

        status = run_study(*self._of_hydra, arguments)
        if status:
            sys.exit(status)
