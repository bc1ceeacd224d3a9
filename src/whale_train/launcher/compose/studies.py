"""Check a sweep by Optuna (`hydra/sweeper=optuna`) before Hydra starts it."""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from whale_train.errors import ConfigError, Fault
from whale_train.launcher.compose.unknown_keys import is_choice
from whale_train.launcher.study.objectives import Goals, goals_of
from whale_train.launcher.study.samplers import GRID
from whale_train.launcher.study.search_space import SweptKey, read_space
from whale_train.launcher.study.settings import SECTION, SWEEPER, StudyRequest, read_settings

_BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def put_released_sweeper_aside() -> None:
    """Have `hydra/sweeper=optuna` choose our own sweeper even where hydra-optuna-sweeper is
    installed.

    Hydra uses a config that a plugin registers as the schema of a file of the same name, so the
    plugin's configs are removed.
    """
    Plugins.instance()  # registers them
    sweepers = ConfigStore.instance().repo.get("hydra", {}).get("sweeper", {})
    for name in ("optuna.yaml", "sampler"):
        sweepers.pop(name, None)


def is_study(config: DictConfig) -> bool:
    """Return whether a config asks for a sweep by Optuna."""
    return bool(OmegaConf.select(config, "hydra.sweeper._target_") == SWEEPER)


def read_study(
    config: DictConfig, overrides: Sequence[Override]
) -> tuple[StudyRequest, dict[str, SweptKey], list[str], Goals]:
    """Return the request for a study, the parameters by key, the overrides that all trials share,
    and the goals.

    config: the config that trials share, with Hydra's own part.
    overrides: the overrides in `hydra.sweeper.params`, then the command line's, except Hydra's own.

    Raises ConfigError with all faults.
    """
    faults: list[Fault] = []
    section: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    asked = read_settings(section, faults)
    space, fixed = read_space(overrides, faults)
    if OmegaConf.select(config, "hydra.launcher._target_") != _BASIC_LAUNCHER:
        rule = "is not what runs the jobs of hydra/sweeper=optuna"
        given = str(config.hydra.runtime.choices.get("hydra/launcher"))
        faults.append(Fault("hydra/launcher", given, rule, "use hydra/launcher=basic"))
    goals = None
    if asked is not None:
        faults += job_faults(asked, config)
        plain: Any = OmegaConf.to_container(
            OmegaConf.masked_copy(config, [str(x) for x in config if x != "hydra"])
        )
        goals = goals_of(asked, plain, space, faults)
        if asked.sampler.name == GRID:
            endless = (x for x in space.values() if x.values() is None)
            rule, remedy = "is an interval, which a grid has no end of", "use range() or choice()"
            faults += [Fault(parameter.key, "", rule, remedy) for parameter in endless]
    if faults or asked is None or goals is None:
        raise ConfigError(faults)
    return asked, space, fixed, goals


def job_faults(asked: StudyRequest, config: DictConfig) -> list[Fault]:
    """Return the faults of a job that cannot be a trial; an empty list for one that can.

    config: the config of the job, or the config that all jobs share.
    """
    faults = []
    mode, launcher = config.get("mode"), config.get("launcher") or {}
    kind = launcher.get("kind") if isinstance(launcher, DictConfig) else None
    if mode not in ("train", "plan"):
        rule = "has no value for hydra/sweeper=optuna to optimise"
        faults.append(Fault("mode", str(mode), rule, "use train or plan"))
    elif mode == "plan" and config.get("compare"):
        rule = "makes several plans, and a trial has one"
        faults.append(Fault("compare", str(list(config.compare)), rule, "leave it out"))
    if mode == "train" and kind == "slurm" and not launcher.get("wait", True):
        rule = "leaves a trial without its value"
        faults.append(Fault("launcher.wait", "false", rule, "leave it out"))
    if mode == "train" and kind in ("slurm", "ssh", "ray") and asked.pruner.name != "none":
        rule = f"ends jobs that run here, and not those of launcher={kind}"
        remedy = "use hydra/sweeper/pruner=none"
        faults.append(Fault(f"{SECTION}.pruner", asked.pruner.name, rule, remedy))
    if asked.settings.n_jobs > 1 and (mode != "train" or kind != "slurm"):
        rule = "runs jobs at once, and only launcher=slurm has places for them"
        key, given = f"{SECTION}.n_jobs", str(asked.settings.n_jobs)
        faults.append(Fault(key, given, rule, "use 1, or launcher=slurm"))
    return faults


def points(
    space: dict[str, SweptKey], fixed: Sequence[str], overrides: Sequence[Override]
) -> list[list[str]]:
    """Return the overrides of sample jobs, which together have every swept option of every config
    group.

    The first job has the first value of every parameter. Each further job replaces one option by
    another of the same group. All other values are checked with their trials, since a sweep may
    have more trials than can be composed beforehand.
    """
    groups = {override.key_or_group for override in overrides if is_choice(override)}
    first = {
        key: parameter.override(parameter.choices[0] if parameter.choices else parameter.low)
        for key, parameter in space.items()
    }
    jobs = [first]
    for key, parameter in space.items():
        if key in groups:
            jobs += [first | {key: parameter.override(value)} for value in parameter.choices[1:]]
    return [[*fixed, *job.values()] for job in jobs]
