"""The product of 16-bit precisions, strategies and architectures, each pair verified.

A cell is a verification (`mode=verify`) of a tiny model under a strategy against one process in the
same precision: the initial weights, the losses and gradient norms of three steps, every gradient of
the first and every parameter's update. It is equal, refused with its fault, or crashed.

Losses and gradient norms are held to the tolerance of `mode=verify`, relatively. So are gradients
and updates, as parts of the largest element; but where a model is not continuous (the ReLU of T5,
the choice of experts of Mixtral, the direction of a step of Adam's where a gradient is nearly 0)
rounding decides some elements altogether. One process in 16 bits is off from one in fp32 by these
as well: what it is off at most, e, bounds how far two right computations in 16 bits can be from
fp32, and so 2 e how far from each other. A cell's elements are held to the larger of the two.
Where a token's second and third best expert are as good, rounding gives it to either, and no
bound holds for these experts' gradients: "mixtral" takes all of them, so that its elements can be
held to one, and of "mixtral_best_2" losses and gradient norms are judged alone.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from tests.distributed.test_parallel_strategies import MODELS, hardware, pipeline
from tests.distributed.test_verify import OPTIMIZERS, STEPS, Sides

from whale_train.config import Request
from whale_train.launcher.modes.compare_runs import Verification, compare

PRECISIONS = ("bf16", "fp16")
# Mixtral twice: with all experts for every token, and as it is, with the best two of four.
ARCHITECTURES = ("gpt", "llama", "t5", "bert", "mixtral", "mixtral_best_2", "vit")
# name: devices, graph
STRATEGIES: dict[str, tuple[int, str]] = {
    "dp": (2, "{replicate: {}}"),
    "zero1": (2, "{replicate: {zero: 1}}"),
    "zero2": (2, "{replicate: {zero: 2}}"),
    "zero3": (2, "{replicate: {zero: 3}}"),
    "split": (2, "{split: {}}"),
    "pipeline": (2, pipeline(2)),
    "hybrid_split_dp": (2, "[{replicate: {}}, {split: {modules: head}}]"),
    "split_zero1": (4, "{replicate: {zero: 1, of: {split: {degree: 2}}}}"),
    "split_zero3": (4, "{replicate: {zero: 3, of: {split: {degree: 2}}}}"),
    "zero1_pipeline": (4, f"{{replicate: {{degree: 2, zero: 1, of: {pipeline(2)}}}}}"),
}
_REFUSED = ("PlanError: ", "ConfigError: ")


@dataclass(frozen=True)
class Cell:
    """A verification of the product, with the further fields of `test_verify.Case`."""

    model: str
    strategy: str
    precision: str
    arrays: Path
    hardware: tuple[str, ...] = ()
    fault: str = ""
    only_plan: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model}-{self.strategy}-{self.precision}"

    @property
    def overrides(self) -> tuple[str, ...]:
        kind, model = MODELS[self.model.partition("_")[0]]
        if self.model == "mixtral":
            model = tuple(x.replace("per_tok: 2", "per_tok: 4") for x in model)
        devices, graph = STRATEGIES[self.strategy]
        return (
            *model,
            *("data=arrays", f"data.path={self.arrays / kind}.npz", "data.shuffle=false"),
            *(f"strategy.graph={graph}", *(self.hardware or hardware(devices, ()))),
            *OPTIMIZERS["adamw"],
            *(f"train.steps={STEPS}", "train.global_batch=8", "mode=verify"),
            f"train.precision={self.precision}",
        )


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: `equal`, `different`, `refused` or `crashed`, and why; the largest
    differences of losses and of gradient norms, relatively, and of elements of gradients and
    updates in parts of the tolerance, beside the largest that is `allowed`."""

    verdict: str
    said: str = ""
    loss: float = 0.0
    norm: float = 0.0
    tolerance: float = 0.0
    elements: float = 0.0
    allowed: float = 0.0


def outcome(sides: Sides, cell: Cell) -> Outcome:
    """Run `cell` and judge it."""
    try:
        found = sides.verify(cell)
    except AssertionError as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
        refused = any(name in str(failure) for name in _REFUSED)
        return Outcome("refused" if refused else "crashed", lines[-1])

    model = [x for x in found.differences if not x.path]
    begun = [x for x in found.differences if x.what == "initial value"]
    off, allowed = _elements(found), 1.0
    if cell.model == "mixtral_best_2":
        allowed = math.inf
    elif not off <= allowed:
        allowed = max(allowed, 2 * _elements(rounding(sides, cell)))
    wrong = [x for x in (*model, *begun) if not x.within]
    said = f"{wrong[0].what} of {wrong[0].path or 'the model'}" if wrong else ""
    if not off <= allowed:
        worst = max(found.differences, key=lambda x: x.of_allowed)
        said = said or f"{worst.what} of {worst.path}"
    return Outcome(
        "different" if said else "equal",
        said,
        max(x.relative for x in model if x.what == "loss"),
        max(x.relative for x in model if x.what == "gradient norm"),
        found.tolerance,
        off,
        allowed,
    )


def rounding(sides: Sides, cell: Cell) -> Verification:
    """Compare one process in the cell's precision with one in fp32, by the tolerances of the
    former."""
    narrow, wide = sides.alone(cell), sides.alone(replace(cell, precision="fp32"))
    request = Request.from_json((narrow / "request.json").read_text())
    return compare(request, narrow, wide, 1)


def _elements(found: Verification) -> float:
    """Return how far the worst element of a gradient or an update is off, in parts of what
    `found` allows it."""
    return max(x.of_allowed for x in found.differences if x.what in ("gradient", "update"))
