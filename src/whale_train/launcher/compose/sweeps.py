"""Expand a sweep into jobs: the Cartesian product of the choices on the command line and in a
config file."""

from collections.abc import Iterable, Sequence
from math import ceil, prod
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig

from whale_train.errors import ConfigError, Fault

MOST_JOBS = 1_000  # the most jobs of a sweep
PARAMS = "hydra.sweeper.params"


def value_of(override: Override) -> str:
    """Return the text after the equals sign of an override."""
    return str(override.input_line).partition("=")[2]


def refuse_swept(overrides: Iterable[Override]) -> None:
    """Raise ConfigError for overrides that give several values, where a single run was asked
    for."""
    rule = "gives several values to one run"
    faults = [
        Fault(o.key_or_group, value_of(o), rule, f"add -m to sweep, or give one {_kind(o)}")
        for o in overrides
        if o.is_sweep_override()
    ]
    if faults:
        raise ConfigError(faults)


def jobs(config: DictConfig | None, overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, in Hydra's order.

    config: the config that all jobs share, which may also have choices (`hydra.sweeper.params`).
    overrides: the overrides of the command line.

    Raises ConfigError for choices that cannot be swept, and for more jobs than MOST_JOBS.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed = {
        o.get_key_element(): o for o in [*params_of(config, parser), *_all(parser, overrides)]
    }
    numbers = []
    for override in parsed.values():
        if override.is_sweep_override() and not override.is_discrete_sweep():
            rule = "is a range without steps, which nothing here can sweep"
            remedy = "list the values, or add hydra/sweeper=optuna"
            fault = Fault(override.key_or_group, value_of(override), rule, remedy)
            raise ConfigError([fault])
        numbers.append(_choices(override))
    if prod(numbers) > MOST_JOBS:
        widest = max(parsed.values(), key=_choices)
        rule = f"makes a sweep of {prod(numbers):,} jobs, and at most {MOST_JOBS:,} are swept"
        remedy = "sweep fewer values, or in several commands"
        raise ConfigError([Fault(widest.key_or_group, value_of(widest), rule, remedy)])
    combinations: list[list[str]] = [[]]
    for key, override in parsed.items():
        choices = [str(override.input_line)]
        if override.is_sweep_override():
            choices = [f"{key}={value}" for value in override.sweep_string_iterator()]
        combinations = [[*job, choice] for job in combinations for choice in choices]
    return combinations


def _all(parser: OverridesParser, overrides: Sequence[str]) -> list[Override]:
    """Return the parsed overrides of the command line."""
    return list(parser.parse_overrides(list(overrides)))


def params_of(config: DictConfig | None, parser: OverridesParser) -> list[Override]:
    """Return the choices in a config's `hydra.sweeper.params`, as overrides. Raises ConfigError
    where a choice cannot be parsed."""
    sweeper: Any = None if config is None else config.hydra.get("sweeper")
    params = sweeper.get("params") if isinstance(sweeper, DictConfig) else None
    choices, faults = [], []
    for key, value in (params or {}).items():
        try:
            choices += parser.parse_overrides([f"{key}={value}"])
        except HydraException as error:
            reason = str(error).splitlines()[0].rpartition("Exception: ")[2].rstrip(".:")
            remedy = "write values as on the command line, as '1,2'"
            faults.append(
                Fault(f"{PARAMS}.{key}", str(value), f"cannot be read ({reason})", remedy)
            )
    if faults:
        raise ConfigError(faults)
    return choices


def _choices(override: Override) -> int:
    """Return the number of values that an override gives.

    A range is counted without being expanded. A range with step 0 counts as MOST_JOBS + 1.
    """
    value = override.value()
    if isinstance(value, RangeSweep):
        start, stop, step = (float(x or 0) for x in (value.start, value.stop, value.step))
        return max(0, ceil((stop - start) / step)) if step else MOST_JOBS + 1
    if not override.is_sweep_override():
        return 1
    return sum(1 for _ in override.sweep_string_iterator())


def _kind(override: Override) -> str:
    """Return `value` for an override of a key, and `option` for an override of a group."""
    return "value" if "." in override.key_or_group else "option"
