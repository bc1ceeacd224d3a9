"""Read the search space of a study from the overrides of a sweep.

Hydra's grammar determines the values: a range excludes its stop, as in every other sweep
(hydra-optuna-sweeper includes it).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    RangeSweep,
    Transformer,
)

from whale_train.errors import Fault

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Choice = str | int | float | bool | None


@dataclass(frozen=True)
class SweptKey:
    """A parameter of a study: a key, and the values that the study may choose.

    key: the key, or the config group.
    prefix: Hydra's `+` or `++` before the key.
    choices: the values of a choice; empty for an interval or range.
    low, high: the smallest and the largest number of an interval or range.
    step: distance between the numbers of a range; None for an interval.
    log: whether numbers are drawn on a logarithmic scale.
    """

    key: str
    prefix: str = ""
    choices: tuple[Choice, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False

    def distribution(self) -> "BaseDistribution":
        """Return Optuna's distribution of the values."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            step = int(self.step or 1)
            return distributions.IntDistribution(self.low, self.high, self.log, step)
        return distributions.FloatDistribution(self.low, self.high, self.log, self.step)

    def values(self) -> Sequence[Choice] | None:
        """Return all values; None for an interval, whose values cannot be enumerated."""
        if self.choices:
            return self.choices
        if self.step is None:
            return None
        number = round((self.high - self.low) / self.step) + 1
        if isinstance(self.low, int):
            return [self.low + i * int(self.step) for i in range(number)]
        low, step = Decimal(str(self.low)), Decimal(str(self.step))
        return [float(low + i * step) for i in range(number)]

    def override(self, value: Choice) -> str:
        """Return the override that sets the key to `value`."""
        return f"{self.prefix}{self.key}={_text(value)}"


def read_space(
    overrides: Iterable[Override], faults: list[Fault]
) -> tuple[dict[str, SweptKey], list[str]]:
    """Return the parameters by key, and the overrides that all trials share.

    faults: receives a fault for each override whose values a study cannot choose from, and for a
        sweep without parameters.
    """
    space: dict[str, SweptKey] = {}
    fixed: dict[str, str] = {}
    for override in overrides:  # a later override replaces an earlier one of the same key
        key = override.key_or_group + (f"@{override.package}" if override.package else "")
        space.pop(key, None)
        fixed.pop(key, None)
        if not override.is_sweep_override():
            fixed[key] = str(override.input_line)
            continue
        prefix = "+" if override.is_add() else "++" if override.is_force_add() else ""
        shown = str(override.input_line).partition("=")[2]
        try:
            if key.startswith(("hydra.", "hydra/")) or key == "mode":
                raise _Unfit("is the same for all trials", "give one value")
            space[key] = _parameter(key, prefix, override)
        except _Unfit as unfit:
            faults.append(Fault(key, shown, *unfit.args))
    if not space and not faults:
        remedy = "give several values to a key, as 'optimizer.lr=interval(0.001, 0.1)'"
        faults.append(Fault("hydra/sweeper", "optuna", "has no values to choose from", remedy))
    return space, list(fixed.values())


class _Unfit(Exception):
    """The rule and the remedy of an override whose values a study cannot choose from."""


def _parameter(key: str, prefix: str, override: Override) -> SweptKey:
    """Return the parameter of an override with several values. Raises _Unfit where a study cannot
    choose from them."""
    value: Any = override.value()
    if getattr(value, "shuffle", False):
        raise _Unfit("is shuffled, and the sampler determines the order", "leave shuffle() out")
    unknown = {*getattr(value, "tags", ())} - {"log"}
    if unknown or ("log" in getattr(value, "tags", ()) and not isinstance(value, IntervalSweep)):
        tags = ", ".join(sorted(unknown or {"log"}))
        raise _Unfit(f"has the tag {tags}", "use log, of an interval, or no tag")
    if isinstance(value, IntervalSweep):
        return _interval(key, prefix, value)
    if isinstance(value, RangeSweep):
        return _range(key, prefix, value)
    assert override.is_choice_sweep()
    items = value.list if isinstance(value, ChoiceSweep) else override.sweep_iterator()
    choices = tuple(map(_choice, items))
    if not choices:
        raise _Unfit("has no value", "name one that exists")
    if len(set(choices)) < len(choices):  # to Optuna, 1 is 1.0 and true
        raise _Unfit("has equal values", "name every value once")
    return SweptKey(key, prefix, choices)


def _interval(key: str, prefix: str, value: IntervalSweep) -> SweptKey:
    """Return the parameter of an interval, both ends included. Raises _Unfit."""
    low, high, log = value.start, value.end, "log" in value.tags
    assert low is not None
    assert high is not None
    if not (isfinite(low) and isfinite(high) and low <= high):
        raise _Unfit("is an interval without numbers", "write the smaller number first")
    if log and not (low >= 1 if isinstance(low, int) else low > 0):
        raise _Unfit("has no logarithm at its beginning", "begin above 0")
    return SweptKey(key, prefix, low=low, high=high, log=log)


def _range(key: str, prefix: str, value: RangeSweep) -> SweptKey:
    """Return the parameter of a range, the stop excluded. Raises _Unfit."""
    start, stop, step = (Decimal(str(x)) for x in (value.start, value.stop, value.step))
    if not (start.is_finite() and stop.is_finite() and step.is_finite() and step):
        raise _Unfit("is no range of numbers", "use range(START, STOP, STEP), its step not 0")
    number = ceil((stop - start) / step)
    if number < 1:
        raise _Unfit("has no value", "use range(START, STOP, STEP)")
    last = start + (number - 1) * step
    is_integer = all(isinstance(x, int) for x in (value.start, value.stop, value.step))
    cast = int if is_integer else float
    low, high = cast(min(start, last)), cast(max(start, last))
    return SweptKey(key, prefix, low=low, high=high, step=cast(abs(step)))


def _choice(item: Any) -> Choice:
    """Return a choice in a type that Optuna can store: a number, a boolean, None, or the text of
    an override's value."""
    if item is None or isinstance(item, bool | int | float):
        return item
    return str(Transformer.str(item))


def _text(value: Choice) -> str:
    """Return the text of a value in the grammar of overrides."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
