"""`train.compile`: torch.compile a rank's blocks, equal ones once, and measure the time.

A whole step is never compiled: collectives, messages and the handling of weights' gradients
(`runtime/kernels/weight_gradients.py`) stay between the compiled parts. The compiled parts are the
regions of a rewritten graph (`regions.py`), or the repeated blocks of an unchanged model
(`blocks.py`).
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from whale_train.kernel_cache import kernel_cache
from whale_train.models.batch_parts.dropout_off import drops, is_dropout_off


class Compiler:
    """Compiles for this process, and measures the time of compilations.

    seconds: the seconds spent so far, by block; equal blocks count under the first of them.
    compilations: the number of compilations so far, of forwards and backwards.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.compilations = 0
        self._equal: dict[str, Callable[..., Any]] = {}
        self._at = ""
        self._of_frame: dict[str, str] = {}
        self._started_s = 0.0
        import_compiler()
        callbacks = torch._dynamo.callback.callback_handler
        callbacks.register_start_callback(self._begins)
        callbacks.register_end_callback(self._ends)

    def compiled(self, region: fx.GraphModule, text: str, block: str) -> "Compiled":
        """Return `region` of `block` compiled. Regions with equal `text` share their code."""
        if text not in self._equal:
            self._equal[text] = self.code(region.forward)
        has_dropout = any(drops(x.target, x.args, x.kwargs) for x in region.graph.nodes)
        return Compiled(self, region, self._equal[text], block, drops=has_dropout)

    def code(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` compiled, separately for every shape.

        With dynamic shapes, the backward of a convolution does not compile (torch 2.13:
        InductorError, "Invalid ranges").
        """
        return torch.compile(function, dynamic=False)

    @contextmanager
    def compiling(self, block: str) -> Iterator[None]:
        """Attribute compilations inside this context to `block`, and hide calls from torch-function
        modes.

        torch.compile would otherwise compile the modes as well, with everything that they hold as
        constants.
        """
        before, self._at = self._at, block
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._at = before

    def close(self) -> None:
        """Stop counting this process's compilations."""
        callbacks = torch._dynamo.callback.callback_handler
        callbacks.remove_start_callback(self._begins)
        callbacks.remove_end_callback(self._ends)

    def _begins(self, args: Any) -> None:
        """Record that a compilation begins; a callback of torch."""
        self._started_s = time.perf_counter()

    def _ends(self, args: Any) -> None:
        """Count a compilation that has ended, and print its time; a callback of torch."""
        # A backward is compiled when it first runs. The frame in its id, `frame/time`, gives its
        # block.
        frame = args.compile_id.partition("/")[0]
        block = self._of_frame.setdefault(frame, self._at)
        duration_s = time.perf_counter() - self._started_s
        self.seconds[block] = self.seconds.get(block, 0.0) + duration_s
        self.compilations += 1
        sys.stdout.write(f"compiled a part of {block or 'the model'} in {duration_s:.1f} s\n")
        sys.stdout.flush()


class Compiled(nn.Module):
    """A region of a graph: runs `code`, or `region` itself where operations must be seen one by
    one.

    compiler: counts the time of compilations.
    block: the block of the region.
    drops: whether the region has dropout.
    """

    def __init__(
        self,
        compiler: Compiler,
        region: fx.GraphModule,
        code: Callable[..., Any],
        block: str,
        *,
        drops: bool,
    ) -> None:
        super().__init__()
        self._compiler, self._code, self._block, self._drops = compiler, code, block, drops
        self._region = [region]  # not a submodule, which a graph would copy with its modules

    def forward(self, *values: Any) -> Any:
        """Return the region's outputs for the inputs `values`."""
        if are_operations_seen(drops=self._drops):
            return self._region[0](*values)
        with self._compiler.compiling(self._block):
            return self._code(*values)


class _Eager:
    entered = 0  # over all threads: a backward on a GPU recomputes a forward in other threads


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run all code uncompiled inside this context, so that operations can be watched one by one."""
    _Eager.entered += 1
    try:
        yield
    finally:
        _Eager.entered -= 1


def are_operations_seen(*, drops: bool) -> bool:
    """Return whether compiled code has to run uncompiled.

    All code runs uncompiled inside `uncompiled()`. Code with dropout (`drops`) also runs uncompiled
    inside `DropoutOff`.
    """
    return _Eager.entered > 0 or (drops and is_dropout_off())


def import_compiler() -> None:
    """Import the modules of torch.compile before ranks are forked, and configure them.

    With this configuration compiled code computes the same results as the uncompiled operations.
    """
    # torch's own default is a folder that a restart of the machine empties.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernel_cache() / "inductor"))
    import torch._dynamo.callback
    import torch._inductor.compile_fx
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # dropout has the masks of an uncompiled run
    # Blocks of one class may differ in shapes (the stages of a ResNet): each has code of its own.
    torch._dynamo.config.recompile_limit = 32
    # Each rank of a host would start its own pool of compiling processes.
    inductor.compile_threads = 1
    # This option would split compiled graphs at DistributedDataParallel's buckets.
    torch._dynamo.config.optimize_ddp = False
