"""Determine when the gradients of a rank are final, by the order of its instructions.

A gradient is final once the last backward of the step that adds to it has added. The schedule
determines which instruction that is. The time within the instruction is reported by autograd, or by
a deferred weight gradient. The engine then reduces the gradient (`runtime/engines/grad_reduce.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle

from whale_train.runtime.engines.grad_reduce import GradientSums
from whale_train.runtime.kernels.weight_gradients import Added
from whale_train.runtime.pipeline.chunk import Chunk
from whale_train.strategies.schedule.instructions import ENDS, Instruction


class Finality:
    """Notifies the reductions of a rank's `chunks`, which `instructions` run."""

    def __init__(self, chunks: Mapping[int, Chunk], instructions: Sequence[Instruction]) -> None:
        last = {x.chunk: i for i, x in enumerate(instructions) if x.kind in ENDS}
        self._reduction: dict[nn.Parameter, GradientSums] = {}
        # Parameters by the last instruction that adds to their gradients.
        self._parameters: dict[Instruction, list[nn.Parameter]] = {}
        held: dict[nn.Parameter, int] = {}
        for chunk in sorted(last, key=last.__getitem__, reverse=True):
            own: list[nn.Parameter] = []
            engines = chunks[chunk].engines
            reductions = [x.reduction for x in engines if x.reduction is not None]
            by_parameter = {p: reduction for reduction in reductions for p in reduction.parameters}
            for parameter in chunks[chunk].parameters:
                summed = parameter in by_parameter
                if summed and held.setdefault(parameter, chunk) == chunk:
                    own.append(parameter)
                    self._reduction[parameter] = by_parameter[parameter]
            self._parameters[instructions[last[chunk]]] = own

    @contextmanager
    def during(
        self, instruction: Instruction, deferred: Mapping[nn.Parameter, int] | None = None
    ) -> Iterator[Added]:
        """Notify the reductions, during the backward `instruction`, of gradients that become final.

        A gradient to which `instruction` is the last to add becomes final when autograd has
        accumulated it. With `deferred`, the number of deferred additions by parameter, a gradient
        becomes final after that many calls of the yielded function for its parameter. All are final
        at the end of the context.
        """
        parameters = self._parameters.get(instruction, [])
        remaining = {p: 1 if deferred is None else deferred.get(p, 0) for p in parameters}

        def added(parameter: nn.Parameter) -> None:
            if parameter in remaining:
                remaining[parameter] -= 1
                if not remaining[parameter]:
                    final(parameter)

        def final(parameter: nn.Parameter) -> None:
            del remaining[parameter]
            self._reduction[parameter].final(parameter)

        by_autograd = parameters if deferred is None else ()
        hooks = [_on_accumulated(parameter, added) for parameter in by_autograd]
        try:
            for parameter in [p for p, count in remaining.items() if not count]:
                final(parameter)
            yield added
            for parameter in list(remaining):
                final(parameter)
        finally:
            for hook in hooks:
                hook.remove()


def _on_accumulated(parameter: nn.Parameter, added: Added) -> RemovableHandle:
    """Register a hook that calls `added` when autograd has accumulated the gradient; return its
    handle."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(added)  # type: ignore[no-untyped-call]
    return handle
