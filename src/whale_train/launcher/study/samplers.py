"""Define and create the samplers and pruners that a study can name, with their options.

Each name stands for one class of Optuna, so that no config names a class (docs/adr/057).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from whale_train.validation import no_truth_value

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

Count = Annotated[int, BeforeValidator(no_truth_value), Field(ge=0)]
Number = Annotated[int, BeforeValidator(no_truth_value), Field(ge=1)]
Several = Annotated[int, BeforeValidator(no_truth_value), Field(ge=2)]
Seed32 = Annotated[int, BeforeValidator(no_truth_value), Field(ge=0, lt=2**32)]  # NumPy's


class Options(BaseModel):
    """The options of one sampler or pruner. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _Seeded(Options):
    seed: Seed32 | None = None


class _Tpe(_Seeded):
    n_startup_trials: Count = 10
    n_ei_candidates: Number = 24
    multivariate: bool | None = None
    constant_liar: bool = True


class _Cmaes(_Seeded):
    n_startup_trials: Count = 1
    popsize: Several | None = None


class _Nsgaii(_Seeded):
    population_size: Several = 50


class _Median(Options):
    n_startup_trials: Count = 5
    n_warmup_steps: Count = 0
    interval_steps: Number = 1


class _SuccessiveHalving(Options):
    min_resource: Number | None = None
    reduction_factor: Several = 4
    min_early_stopping_rate: Count = 0


class _Hyperband(Options):
    min_resource: Number = 1
    max_resource: Number | None = None
    reduction_factor: Several = 3


GRID, CMAES, NO_PRUNER = "grid", "cmaes", "none"
SAMPLERS: Mapping[str, type[Options]] = {
    "tpe": _Tpe,
    "random": _Seeded,
    GRID: _Seeded,
    CMAES: _Cmaes,
    "nsgaii": _Nsgaii,
}
PRUNERS: Mapping[str, type[Options]] = {
    NO_PRUNER: Options,
    "median": _Median,
    "successive_halving": _SuccessiveHalving,
    "hyperband": _Hyperband,
}


def make_sampler(
    name: str, options: Options, grid: Mapping[str, Sequence[Any]], num_trials: int
) -> "BaseSampler":
    """Return Optuna's sampler.

    name: a name in SAMPLERS.
    options: the options of the sampler.
    grid: the values of every parameter, for the grid sampler.
    num_trials: number of trials that the study has already. A continued study draws with a seed
        derived from this number, since the same seed would draw the earlier values again.
    """
    from optuna import samplers

    given = options.model_dump()
    if name == GRID:
        return samplers.GridSampler(grid, seed=given["seed"])
    if given["seed"] is not None and num_trials:
        from numpy.random import SeedSequence

        given["seed"] = int(SeedSequence([given["seed"], num_trials]).generate_state(1)[0])
    if name == "tpe":
        return samplers.TPESampler(**given)
    if name == CMAES:
        return samplers.CmaEsSampler(**given, warn_independent_sampling=False)
    if name == "nsgaii":
        return samplers.NSGAIISampler(**given)
    return samplers.RandomSampler(**given)


def make_pruner(name: str, options: Options) -> "BasePruner":
    """Return Optuna's pruner.

    name: a name in PRUNERS.
    options: the options of the pruner.
    """
    from optuna import pruners

    given = options.model_dump()
    if name == "median":
        return pruners.MedianPruner(**given)
    if name == "successive_halving":
        return pruners.SuccessiveHalvingPruner(**given | {
            "min_resource": given["min_resource"] or "auto"
        })  # fmt: skip
    if name == "hyperband":
        return pruners.HyperbandPruner(**given | {"max_resource": given["max_resource"] or "auto"})
    return pruners.NopPruner()
