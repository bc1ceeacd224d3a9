"""What two runs of the same steps computed, compared: the plan's ranks and one process.

Both sides left their files (runtime/train/recorder.py); here the ranks' parts are put together and
every difference is measured against what is allowed. Nothing is run, and nothing shown.

What is allowed, with a relative tolerance t:

* a step's loss and gradient norm: t of its size;
* a parameter's initial value: nothing, or its rounding to half precision;
* its gradient: t of its largest element, or of a thousandth of the model's largest if that is
  more. Some gradients are 0 but for rounding (that of a key's bias before a softmax): what is
  left where terms as large as other gradients' cancel has no digit right;
* its update, element by element: what gradients so far off would make of it (their error times
  the element's `sensitivity`), t of the update itself, and the rounding of the values it is the
  difference of. AdamW makes whole steps of gradients however small. An element whose gradient is
  smaller than its error may step in any direction: such elements are counted as `undecided`, and
  held to nothing but the bound of Adam's steps. That they are so small was compared before.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from whale_train.config import OptimizerOptions, Request

Array = NDArray[np.float64]

# Half a unit in the last place: what rounding a number changes of it at most (IEEE 754).
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
# Rounding moved the gradients of small models by up to 1e-6 in fp32 and 1.6e-2 in bf16
# (tests/distributed/test_verify.py); fp16 has three digits more than bf16.
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 3e-2 / 8}
LEAST = 1e-3  # of the model's largest gradient: what a smaller one's error is measured by


@dataclass(frozen=True)
class Difference:
    """How far `what` of `path` (a parameter; empty for the model's) is off at most.

    `what` is `loss`, `gradient norm`, `initial value`, `gradient` or `update`; `step` counts from
    1 where it is of one step. `difference` and `largest` (the reference's largest element) are in
    its own unit; `of_allowed` is the largest quotient of a difference and what is allowed there,
    up to 1 when equal. `apart` is how far copies of it are from each other.
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


@dataclass(frozen=True)
class Verification:
    """The whole comparison. Losses and norms are per step; a NaN stands for what is no number.

    `undecided` of the `elements` have updates that only rounding decides. `differences` are of
    every step and every parameter, the worst first. `dropout_off` says that the model has dropout,
    which both sides left out; `drew_random` that they drew random numbers all the same.
    """

    ranks: int
    steps: int
    precision: str
    tolerance: float
    losses: tuple[list[float], list[float]]
    norms: tuple[list[float], list[float]]
    differences: tuple[Difference, ...]
    undecided: int
    elements: int
    dropout_off: bool
    drew_random: bool

    @property
    def equal(self) -> bool:
        return all(difference.within for difference in self.differences)

    @property
    def parted(self) -> Difference | None:
        """The first step at which the losses part."""
        losses = (x for x in self.differences if x.what == "loss" and not x.within)
        return min(losses, key=lambda x: x.step or 0, default=None)

    @property
    def worst(self) -> Difference | None:
        """The parameter that is most off, if one is: as it began, else its gradient, else its
        update, for an error of one is in all that follow."""
        wrong = [x for x in self.differences if x.path and not x.within]
        return min(wrong, key=lambda x: _ORDER.index(x.what), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `verify.json`."""
        content = {
            "verdict": "equal" if self.equal else "different",
            "worst": self.worst.path if self.worst else None,
            "losses_part_at_step": self.parted.step if self.parted else None,
            **{key: getattr(self, key) for key in ("ranks", "steps", "precision", "tolerance")},
            **{key: getattr(self, key) for key in ("undecided", "elements")},
            **{key: getattr(self, key) for key in ("dropout_off", "drew_random")},
            "losses": dict(zip(_SIDES, self.losses, strict=True)),
            "gradient_norms": dict(zip(_SIDES, self.norms, strict=True)),
            "differences": [
                {**asdict(x), "relative": x.relative, "within": x.within} for x in self.differences
            ],
        }
        return _finite(content)  # type: ignore[no-any-return]


_SIDES = ("plan", "one_process")
_ORDER = ("initial value", "gradient", "update")


def compare(
    request: Request, plan_dir: Path, reference_dir: Path, ranks: int, precision: str = "fp32"
) -> Verification:
    """Return the comparison of two finished runs of `request` in `precision`, of `ranks` ranks and
    of one."""
    tolerance = request.verify.tolerance or TOLERANCE[precision]
    steps = request.verify.steps
    losses = (_metric(plan_dir, "loss"), _metric(reference_dir, "loss"))
    norms = (_metric(plan_dir, "grad_norm"), _metric(reference_dir, "grad_norm"))
    found = [
        *_of_steps("loss", *losses, steps, tolerance),
        *_of_steps("gradient norm", *norms, steps, tolerance),
    ]
    rates = _metric(reference_dir, "lr")
    undecided = elements = 0
    with _Side(plan_dir, ranks) as side, _Side(reference_dir, 1) as alone:
        rules = _Rules(
            tolerance=tolerance,
            steps=steps,
            largest_first=alone.largest_gradient(),
            largest_ever=max(alone.largest.values(), default=0.0),
            whole_steps=_whole_steps(request.optimizer, rates),
        )
        for path in alone.paths:
            found += rules.initial(path, side, alone), rules.gradient(path, side, alone)
            update, of_rounding = rules.update(path, side, alone)
            found.append(update)
            undecided += of_rounding
            elements += math.prod(alone.shape(path))
        said = (side.dropout_off or alone.dropout_off, side.drew_random or alone.drew_random)
    found.sort(key=lambda x: -math.inf if math.isnan(x.of_allowed) else -x.of_allowed)
    return Verification(
        ranks, steps, precision, tolerance, losses, norms, tuple(found), undecided, elements, *said
    )


# --- What is allowed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rules:
    """The measures of one comparison.

    `largest_first` and `largest_ever` are the model's largest gradient element in the first step
    and in any. `whole_steps` are the sum of the learning rates, and how far apart as many updates
    of an element can be (infinite: any).
    """

    tolerance: float
    steps: int
    largest_first: float
    largest_ever: float
    whole_steps: tuple[float, float]

    def initial(self, path: str, side: "_Side", alone: "_Side") -> Difference:
        """Compare initial values, which are the same in every precision: to the last bit."""
        expected = alone.whole("initial", path)
        low, high = side.bounds("initial", path, alone.shape(path))
        return _difference(path, "initial value", None, low, high, expected, np.array(0.0))

    def gradient(self, path: str, side: "_Side", alone: "_Side") -> Difference:
        expected = alone.whole("gradient", path)
        allowed = self.tolerance * max(_largest(expected), LEAST * self.largest_first)
        low, high = side.bounds("gradient", path, alone.shape(path))
        return _difference(path, "gradient", 1, low, high, expected, np.array(allowed))

    def update(self, path: str, side: "_Side", alone: "_Side") -> tuple[Difference, int]:
        """And how many of its elements are undecided."""
        initial, final = alone.whole("initial", path), alone.whole("final", path)
        error = self.tolerance * max(alone.largest[path], LEAST * self.largest_ever)
        whole, farthest = self.whole_steps
        moved = np.minimum(alone.whole("sensitivity", path) * error, farthest)
        update = final - initial
        # Values are fp32 on both sides, and rounded at most twice a step: decay, then update.
        values = np.maximum(np.abs(initial), np.abs(final))
        rounded = 4 * self.steps * ROUNDING["fp32"] * values
        allowed = moved + rounded + self.tolerance * np.abs(update)
        low, high = side.bounds("update", path, alone.shape(path))
        undecided = int(np.sum(np.broadcast_to(moved, final.shape) >= whole))
        found = _difference(path, "update", None, low, high, update, allowed)
        return found, undecided if math.isfinite(farthest) else 0


def _whole_steps(optimizer: OptimizerOptions, rates: Sequence[float]) -> tuple[float, float]:
    """Return the sum of the learning rates, and how far apart as many updates of two runs can be.
    An update of Adam's is at most lr max(1, (1 - b1) / sqrt(1 - b2)) (Kingma and Ba, 2015, section
    2.1); SGD's and LAMB's have no bound that is the same for all parameters."""
    whole = sum(rates)
    if optimizer.name in ("sgd", "lamb"):
        return whole, math.inf
    first, second = optimizer.betas
    return whole, 2 * whole * max(1.0, (1 - first) / math.sqrt(1 - second))


def _of_steps(
    what: str, found: Sequence[float], expected: Sequence[float], steps: int, tolerance: float
) -> Iterator[Difference]:
    for step in range(steps):
        a, b = (x[step] if step < len(x) else math.nan for x in (found, expected))
        difference, allowed = abs(a - b), tolerance * abs(b)
        ratio = 0.0 if difference == 0 else difference / allowed if allowed else math.inf
        yield Difference("", what, step + 1, difference, abs(b), ratio)


def _difference(
    path: str,
    what: str,
    step: int | None,
    low: Array,
    high: Array,
    expected: Array,
    allowed: Array,
) -> Difference:
    """Return by how much copies that lie between `low` and `high` are off, at the element that is
    most so."""
    apart = high - low
    off = np.maximum(np.abs(low - expected), np.abs(high - expected))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(off == 0, 0.0, np.maximum(off, apart) / allowed)
    return Difference(
        path, what, step, _largest(off), _largest(expected), _largest(ratio), _largest(apart)
    )


def _largest(values: Array) -> float:
    """Return the largest magnitude; NaN where there is one, 0 of nothing."""
    return float(np.max(np.abs(values))) if values.size else 0.0


# --- What was left -------------------------------------------------------------------------------


class _Side:
    """What the ranks of one run left, put together tensor by tensor."""

    def __init__(self, run_dir: Path, ranks: int) -> None:
        folder = run_dir / "verify"
        said = [
            json.loads((folder / f"rank_{r}.json").read_text(encoding="utf-8"))
            for r in range(ranks)
        ]
        self.dropout_off = any(each["dropout_off"] for each in said)
        self.drew_random = any(each["drew_random"] for each in said)
        self.largest: dict[str, float] = said[0]["largest"]
        self._parts: list[dict[str, dict[str, Any]]] = [each["parts"] for each in said]
        self._paths = [folder / f"rank_{r}.safetensors" for r in range(ranks)]
        self._stack = ExitStack()
        self._files: list[Any] = []

    def __enter__(self) -> "_Side":
        opened = (safe_open(path, framework="numpy") for path in self._paths)
        self._files = [self._stack.enter_context(file) for file in opened]
        self._names = [set(file.keys()) for file in self._files]
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()

    @property
    def paths(self) -> list[str]:
        """Of the first rank's parameters: of all, where it is alone."""
        return list(self._parts[0])

    def shape(self, path: str) -> tuple[int, ...]:
        return tuple(self._parts[0][path]["shape"])

    def largest_gradient(self) -> float:
        """Return the largest element of the first step's gradients, of a side that is one rank."""
        return max((_largest(self.whole("gradient", path)) for path in self.paths), default=0.0)

    def whole(self, kind: str, path: str) -> Array:
        """Return the whole of a tensor of a side that is one rank."""
        return self._read(0, kind, path)

    def bounds(self, kind: str, path: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Element by element, the least and the greatest that any rank has for it; NaN where none
        holds it, or one has NaN. `update` is the final value less the initial one."""
        low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
        for rank, names in enumerate(self._names):
            if f"{'initial' if kind == 'update' else kind}/{path}" not in names:
                continue
            if kind == "update":
                part = self._read(rank, "final", path) - self._read(rank, "initial", path)
            else:
                part = self._read(rank, kind, path)
            place = _place(self._parts[rank][path]["index"], shape)
            low[place] = np.minimum(low[place], part)
            high[place] = np.maximum(high[place], part)
        nowhere = low > high
        low[nowhere] = high[nowhere] = np.nan
        return low, high

    def _read(self, rank: int, kind: str, path: str) -> Array:
        values: Array = self._files[rank].get_tensor(f"{kind}/{path}").astype(np.float64)
        return values


def _place(index: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """Return a part's elements in the whole: per dimension the intervals of `index`, None being
    all."""
    rows = [
        np.arange(extent)
        if intervals is None
        else np.concatenate([np.arange(start, stop) for start, stop in intervals])
        for intervals, extent in zip(index, shape, strict=True)
    ]
    return np.ix_(*rows)


def _metric(run_dir: Path, key: str) -> list[float]:
    """Return a figure of every step; what is no number is written as null."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = (json.loads(line)[key] for line in lines)
    return [math.nan if value is None else value for value in values]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
