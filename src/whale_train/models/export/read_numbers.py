"""Record numbers that a forward reads from tensors, and may branch on."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = ("item", "__bool__", "__float__", "tolist", "is_nonzero")
_COMPARISONS = ("gt", "lt", "ge", "le", "__gt__", "__lt__", "__ge__", "__le__", "greater", "less")
_OURS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Read:
    """Real number that a forward read, or compared before it read the result of the comparison.

    value: the number.
    place: the line of the user's code that read it.
    """

    value: float
    place: str


class ReadNumbers(TorchFunctionMode):
    """Function mode that records the real numbers that code reads from tensors.

    reads: the numbers, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []
        # The result and the operand of comparisons, by the id of the result, which stays alive.
        self._compared: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _READS and tensor is not None and tensor.numel() == 1:
            if tensor.dtype == torch.bool and id(tensor) in self._compared:
                tensor = self._compared[id(tensor)][1]
            if tensor.is_floating_point():
                self.reads.append(Read(float(tensor.detach()), _place()))
        made = func(*args, **kwargs)
        compares = name in _COMPARISONS and tensor is not None and tensor.numel() == 1
        if compares and isinstance(made, Tensor):
            assert tensor is not None
            self._compared[id(made)] = (made, tensor)
        return made


def _place() -> str:
    """Return the line of the user's code that is running, as `FILE:NUMBER (CODE)`."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename).resolve()
        if "torch" not in path.parts and not path.is_relative_to(_OURS):
            return f"{path.name}:{frame.lineno} ({frame.line})"
    return "its forward"


def made_of_several(
    reads: Callable[[dict[str, Tensor]], ReadNumbers], batch: dict[str, Tensor]
) -> str:
    """Return the place of the first number that depends on both halves of `batch`, or ''.

    `reads` runs the forward on a batch and returns the numbers that it read. Each half of the batch
    in turn is replaced by other values.
    """
    before = reads(batch).reads
    if not before:
        return ""
    count = len(next(iter(batch.values())))
    halves = (range(count // 2), range(count // 2, count))
    others = [reads({k: _replaced(x, half) for k, x in batch.items()}).reads for half in halves]
    for number, read in enumerate(before):
        values = [x[number].value for x in others if number < len(x)]
        if len(values) == len(others) and all(value != read.value for value in values):
            return read.place
    return ""


def _replaced(values: Tensor, places: range) -> Tensor:
    """Return `values` with other samples at `places`.

    Floating-point samples become three times themselves plus 1. Other samples are replaced by the
    samples at the same places counted from the end.
    """
    changed = values.clone()
    if values.is_floating_point():
        changed[list(places)] = 3 * values[list(places)] + 1
    else:
        changed[list(places)] = values[[len(values) - 1 - i for i in places]]
    return changed
