"""Compare the values that two runs of the same steps computed: the plan's ranks and one process.

Both runs wrote files (runtime/train/recorder.py), which launcher/modes/recorded_run.py reads. This
file compares every difference with its allowance. Nothing is run, and nothing shown.

With a relative tolerance t, the allowances are:

* a step's loss and gradient norm: t times the value. Steps that overflowed in fp16 are not
  compared, but both runs must skip the same steps;
* a parameter's initial value: no difference;
* a parameter's gradient: t times the gradient's largest element, or t times a thousandth of the
  model's largest gradient element if that is more. Some gradients are 0 except for rounding, as the
  gradient of a key's bias before a softmax: where terms as large as other gradients cancel, no
  digit of the remainder is right;
* a parameter's update, after the first step and after the last, element by element: the change that
  gradients within tolerance can cause (the gradient's error times the element's `sensitivity`),
  plus t times the update, plus the rounding of the values before and after the update. AdamW
  takes a step of full size for a gradient of any size, so an element whose gradient is smaller than
  the gradient's error may step in either direction. Such elements are counted as `undecided`, and
  bounded only by the largest step of Adam. The comparison of gradients has checked that their
  gradients are so small;
* a buffer or an untrained parameter (one that is frozen, or that the loss does not depend on) after
  the last step: t times its largest element, or t times a thousandth of the largest element of all
  such tensors if that is more. Tensors of integers or booleans must be equal.

Where a model is not smooth, or many steps magnify small errors, rounding alone causes larger
differences. Further runs of one process with other roundings of the weights
(runtime/train/rounded_weights.py) measure this effect. For each kind of difference and each step,
the allowance rises to a multiple of the effect of rounding (`verification.stretch`,
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
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
# Rounding moved the gradients of small models by up to 1e-6 in fp32 and 1.6e-2 in bf16
# (tests/distributed/test_verify.py); fp16 has three bits of mantissa more than bf16. In fp8 it was
# 5e-3 where batches are shared, and 1.9e-2 where weights are (docs/adr/100).
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 3e-2 / 8, "fp8": 6e-2}
LEAST = 1e-3  # tensors count as at least this large, as a fraction of the model's largest element


def compare(
    request: Request,
    plan_dir: Path,
    reference_dir: Path,
    ranks: int,
    precision: str = "fp32",
    rounded_dirs: Sequence[Path] = (),
    shared: tuple[str, ...] = (),
    *,
    exact: bool = False,
) -> Verification:
    """Return the comparison of two finished runs of `request`.

    plan_dir: the run directory of the plan's run.
    reference_dir: the run directory of the same steps on one process.
    ranks: number of ranks of the plan's run.
    precision: the precision of the runs, which determines the default tolerance.
    rounded_dirs: run directories of further runs of one process, with other roundings of the
        weights.
    shared: properties that both runs share, so that the comparison cannot test them.
    exact: True if the runs must have the same bits, as those of logical workers.
    """
    tolerance = 0.0 if exact else request.verify.tolerance or TOLERANCE[precision]
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
        undecided, elements = (0, rules.elements(alone)) if exact else rules.undecided(alone)
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
    """Return the largest finite magnitude among the floating-point buffers and untrained
    parameters; 0 without any."""
    sizes = (largest_of(alone.constant(path)) for path in alone.constants if alone.is_float(path))
    return max((x for x in sizes if math.isfinite(x)), default=0.0)


def _first_rate(alone: RecordedRun) -> list[float]:
    """Return a list of one element: the learning rate of the first step that was not skipped, or 0
    where every step was skipped."""
    rates = (x for step, x in enumerate(alone.rates, 1) if step not in alone.skipped)
    return [next(rates, 0.0)]


# --- What is allowed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rules:
    """The tolerances of one comparison.

    tolerance: relative tolerance of every difference; 0: the bits must be the same.
    steps: number of compared steps.
    largest_first: the largest element of any gradient in the first step.
    largest_ever: the largest element of any gradient in any step.
    largest_constant: the largest element among the floating-point tensors that are not trained.
    whole_steps: the sum of the learning rates, and the largest difference that updates at these
        rates can make in one element (infinite where no bound is known).
    first_step: `whole_steps` of the first step alone.
    rounding: the worst `of_allowed` among runs with other roundings, by kind of difference.
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
        """Return rules that also allow the differences that rounding causes on one process.

        rounded: runs of one process with other roundings of the weights.
        alone: the reference run of one process.
        """
        rules = self
        differences = [x for run in rounded for x in rules.differences(run, alone)]
        if any(x.what == "update" and math.isinf(x.of_allowed) for x in differences):
            rules = replace(rules, reaches=True)
            differences = [x for run in rounded for x in rules.differences(run, alone)]
        rounding: dict[Kind, float] = {}
        for x in differences:
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
        for path, kind_name in alone.constants.items():
            yield self._constant(path, kind_name, side, alone)

    def undecided(self, alone: RecordedRun) -> tuple[int, int]:
        """Return the number of elements whose update is determined by rounding alone, and the
        number of all trained elements."""
        lr_sum, farthest = self.whole_steps
        if not math.isfinite(farthest):
            return 0, self.elements(alone)
        moved = (self._moved(path, alone, is_first=False) for path in alone.paths)
        undecided = (
            int(np.sum(np.broadcast_to(x, alone.shape(path)) >= lr_sum))
            for path, x in zip(alone.paths, moved, strict=True)
        )
        return sum(undecided), self.elements(alone)

    def elements(self, alone: RecordedRun) -> int:
        """Return the number of all trained elements."""
        return sum(math.prod(alone.shape(path)) for path in alone.paths)

    def _of_steps(
        self,
        name: str,
        measured: Sequence[float],
        expected: Sequence[float],
        skipped: Collection[int],
    ) -> Iterator[Difference]:
        """Yield the difference of a metric, such as the loss, for each step.

        name: the name of the metric.
        measured: the metric of every step in the plan's run.
        expected: the metric of every step in the reference run.
        skipped: steps, from 1, whose metric is not compared.
        """
        for step in range(1, self.steps + 1):
            if step in skipped:
                yield Difference("", name, step, 0.0, 0.0, 0.0)
                continue
            a, b = (x[step - 1] if step <= len(x) else math.nan for x in (measured, expected))
            allowed = self.tolerance * abs(b) * stretch(self.rounding, (name, step))
            difference = abs(a - b)
            ratio = 0.0 if difference == 0 else difference / allowed if allowed else math.inf
            yield Difference("", name, step, difference, abs(b), ratio)

    def _initial(self, path: str, side: RecordedRun, alone: RecordedRun) -> Difference:
        """Return the difference of a parameter's initial values, of which none is allowed: the
        values are the same in every precision."""
        expected = alone.whole("initial", path)
        low, high = side.bounds("initial", path, alone.shape(path))
        return _difference(path, ("initial value", None), low, high, expected, np.array(0.0))

    def _gradient(self, path: str, side: RecordedRun, alone: RecordedRun) -> Difference:
        """Return the difference of a parameter's gradient in the first step."""
        expected, kind = alone.whole("gradient", path), ("gradient", 1)
        allowed = self.tolerance * max(largest_of(expected), LEAST * self.largest_first)
        low, high = side.bounds("gradient", path, alone.shape(path))
        allowed *= stretch(self.rounding, kind)
        return _difference(path, kind, low, high, expected, np.array(allowed))

    def _update(
        self, path: str, side: RecordedRun, alone: RecordedRun, *, is_first: bool = False
    ) -> Difference:
        """Return the difference of a parameter's update: over all steps, or in the first step alone
        (`is_first`)."""
        steps, name = (1, "first update") if is_first else (self.steps, "update")
        kind = ("update", steps)
        initial = alone.whole("initial", path)
        final = alone.whole("first" if is_first else "final", path)
        update = final - initial
        # Values are fp32 on both sides, and rounded at most twice a step: decay, then update.
        values = np.maximum(np.abs(initial), np.abs(final))
        rounded = 4 * steps * ROUNDING["fp32"] * values
        proportional = self.tolerance * np.abs(update) * stretch(self.rounding, kind)
        low, high = side.bounds(name, path, alone.shape(path))
        allowed = np.array(0.0)
        if self.tolerance:
            allowed = self._moved(path, alone, is_first=is_first) + rounded + proportional
        return _difference(path, kind, low, high, update, allowed)

    def _moved(self, path: str, alone: RecordedRun, *, is_first: bool) -> Array:
        """Return the distance by which gradients within tolerance can move each element of a
        parameter, as an fp64 array that broadcasts to the parameter's shape.

        is_first: whether to count the first step alone, or all steps.
        """
        steps = 1 if is_first else self.steps
        largest = self.largest_first if is_first else self.largest_ever
        gradient = (
            alone.whole("gradient", path) if is_first else np.array(alone.largest.get(path, 0.0))
        )
        error = self.tolerance * max(largest_of(gradient), LEAST * largest)
        _, farthest = self.first_step if is_first else self.whole_steps
        slope = alone.whole("sensitivity", path)
        if is_first:  # terms that cancel to 0 here need not cancel on the other side
            first = alone.whole("first_sensitivity", path)
            slope = np.where((first == 0) & (slope > 0), np.inf, first)
        if self.reaches:
            slope = np.where(slope == 0, np.inf, slope)
        # The allowance of the first gradient moves values too: a gradient whose terms cancel, as
        # the gradient of a bias before a batch norm, consists of rounding alone.
        kinds: tuple[Kind, ...] = (("update", steps), ("gradient", 1))
        moved: Array = slope * (error * max(stretch(self.rounding, kind) for kind in kinds))
        return np.minimum(moved, farthest)

    def _constant(
        self, path: str, kind_name: str, side: RecordedRun, alone: RecordedRun
    ) -> Difference:
        """Return the difference of a buffer or an untrained parameter after the last step. A tensor
        that is not floating-point must be equal.

        kind_name: `buffer` or `untrained parameter`.
        """
        expected, kind, allowed = alone.constant(path), (kind_name, self.steps), 0.0
        if alone.is_float(path):
            allowed = self.tolerance * max(largest_of(expected), LEAST * self.largest_constant)
            allowed *= stretch(self.rounding, kind)
        low, high = side.constant_bounds(path, expected.shape)
        return _difference(path, kind, low, high, expected, np.array(allowed))


def _whole_steps(optimizer: OptimizerOptions, rates: Sequence[float]) -> tuple[float, float]:
    """Return the sum of the learning rates and a bound on the difference that updates at these
    rates can make between two runs.

    The rates are scaled by the largest `lr_scale` of the optimizer's groups. An update of Adam is
    at most lr max(1, (1 - b1) / sqrt(1 - b2)) (Kingma and Ba, 2015, section 2.1). Updates of SGD,
    LAMB and LARS have no bound common to all parameters, and for other optimizers no bound is
    known: the difference is then infinite.
    """
    lr_sum = sum(rates) * max((1.0, *(group.lr_scale for group in optimizer.groups)))
    if optimizer.name not in ("adam", "adamw"):
        return lr_sum, math.inf
    first, second = optimizer.betas
    return lr_sum, 2 * lr_sum * max(1.0, (1 - first) / math.sqrt(1 - second))


def _difference(
    path: str, kind: Kind, low: Array, high: Array, expected: Array, allowed: Array
) -> Difference:
    """Return the difference of a tensor, with the maximum of each figure over all elements.

    kind: the kind of difference, and the step.
    low, high: the smallest and the largest value among all copies, element by element, in fp64.
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
