"""`train.compile`: torch.compile of a rank's blocks, equal ones once, and how long that took.

What is compiled is never a whole step: collectives, messages and what sees to weights' gradients
(`runtime/kernels/weight_gradients.py`) stay between the compiled parts. Of a rewritten graph these
are its regions (`regions.py`), of an unchanged model its repeated blocks (`blocks.py`).
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
    """Compiles for this process. `seconds` are what was spent so far, by the block for which it
    was, the first of those that are equal; `compilations` are how many, of forwards and
    backwards."""

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
        """Return `region` of `block` compiled; one whose `text` is equal has the same code."""
        if text not in self._equal:
            self._equal[text] = self.code(region.forward)
        has_dropout = any(drops(x.target, x.args, x.kwargs) for x in region.graph.nodes)
        return Compiled(self, region, self._equal[text], block, drops=has_dropout)

    def code(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` compiled, for every shape by itself: for several at once, the backward
        of a convolution does not compile (torch 2.13: InductorError, "Invalid ranges")."""
        return torch.compile(function, dynamic=False)

    @contextmanager
    def compiling(self, block: str) -> Iterator[None]:
        """Inside it, what is compiled is of `block`, and no mode sees its calls: torch.compile
        would take the modes for a part of what it compiles, and all they hold for constants."""
        before, self._at = self._at, block
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._at = before

    def close(self) -> None:
        """No more count what this process compiles."""
        callbacks = torch._dynamo.callback.callback_handler
        callbacks.remove_start_callback(self._begins)
        callbacks.remove_end_callback(self._ends)

    def _begins(self, args: Any) -> None:
        self._started_s = time.perf_counter()

    def _ends(self, args: Any) -> None:
        # A backward is compiled when it first runs: of which block, its number says, `frame/time`.
        frame = args.compile_id.partition("/")[0]
        block = self._of_frame.setdefault(frame, self._at)
        took = time.perf_counter() - self._started_s
        self.seconds[block] = self.seconds.get(block, 0.0) + took
        self.compilations += 1
        sys.stdout.write(f"compiled a part of {block or 'the model'} in {took:.1f} s\n")
        sys.stdout.flush()


class Compiled(nn.Module):
    """A region of a graph: runs `code`, or `region` itself where operations have to be seen one by
    one. `drops`: there is dropout in it."""

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
        self._region = [region]  # no submodule: a graph that names it copies it with its modules

    def forward(self, *values: Any) -> Any:
        if are_operations_seen(drops=self._drops):
            return self._region[0](*values)
        with self._compiler.compiling(self._block):
            return self._code(*values)


class _Eager:
    entered = 0  # of all threads: a backward on a GPU runs parts of a forward again in others


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside it, all runs as if nothing was compiled: operations can be watched one by one."""
    _Eager.entered += 1
    try:
        yield
    finally:
        _Eager.entered -= 1


def are_operations_seen(*, drops: bool) -> bool:
    """Return whether what is compiled has to run uncompiled now: inside `uncompiled()`, or, with
    dropout in it, inside `DropoutOff`."""
    return _Eager.entered > 0 or (drops and is_dropout_off())


def import_compiler() -> None:
    """Import what compiles, before there are ranks, and set what makes compiled code compute what
    the operations compute."""
    # torch's own default is a folder that a restart of the machine empties.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernel_cache() / "inductor"))
    import torch._dynamo.callback
    import torch._inductor.compile_fx
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # dropout's masks are those of a run that is not compiled
    # Blocks of one class may differ in shapes (the stages of a ResNet): each has code of its own.
    torch._dynamo.config.recompile_limit = 32
    # Each rank of a host would start its own pool of compiling processes.
    inductor.compile_threads = 1
    # It would cut what it compiles at DistributedDataParallel's buckets.
    torch._dynamo.config.optimize_ddp = False
