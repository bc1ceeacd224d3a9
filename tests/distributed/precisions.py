"""The product of 16-bit precisions, strategies and architectures, each pair verified.

A cell is a verification (`mode=verify`) of a tiny model under a strategy against one process in the
same precision: the initial weights, the losses and gradient norms of three steps, every gradient of
the first and every parameter's update. It is equal, refused with its fault, or crashed.

Run as a program, this file is the process that runs the sides.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.distributed.equality import ask_once
from tests.distributed.served import serve
from tests.distributed.test_parallel_strategies import MODELS, hardware, pipeline
from tests.distributed.test_verify import OPTIMIZERS, STEPS, Sides, run_side

PRECISIONS = ("bf16", "fp16")
ARCHITECTURES = ("gpt", "llama", "t5", "bert", "mixtral", "vit")
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
    """A verification of the product; the fields after `arrays` are those `Sides` asks for."""

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
        kind, model = MODELS[self.model]
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
    differences of losses and of gradient norms, relatively, and of gradients and updates in parts
    of what is allowed there."""

    verdict: str
    said: str = ""
    loss: float = 0.0
    norm: float = 0.0
    tolerance: float = 0.0
    gradient: float = 0.0
    update: float = 0.0


def outcome(sides: Sides, cell: Cell) -> Outcome:
    """Run `cell` and judge it."""
    try:
        found = sides.verify(cell)
    except AssertionError as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
        refused = any(name in str(failure) for name in _REFUSED)
        return Outcome("refused" if refused else "crashed", lines[-1])

    def most(what: str, relative: bool) -> float:
        listed = [x for x in found.differences if x.what == what]
        return max((x.relative if relative else x.of_allowed for x in listed), default=0.0)

    worst = max(found.differences, key=lambda x: x.of_allowed)
    return Outcome(
        "equal" if found.equal else "different",
        "" if found.equal else f"{worst.what} of {worst.path or 'the model'}",
        most("loss", True),
        most("gradient norm", True),
        found.tolerance,
        most("gradient", False),
        most("update", False),
    )


if __name__ == "__main__":
    ask_once()
    serve(run_side)
