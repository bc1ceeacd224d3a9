"""Read and check `hydra.sweeper`, the settings of a sweep by Optuna."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from whale_train.errors import Fault, nearest
from whale_train.extras import how_to_install
from whale_train.launcher.ranks.run_dir import installed_version
from whale_train.launcher.study.samplers import (
    CMAES,
    NO_PRUNER,
    PRUNERS,
    SAMPLERS,
    Number,
    Options,
)
from whale_train.validation import as_yaml, validated

SWEEPER = "hydra_plugins.whale_optuna.OptunaSweeper"
SECTION = "hydra.sweeper"
JOURNAL = "journal:///"
_STORAGES = re.compile(r"(sqlite|postgresql|mysql)(\+\w+)?://.+|journal:///.+")
_PASSWORD = re.compile(r"(?<=:)[^:/@]+(?=@)")
_OLDEST = 5  # the oldest major version of Optuna that works

Direction = Literal["minimize", "maximize"]


def _as_list(value: object) -> object:
    """Return a single text as a tuple of one, and None as an empty tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


class StudySettings(BaseModel):
    """The settings of a study.

    objective: the names of the objectives; empty for the default of the jobs' mode.
    direction: the direction of each objective; empty to derive directions from the names.
    storage: the URL of the database or journal; None keeps the study in memory.
    study_name: the name of the study in the storage.
    n_trials: number of trials of the whole study.
    n_jobs: number of trials that run at once.
    max_failure_rate: the fraction of `n_trials` that may fail.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    objective: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    direction: Annotated[tuple[Direction, ...], BeforeValidator(_as_list)] = ()
    storage: str | None = None
    study_name: str | None = None
    n_trials: Number = 20
    n_jobs: Number = 1
    max_failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.5


class Named(NamedTuple):
    """The name and the options of a sampler or pruner."""

    name: str
    options: Options


class StudyRequest(NamedTuple):
    """The request for a study: the settings, the sampler and the pruner."""

    settings: StudySettings
    sampler: Named
    pruner: Named


def read_settings(section: Mapping[str, Any], faults: list[Fault]) -> StudyRequest | None:
    """Return the request in `hydra.sweeper`, or None after adding faults.

    section: the plain values of the section, whose `params` are ignored.
    """
    before = len(faults)
    given = {key: value for key, value in section.items() if key not in ("_target_", "params")}
    sampler = _named("sampler", given.pop("sampler", "tpe"), SAMPLERS, faults)
    pruner = _named("pruner", given.pop("pruner", NO_PRUNER), PRUNERS, faults)
    for key in ("custom_search_space", "search_space"):  # keys of hydra-optuna-sweeper
        if key in given:
            rule = "would be called" if key == "custom_search_space" else "is not a key here"
            remedy = f"write the values on the command line, or as {SECTION}.params"
            faults.append(Fault(f"{SECTION}.{key}", as_yaml(given.pop(key)), rule, remedy))
    settings = validated(StudySettings, given, SECTION, faults)
    if settings is not None:
        _check_storage(settings, sampler, faults)
    _check_packages(sampler, faults)
    if len(faults) > before or settings is None or sampler is None or pruner is None:
        return None
    return StudyRequest(settings, sampler, pruner)


def shown_url(url: str) -> str:
    """Return the URL of a storage with any password masked, for messages."""
    return _PASSWORD.sub("***", url)


def _named(
    key: str, value: Any, kinds: Mapping[str, type[Options]], faults: list[Fault]
) -> Named | None:
    """Return a sampler or pruner, or None after adding a fault.

    key: `sampler` or `pruner`.
    value: the name, or a mapping with the `name` and options.
    kinds: the options of each sampler or pruner, by name.
    """
    path = f"{SECTION}.{key}"
    options = dict(value) if isinstance(value, dict) else {"name": value}
    name = options.pop("name", None)
    name = NO_PRUNER if name is None and key == "pruner" else name
    if not isinstance(name, str) or name not in kinds:
        shown = as_yaml(value if name is None else name)
        faults.append(Fault(path, shown, f"is no {key}", nearest(str(name), kinds)))
        return None
    foreign = {*options} - {*kinds[name].model_fields}
    if foreign and any(foreign <= {*kind.model_fields} for kind in kinds.values()):
        # Hydra has merged the mapping with the options of the chosen file.
        rule = f"has options of another {key} ({', '.join(sorted(foreign))})"
        faults.append(Fault(path, name, rule, f"choose it by hydra/sweeper/{key}={name}"))
        return None
    read = validated(kinds[name], options, path, faults)
    return None if read is None else Named(name, read)


def _check_storage(settings: StudySettings, sampler: Named | None, faults: list[Fault]) -> None:
    """Add the faults of the study's storage."""
    key, url = f"{SECTION}.storage", settings.storage
    if url is None:
        if settings.study_name is not None:
            rule = "has no effect on a study in memory"
            remedy = f"add {key}=sqlite:///study.db"
            faults.append(Fault(f"{SECTION}.study_name", settings.study_name, rule, remedy))
        return
    if not _STORAGES.fullmatch(url):
        remedy = "use sqlite:///study.db, journal:///study.log, postgresql://... or mysql://..."
        faults.append(Fault(key, shown_url(url), "is no storage of a study", remedy))
    if sampler is not None and sampler.name == CMAES:
        rule = "keeps its state pickled in the study, and unpickling a file can call anything"
        remedy = "use tpe, or leave hydra.sweeper.storage out"
        faults.append(Fault(f"{SECTION}.sampler", CMAES, rule, remedy))


def _check_packages(sampler: Named | None, faults: list[Fault]) -> None:
    """Add a fault for a package that the study needs and that is missing or too old."""
    installed = installed_version("optuna")
    if installed is None or int(installed.partition(".")[0]) < _OLDEST:
        state = "which is not installed" if installed is None else f"and {installed} is installed"
        rule = f"needs Optuna {_OLDEST}, {state}"
        faults.append(Fault("hydra/sweeper", "optuna", rule, how_to_install("optuna")))
    elif sampler is not None and sampler.name == CMAES and find_spec("cmaes") is None:
        rule, remedy = "needs cmaes, which is not installed", how_to_install("cmaes")
        faults.append(Fault(f"{SECTION}.sampler", CMAES, rule, remedy))
