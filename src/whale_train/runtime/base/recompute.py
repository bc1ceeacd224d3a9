"""Run a function now, and again in its backward instead of keeping its values.

The second run draws the same random numbers, and leaves the buffers alone that the first run has
updated, as a BatchNorm updates its statistics. Neither run keeps copies of weights that autocast
makes: they would be as large as what is recomputed. `torch.utils.checkpoint` does the rest.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from whale_train.runtime.base.autocast import as_now, casting_anew

Buffers = Sequence[tuple[MutableMapping[Any, Tensor], Any]]  # each as a mapping and its key


class _Again:
    entered = 0  # over all threads: a backward on a GPU runs a forward again in another thread


def is_second_run() -> bool:
    """Return whether a function runs for the second time, in its backward."""
    return _Again.entered > 0


class Recomputed:
    """A function whose values are computed again in its backward.

    restoring: makes the context of a second run; called before the first run.
    """

    def __init__(
        self, restoring: Callable[[], AbstractContextManager[Any]] = lambda: nullcontext()
    ) -> None:
        self._restoring = restoring
        self._updates: list[int] | None = None  # places in `buffers`, known after the first run

    def __call__(
        self, function: Callable[..., Any], buffers: Buffers, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the result of `function` for the arguments.

        buffers: what the function may update in place, in the same order at each call. While it
            runs again, each has a copy of the value that it had before the first run.
        """
        watched = buffers if self._updates is None else [buffers[i] for i in self._updates]
        before = [at[key].clone() for at, key in watched]
        versions = [at[key]._version for at, key in watched]
        contexts = (casting_anew(), _second_run(watched, before, self._restoring(), as_now()))
        result = checkpoint(
            partial(function, **kwargs), *args, use_reentrant=False, context_fn=lambda: contexts
        )
        if self._updates is None:
            now = [at[key] for at, key in watched]
            pairs = enumerate(zip(now, versions, before, strict=True))
            self._updates = [i for i, (x, version, old) in pairs if _differs(x, version, old)]
        return result


def _differs(buffer: Tensor, version: int, before: Tensor) -> bool:
    """Return whether a buffer was written into. Its version does not tell of torch's batch norms,
    whose schemas do not declare that they write."""
    return buffer._version != version or not (buffer.is_meta or torch.equal(buffer, before))


@contextmanager
def _second_run(
    watched: Buffers,
    before: Sequence[Tensor],
    restoring: AbstractContextManager[Any],
    autocast_again: Callable[[], AbstractContextManager[Any]],
) -> Iterator[None]:
    """Run what is inside with the buffers `watched` as they were `before`."""
    now = [at[key] for at, key in watched]
    _Again.entered += 1
    try:
        for (at, key), value in zip(watched, before, strict=True):
            at[key] = value
        with restoring, autocast_again(), casting_anew():
            yield
    finally:
        _Again.entered -= 1
        for (at, key), value in zip(watched, now, strict=True):
            at[key] = value
