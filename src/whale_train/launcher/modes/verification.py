"""Hold the outcome of a verification: every difference, and the verdict.

This file owns how far rounding excuses a difference (`MARGIN`), and `verify.json`. The differences
are computed by launcher/modes/compare_runs.py.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# A plan may differ from one process by MARGIN times the difference of the worst of ROUNDED_RUNS
# runs with other roundings. Their noise is that of several roundings, so that it is rarely less
# than a plan's.
MARGIN, ROUNDED_RUNS = 2.0, 3


@dataclass(frozen=True)
class Difference:
    """The largest difference between the plan's run and one process, in one figure or tensor.

    path: the parameter or buffer; '' for a figure of the whole model.
    what: `loss`, `gradient norm`, `initial value`, `gradient`, `update`, `buffer` or `frozen
        parameter`.
    step: the step, from 1; for an update, the step up to which it goes; None where it has none.
    difference: the difference, in the unit of what is compared.
    largest: the largest element of the reference, in the same unit.
    of_allowed: the largest quotient of a difference and the allowance there, at most 1 when equal.
    apart: the largest difference between copies on several ranks.
    """

    path: str
    what: str
    step: int | None
    difference: float
    largest: float
    of_allowed: float
    apart: float = 0.0

    @property
    def relative(self) -> float:
        """Return the difference divided by the largest element of the reference, infinite where
        that is 0."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.largest if self.largest else math.inf

    @property
    def within(self) -> bool:
        """Return whether the difference is allowed. NaN is not."""
        return self.of_allowed <= 1  # false for NaN

    @property
    def kind(self) -> "Kind":
        """Return the pair of `what` and `step`."""
        return self.what, self.step


Kind = tuple[str, int | None]  # the `what` and the `step` of a difference


@dataclass(frozen=True)
class Verification:
    """The whole comparison of the plan's run with one process.

    ranks: number of ranks of the plan.
    steps: number of steps compared.
    precision: the precision of both runs.
    tolerance: relative tolerance.
    losses: the loss of every step, on both sides; NaN stands for a value that is not finite.
    norms: the gradient norm of every step, on both sides, likewise.
    skipped: the steps that overflowed in fp16, on both sides.
    differences: every difference of every step and parameter, the worst first.
    undecided: number of elements whose updates only rounding decides.
    elements: number of all elements that are trained.
    no_gradient: whether no gradient but 0 reached any parameter.
    dropout_off: whether the model has dropout, which both sides left out.
    drew_random: whether a side drew random numbers all the same.
    rounding: by kind of difference, the worst `of_allowed` among the runs with other roundings;
        empty where no such run was needed.
    shared: properties that both sides share, so that they are not compared.
    """

    ranks: int
    steps: int
    precision: str
    tolerance: float
    losses: tuple[list[float], list[float]]
    norms: tuple[list[float], list[float]]
    skipped: tuple[list[int], list[int]]
    differences: tuple[Difference, ...]
    undecided: int
    elements: int
    no_gradient: bool
    dropout_off: bool
    drew_random: bool
    rounding: Mapping[Kind, float] = field(default_factory=dict)
    shared: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Return whether all differences are within their allowances, both sides skipped the same
        steps, and a gradient reached some parameter."""
        is_same = all(difference.within for difference in self.differences)
        return is_same and self.skipped[0] == self.skipped[1] and not self.no_gradient

    @property
    def may_be_rounding(self) -> bool:
        """Return whether all that is wrong are differences of a size that rounding can make."""
        wrong = [x for x in self.differences if not x.within]
        is_sized = all(math.isfinite(x.difference) and x.what != "initial value" for x in wrong)
        return bool(wrong) and is_sized and self.skipped[0] == self.skipped[1]

    @property
    def not_finite(self) -> int | None:
        """Return the first step, from 1, in which the loss or the gradient norm is no number on
        both sides, or None."""
        sides = zip(*self.losses, *self.norms, strict=False)
        for step, (a, b, c, d) in enumerate(sides, 1):
            if step in self.skipped[0] or step in self.skipped[1]:
                continue
            if math.isnan(a + c) and math.isnan(b + d):
                return step
        return None

    @property
    def parted(self) -> Difference | None:
        """Return the loss difference of the first step in which the losses part, or None."""
        losses = (x for x in self.differences if x.what == "loss" and not x.within)
        return min(losses, key=lambda x: x.step or 0, default=None)

    @property
    def worst(self) -> Difference | None:
        """Return the difference of the parameter or buffer that is most off, or None.

        Differences are searched in an order: initial values, gradients, first updates, last
        updates, then what is not trained. An error in one of them is in all that follow.
        """
        wrong = [x for x in self.differences if x.path and not x.within]
        return min(wrong, key=lambda x: (_ORDER.index(x.what), x.step or 0), default=None)

    @property
    def stretched(self) -> float:
        """Return the multiple of the tolerance that the largest difference needs, where rounding
        explains it. It is 1 where all differences are within the tolerance itself."""
        needed = (x.of_allowed * stretch(self.rounding, x.kind) for x in self.differences)
        return max((x for x in needed if math.isfinite(x)), default=1.0)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `verify.json`."""
        content = {
            "verdict": "equal" if self.equal else "different",
            "worst": self.worst.path if self.worst else None,
            "losses_part_at_step": self.parted.step if self.parted else None,
            **{key: getattr(self, key) for key in ("ranks", "steps", "precision", "tolerance")},
            **{key: getattr(self, key) for key in ("undecided", "elements", "no_gradient")},
            **{key: getattr(self, key) for key in ("dropout_off", "drew_random", "shared")},
            "losses": dict(zip(_SIDES, self.losses, strict=True)),
            "gradient_norms": dict(zip(_SIDES, self.norms, strict=True)),
            "skipped_steps": dict(zip(_SIDES, self.skipped, strict=True)),
            "rounding": [
                {"what": what, "step": step, "of_allowed": x, "allowed": stretch(self.rounding, k)}
                for k, x in self.rounding.items()
                for what, step in [k]
            ],
            "differences": [
                {**asdict(x), "relative": x.relative, "within": x.within} for x in self.differences
            ],
        }
        return _finite(content)  # type: ignore[no-any-return]


_SIDES = ("plan", "one_process")
_ORDER = ("initial value", "gradient", "update", "buffer", "frozen parameter")


def stretch(rounding: Mapping[Kind, float], kind: Kind) -> float:
    """Return the factor by which measured rounding raises an allowance. It is at least 1."""
    return max(1.0, MARGIN * rounding.get(kind, 0.0))


def _finite(value: Any) -> Any:
    """Return `value` as JSON can hold it: null stands for NaN and infinities."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
