"""Compare the values that two runs of the same steps computed: the plan's ranks and one process.

Both sides left their files (runtime/train/recorder.py), which launcher/modes/recorded_run.py reads.
Here every difference is measured against what is allowed. Nothing is run, and nothing shown.

With a relative tolerance t, the following is allowed:

* a step's loss and gradient norm: t of its size. Steps that overflowed in fp16 are skipped. Both
  sides have to skip the same steps;
* a parameter's initial value: no difference;
* a parameter's gradient: t of its largest element, or of a thousandth of the model's largest if
  that is more. Some gradients are 0 but for rounding (that of a key's bias before a softmax): where
  terms as large as other gradients' cancel, no digit of the rest is right;
* a parameter's update, after the first step and after the last, element by element: the change that
  gradients so far off would cause (their error times the element's `sensitivity`), plus t of the
  update itself, plus the rounding of the values whose difference the update is. AdamW makes whole
  steps of gradients however small. An element whose gradient is smaller than its error may step in
  any direction. Such elements are counted as `undecided`, and held only to the bound of Adam's
  steps. The comparison of gradients has checked before that they are so small;
* a buffer or a frozen parameter, as the steps left it: t of its largest element, or of a thousandth
  of the largest element of all of them if that is more. There is no difference allowed where it is
  no float.

Where a model is not smooth, or many steps magnify what is small, rounding alone causes larger
differences. Runs of one process whose weights were rounded otherwise
(runtime/train/rounded_weights.py) measure them. For each kind of difference and each step, a
multiple of what rounding caused there is allowed as well (`verification.stretch`,
docs/precision.md).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from whale_train.config import Request
from whale_train.launcher.modes.recorded_run import Array, RecordedRun, largest_of
from whale_train.launcher.modes.verification import Difference, Kind, Verification, stretch
from whale_train.optimizer_options import OptimizerOptions

# Half a unit in the last place: the largest relative error of rounding a number (IEEE 754).
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
# Rounding moved the gradients of small models by up to 1e-6 in fp32 and 1.6e-2 in bf16
# (tests/distributed/test_verify.py); fp16 has three bits of mantissa more than bf16.
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 3e-2 / 8}
LEAST = 1e-3  # of the model's largest element, by which the errors of smaller tensors are measured


def compare(
    request: Request,
    plan_dir: Path,
    reference_dir: Path,
    ranks: int,
    precision: str = "fp32",
    rounded_dirs: Sequence[Path] = (),
    shared: tuple[str, ...] = (),
) -> Verification:
    """Return the comparison of two finished runs of `request`.

    plan_dir: the run directory of the plan's run, which has `ranks` ranks.
    reference_dir: the run directory of the same steps on one process.
    precision: the precision of the runs, which determines the default tolerance.
    rounded_dirs: run directories of further runs of one process, whose weights were rounded
        otherwise.
    shared: properties that both sides share, so that they are not compared.
    """
    tolerance = request.verify.tolerance or TOLERANCE[precision]
    steps = request.verify.steps
    with ExitStack() as stack:
        side = stack.enter_context(RecordedRun(plan_dir, ranks))
        alone = stack.enter_context(RecordedRun(reference_dir, 1))
        rounded = [stack.enter_context(RecordedRun(rounded_dir, 1)) for rounded_dir in rounded_dirs]
        rules = _Rules(
            tolerance=tolerance,
            steps=steps,
            largest_first=alone.largest_gradient(),
            largest_ever=max(alone.largest.values(), default=0.0),
            largest_constant=_largest_constant(alone),
            whole_steps=_whole_steps(request.optimizer, alone.rates),
            first_step=_whole_steps(request.optimizer, _first_rate(alone)),
        )
        if rounded:
            rules = rules.with_roundings(rounded, alone)
        differences = list(rules.differences(side, alone))
        undecided, elements = rules.undecided(alone)
    differences.sort(key=lambda x: -math.inf if math.isnan(x.of_allowed) else -x.of_allowed)
    return Verification(
        *(ranks, steps, precision, tolerance),
        *((side.losses, alone.losses), (side.norms, alone.norms), (side.skipped, alone.skipped)),
        *(tuple(differences), undecided, elements),
        no_gradient=not any(alone.largest.values()),
        dropout_off=side.dropout_off or alone.dropout_off,
        drew_random=side.drew_random or alone.drew_random,
        rounding=rules.rounding,
        shared=shared,
    )


def _largest_constant(alone: RecordedRun) -> float:
    """Return the largest finite magnitude among the floats that are not trained, or 0."""
    sizes = (largest_of(alone.constant(path)) for path in alone.constants if alone.is_float(path))
    return max((x for x in sizes if math.isfinite(x)), default=0.0)


def _first_rate(alone: RecordedRun) -> list[float]:
    """Return the learning rate of the first step that was not skipped, in a list; 0 where all
    were."""
    made = (x for step, x in enumerate(alone.rates, 1) if step not in alone.skipped)
    return [next(made, 0.0)]


# --- What is allowed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rules:
    """The tolerances of one comparison.

    tolerance: relative tolerance of every difference.
    steps: number of steps compared.
    largest_first: the largest element of any gradient in the first step.
    largest_ever: the largest element of any gradient in any step.
    largest_constant: the largest element among the floats that are not trained.
    whole_steps: the sum of the learning rates, and the largest difference that as many updates of
        one element can make (infinite where there is no bound).
    first_step: `whole_steps` of the first step alone.
    rounding: the differences that rounding makes, as in `Verification`.
    reaches: whether rounding decides if some element gets a gradient at all.
    """

    tolerance: float
    steps: int
    largest_first: float
    largest_ever: float
    largest_constant: float
    whole_steps: tuple[float, float]
    first_step: tuple[float, float]
    rounding: Mapping[Kind, float] = field(default_factory=dict)
    reaches: bool = False

    def with_roundings(self, rounded: Sequence[RecordedRun], alone: RecordedRun) -> "_Rules":
        """Return rules that also allow the differences that rounding makes to one process.

        rounded: runs of one process with other roundings.
        alone: the reference run of one process.
        """
        rules = self
        off = [x for run in rounded for x in rules.differences(run, alone)]
        if any(x.what == "update" and math.isinf(x.of_allowed) for x in off):
            rules = replace(rules, reaches=True)
            off = [x for run in rounded for x in rules.differences(run, alone)]
        rounding: dict[Kind, float] = {}
        for x in off:
            if math.isfinite(x.of_allowed) and x.what != "initial value":
                rounding[x.kind] = max(rounding.get(x.kind, 0.0), x.of_allowed)
        return replace(rules, rounding=rounding)

    def differences(self, side: RecordedRun, alone: RecordedRun) -> Iterator[Difference]:
        """Yield all differences between the run `side` and the reference run of one process."""
        yield from self._of_steps("loss", side.losses, alone.losses, ())
        skipped = set(side.skipped) & set(alone.skipped)
        yield from self._of_steps("gradient norm", side.norms, alone.norms, skipped)
        for path in alone.paths:
            yield self._initial(path, side, alone)
            yield self._gradient(path, side, alone)
            if self.steps > 1:
                yield self._update(path, side, alone, is_first=True)
            yield self._update(path, side, alone)
        for path, what in alone.constants.items():
            yield self._constant(path, what, side, alone)

    def undecided(self, alone: RecordedRun) -> tuple[int, int]:
        """Return the number of elements whose updates only rounding decides, and the number of all
        elements."""
        whole, farthest = self.whole_steps
        sizes = {path: math.prod(alone.shape(path)) for path in alone.paths}
        if not math.isfinite(farthest):
            return 0, sum(sizes.values())
        moved = (self._moved(path, alone, is_first=False) for path in alone.paths)
        undecided = (
            int(np.sum(np.broadcast_to(x, alone.shape(path)) >= whole))
            for path, x in zip(alone.paths, moved, strict=True)
        )
        return sum(undecided), sum(sizes.values())

    def _of_steps(
        self,
        what: str,
        measured: Sequence[float],
        expected: Sequence[float],
        skipped: Collection[int],
    ) -> Iterator[Difference]:
        """Yield the difference of a figure, such as the loss, in each step.

        what: the name of the figure.
        measured: the figure of every step, of the plan's run.
        expected: the same of the reference run.
        skipped: steps, from 1, in which the figure is not compared.
        """
        for step in range(1, self.steps + 1):
            if step in skipped:
                yield Difference("", what, step, 0.0, 0.0, 0.0)
                continue
            a, b = (x[step - 1] if step <= len(x) else math.nan for x in (measured, expected))
            allowed = self.tolerance * abs(b) * stretch(self.rounding, (what, step))
            difference = abs(a - b)
            ratio = 0.0 if difference == 0 else difference / allowed if allowed else math.inf
            yield Difference("", what, step, difference, abs(b), ratio)

    def _initial(self, path: str, side: RecordedRun, alone: RecordedRun) -> Difference:
        """Compare the initial values of a parameter, bit by bit: they are the same in every
        precision."""
        expected = alone.whole("initial", path)
        low, high = side.bounds("initial", path, alone.shape(path))
        return _difference(path, ("initial value", None), low, high, expected, np.array(0.0))

    def _gradient(self, path: str, side: RecordedRun, alone: RecordedRun) -> Difference:
        """Compare the gradient of a parameter in the first step."""
        expected, kind = alone.whole("gradient", path), ("gradient", 1)
        allowed = self.tolerance * max(largest_of(expected), LEAST * self.largest_first)
        low, high = side.bounds("gradient", path, alone.shape(path))
        allowed *= stretch(self.rounding, kind)
        return _difference(path, kind, low, high, expected, np.array(allowed))

    def _update(
        self, path: str, side: RecordedRun, alone: RecordedRun, *, is_first: bool = False
    ) -> Difference:
        """Compare the update of a parameter, element by element: up to the last step, or in the
        first step alone (`is_first`)."""
        steps, name = (1, "first update") if is_first else (self.steps, "update")
        kind = ("update", steps)
        initial = alone.whole("initial", path)
        final = alone.whole("first" if is_first else "final", path)
        update = final - initial
        # Values are fp32 on both sides, and rounded at most twice a step: decay, then update.
        values = np.maximum(np.abs(initial), np.abs(final))
        rounded = 4 * steps * ROUNDING["fp32"] * values
        own = self.tolerance * np.abs(update) * stretch(self.rounding, kind)
        allowed = self._moved(path, alone, is_first=is_first) + rounded + own
        low, high = side.bounds(name, path, alone.shape(path))
        return _difference(path, kind, low, high, update, allowed)

    def _moved(self, path: str, alone: RecordedRun, *, is_first: bool) -> Array:
        """Return the distance that gradients within tolerance may move each element of a parameter.

        The array broadcasts to the parameter's shape, in fp64.
        """
        steps = 1 if is_first else self.steps
        largest = self.largest_first if is_first else self.largest_ever
        own = alone.whole("gradient", path) if is_first else np.array(alone.largest.get(path, 0.0))
        error = self.tolerance * max(largest_of(own), LEAST * largest)
        _, farthest = self.first_step if is_first else self.whole_steps
        slope = alone.whole("sensitivity", path)
        if is_first:  # terms that cancel to 0 here need not cancel on the other side
            first = alone.whole("first_sensitivity", path)
            slope = np.where((first == 0) & (slope > 0), np.inf, first)
        if self.reaches:
            slope = np.where(slope == 0, np.inf, slope)
        # The allowance of the first gradient moves values too: a gradient whose terms cancel (that
        # of a bias before a batch norm) is nothing but rounding.
        kinds: tuple[Kind, ...] = (("update", steps), ("gradient", 1))
        moved: Array = slope * (error * max(stretch(self.rounding, kind) for kind in kinds))
        return np.minimum(moved, farthest)

    def _constant(self, path: str, what: str, side: RecordedRun, alone: RecordedRun) -> Difference:
        """Compare a buffer or a frozen parameter after the last step. One that is no float has to
        be equal."""
        expected, kind, allowed = alone.constant(path), (what, self.steps), 0.0
        if alone.is_float(path):
            allowed = self.tolerance * max(largest_of(expected), LEAST * self.largest_constant)
            allowed *= stretch(self.rounding, kind)
        low, high = side.constant_bounds(path, expected.shape)
        return _difference(path, kind, low, high, expected, np.array(allowed))


def _whole_steps(optimizer: OptimizerOptions, rates: Sequence[float]) -> tuple[float, float]:
    """Return the sum of the learning rates, those of the group with the largest, and the largest
    difference that as many updates of two runs can make.

    An update of Adam's is at most lr max(1, (1 - b1) / sqrt(1 - b2)) (Kingma and Ba, 2015, section
    2.1). SGD's and LAMB's have no bound that is the same for all parameters, and of others none is
    known, so that the difference is infinite.
    """
    whole = sum(rates) * max((1.0, *(group.lr_scale for group in optimizer.groups)))
    if optimizer.name not in ("adam", "adamw"):
        return whole, math.inf
    first, second = optimizer.betas
    return whole, 2 * whole * max(1.0, (1 - first) / math.sqrt(1 - second))


def _difference(
    path: str, kind: Kind, low: Array, high: Array, expected: Array, allowed: Array
) -> Difference:
    """Return the difference of a tensor at the element with the largest quotient of difference and
    allowance.

    kind: the kind of difference, and its step.
    low, high: the smallest and the largest value that any copy has, element by element.
    expected: the reference, of the same shape.
    allowed: the allowed difference, of the same shape or broadcast to it.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = high - low
        off = np.maximum(np.abs(low - expected), np.abs(high - expected))
        ratio = np.where(off == 0, 0.0, np.maximum(off, apart) / allowed)
    return Difference(
        path, *kind, largest_of(off), largest_of(expected), largest_of(ratio), largest_of(apart)
    )
