"""What a verification comes to: every difference, and the verdict.

Owns how far rounding excuses a difference (`MARGIN`), and `verify.json`; the differences are
launcher/modes/compare_runs.py's.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# A plan may differ from one process by so many times what the worst of `ROUNDED_RUNS` runs with
# other roundings does. Their noise is several roundings', so that it is rarely less than a plan's.
MARGIN, ROUNDED_RUNS = 2.0, 3


@dataclass(frozen=True)
class Difference:
    """How far `what` of `path` (a parameter; empty for the model's) is off at most.

    `what` is `loss`, `gradient norm`, `initial value`, `gradient`, `update`, `buffer` or `frozen
    parameter`; `step` counts from 1 where it is of one step, an update up to it. `difference` and
    `largest` (the reference's largest element) are in its own unit; `of_allowed` is the largest
    quotient of a difference and what is allowed there, up to 1 when equal. `apart` is how far
    copies of it are from each other.
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
        if self.difference == 0:
            return 0.0
        return self.difference / self.largest if self.largest else math.inf

    @property
    def within(self) -> bool:
        return self.of_allowed <= 1  # false for NaN

    @property
    def kind(self) -> "Kind":
        return self.what, self.step


Kind = tuple[str, int | None]  # a difference's `what` and `step`


@dataclass(frozen=True)
class Verification:
    """The whole comparison. Losses and norms are per step; a NaN stands for what is no number.

    `undecided` of the `elements` have updates that only rounding decides. `differences` are of
    every step and every parameter, the worst first. `skipped` are the steps that overflowed, on
    either side. `rounding` is, by kind of difference, what the worst of the runs with other
    roundings came to, in what was allowed then; empty where none was needed. `no_gradient` says
    that no gradient but 0 reached any parameter. `shared` are what both sides have alike, so that
    it is not compared. `dropout_off` says that the model has dropout,
    which both sides left out; `drew_random` that they drew random numbers all the same.
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
        is_same = all(difference.within for difference in self.differences)
        return is_same and self.skipped[0] == self.skipped[1] and not self.no_gradient

    @property
    def may_be_rounding(self) -> bool:
        """Whether differences of a size that rounding can make are all that is wrong."""
        wrong = [x for x in self.differences if not x.within]
        is_sized = all(math.isfinite(x.difference) and x.what != "initial value" for x in wrong)
        return bool(wrong) and is_sized and self.skipped[0] == self.skipped[1]

    @property
    def not_finite(self) -> int | None:
        """The first step, from 1, whose loss or gradient norm is no number on both sides."""
        sides = zip(*self.losses, *self.norms, strict=False)
        for step, (a, b, c, d) in enumerate(sides, 1):
            if step in self.skipped[0] or step in self.skipped[1]:
                continue
            if math.isnan(a + c) and math.isnan(b + d):
                return step
        return None

    @property
    def parted(self) -> Difference | None:
        """The first step at which the losses part."""
        losses = (x for x in self.differences if x.what == "loss" and not x.within)
        return min(losses, key=lambda x: x.step or 0, default=None)

    @property
    def worst(self) -> Difference | None:
        """The parameter that is most off, if one is: as it began, else its gradient, else its
        first update, else its last, else what is not trained, for an error of one is in all that
        follow."""
        wrong = [x for x in self.differences if x.path and not x.within]
        return min(wrong, key=lambda x: (_ORDER.index(x.what), x.step or 0), default=None)

    @property
    def stretched(self) -> float:
        """How many times the tolerance the largest difference needs that rounding explains: 1 where
        all are within the tolerance itself."""
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
    """Return how many times what is allowed without is allowed where rounding was measured."""
    return max(1.0, MARGIN * rounding.get(kind, 0.0))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
