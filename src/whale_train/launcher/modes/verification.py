"""Hold the outcome of a verification: every difference, and the verdict.

This file owns the allowance for measured rounding (`MARGIN`), and the content of `verify.json`.
launcher/modes/compare_runs.py computes the differences.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# A plan may differ from one process by MARGIN times the largest difference among ROUNDED_RUNS runs
# with other roundings. The largest noise of several runs is rarely below the noise of a plan.
MARGIN, ROUNDED_RUNS = 2.0, 3


@dataclass(frozen=True)
class Difference:
    """The largest difference between the plan's run and one process, in one metric or tensor.

    path: the parameter or buffer; '' for a metric of the whole model.
    what: `loss`, `gradient norm`, `initial value`, `gradient`, `update`, `buffer` or `untrained
        parameter`.
    step: the step, from 1; for an update, the last step of the update; None for an initial value.
    difference: the absolute difference, in the unit of the compared values.
    largest: the largest element of the reference, in the same unit.
    of_allowed: the largest ratio of an element's difference to its allowance; at most 1 where the
        two runs count as equal.
    apart: the largest difference between copies on several ranks, in the same unit.
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
        """Return the difference divided by the largest element of the reference; infinite where
        that element is 0."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.largest if self.largest else math.inf

    @property
    def within(self) -> bool:
        """Return whether the difference is allowed. NaN is never allowed."""
        return self.of_allowed <= 1  # false for NaN

    @property
    def kind(self) -> "Kind":
        """Return the pair of `what` and `step`."""
        return self.what, self.step


Kind = tuple[str, int | None]  # the `what` and the `step` of a difference


@dataclass(frozen=True)
class Verification:
    """The whole comparison of the plan's run with one process.

    In a pair of lists, the first list is of the plan's run, and the second of one process.

    ranks: number of ranks of the plan.
    steps: number of compared steps.
    precision: the precision of both runs.
    tolerance: relative tolerance; 0 where the bits must be the same, as under logical workers.
    losses: the loss of every step in each run; NaN for a value that is not finite.
    norms: the gradient norm of every step in each run; NaN for a value that is not finite.
    skipped: the steps of each run that overflowed in fp16.
    differences: the differences of all steps, parameters and buffers, the worst first.
    undecided: number of elements whose update is determined by rounding alone.
    elements: number of all trained elements.
    no_gradient: whether every gradient of every parameter was 0 or missing.
    dropout_off: whether the model has dropout, which both runs turned off.
    drew_random: whether a run drew random numbers all the same.
    rounding: the worst `of_allowed` among the runs with other roundings, by kind of difference;
        empty where no such run was needed.
    shared: properties that both runs share, so that the comparison cannot test them.
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
        """Return whether every difference is allowed, both runs skipped the same steps, and some
        gradient was not 0."""
        is_same = all(difference.within for difference in self.differences)
        return is_same and self.skipped[0] == self.skipped[1] and not self.no_gradient

    @property
    def may_be_rounding(self) -> bool:
        """Return whether rounding can explain why the runs are not equal.

        Some difference is then not allowed, every such difference is finite and of no initial
        value, and both runs skipped the same steps.
        """
        wrong = [x for x in self.differences if not x.within and self.tolerance]
        is_sized = all(math.isfinite(x.difference) and x.what != "initial value" for x in wrong)
        return bool(wrong) and is_sized and self.skipped[0] == self.skipped[1]

    @property
    def not_finite(self) -> int | None:
        """Return the first step, from 1, whose loss or gradient norm is not finite in both runs;
        None without such a step."""
        sides = zip(*self.losses, *self.norms, strict=False)
        for step, (a, b, c, d) in enumerate(sides, 1):
            if step in self.skipped[0] or step in self.skipped[1]:
                continue
            if math.isnan(a + c) and math.isnan(b + d):
                return step
        return None

    @property
    def parted(self) -> Difference | None:
        """Return the loss difference of the first step whose losses differ too much; None without
        such a step."""
        losses = (x for x in self.differences if x.what == "loss" and not x.within)
        return min(losses, key=lambda x: x.step or 0, default=None)

    @property
    def worst(self) -> Difference | None:
        """Return the difference that is nearest to the cause: the first excessive one of a
        parameter or buffer, or None.

        The order is initial values, gradients, first updates, last updates, then untrained tensors,
        since an error in one kind spreads to all later kinds.
        """
        wrong = [x for x in self.differences if x.path and not x.within]
        return min(wrong, key=lambda x: (_ORDER.index(x.what), x.step or 0), default=None)

    @property
    def stretched(self) -> float:
        """Return the multiple of the tolerance that the largest difference needs; 1 where every
        difference is within the tolerance itself."""
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
                {"what": kind, "step": step, "of_allowed": x, "allowed": stretch(self.rounding, k)}
                for k, x in self.rounding.items()
                for kind, step in [k]
            ],
            "differences": [
                {**asdict(x), "relative": x.relative, "within": x.within} for x in self.differences
            ],
        }
        return _finite(content)  # type: ignore[no-any-return]


_SIDES = ("plan", "one_process")
_ORDER = ("initial value", "gradient", "update", "buffer", "untrained parameter")


def stretch(rounding: Mapping[Kind, float], kind: Kind) -> float:
    """Return the factor, at least 1, by which measured rounding raises an allowance."""
    return max(1.0, MARGIN * rounding.get(kind, 0.0))


def _finite(value: Any) -> Any:
    """Return `value` in a form that JSON can hold: None replaces NaN and infinities."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
