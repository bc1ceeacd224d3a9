"""The state of each logical worker on a rank: its random states, and the buffers that it writes.

A rank runs its workers one after another with one model, and exchanges their states in between
(EasyScale, arXiv 2208.14228, section 3.2). Parameters and optimizer are shared.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.checkpoints.safetensors_files import read_json
from whale_train.checkpoints.url_path import Place
from whale_train.runtime.base.seeds import seed_python
from whale_train.runtime.state.random_states import bytes_text, random_file, tensor_of
from whale_train.strategies.plan.plan import Plan


@dataclass(frozen=True)
class _RandomState:
    """States of the generators that a forward may draw from.

    cpu: state of torch's default generator.
    cuda: state of the generator of the rank's GPU; None without one.
    python: state of Python's generator.
    numpy: state of NumPy's generator.
    """

    cpu: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any


@dataclass(frozen=True)
class _State:
    """The state of a worker that another worker would change.

    random: states of its generators.
    buffers: values of the buffers, by path.
    """

    random: _RandomState
    buffers: Mapping[str, Tensor]


class WorkerStates:
    """The states of a rank's logical workers, of which one is present in the process.

    workers: numbers of this rank's workers, in the order in which it runs them.
    buffers: the buffers that the forward writes, by path.
    others: the buffers that it does not write, by path.
    seed: the seed of the run. Worker w draws what rank w of data parallelism would draw.
    """

    def __init__(
        self,
        workers: Sequence[int],
        buffers: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        seed: int,
    ) -> None:
        self._workers, self._buffers, self._seed = workers, buffers, seed
        self._others: Mapping[str, Tensor] = others
        self._states: dict[int, _State] = {}
        self._present = self._draws = workers[0]
        self._drawn: dict[int, _RandomState] = {}  # of workers that an evaluation has drawn as
        self._seed_all(0)

    def switch(self, worker: int) -> None:
        """Make `worker` the one that is present."""
        if worker != self._present:
            self._states[self._present] = self._current()
            self._set(self._states[worker])
            self._present = worker

    @contextmanager
    def checking_others(self) -> Iterator[None]:
        """Check, in the first of such contexts, that no worker writes into a buffer that all share.

        Raises RuntimeError with its path.
        """
        before = {path: buffer._version for path, buffer in self._others.items()}
        yield
        for path, buffer in self._others.items():
            if buffer._version != before[path]:
                rule = f"the forward writes into {path}, which its graph does not say: logical "
                raise RuntimeError(f"{rule}workers would share it; use strategy=dp")
        self._others = {}

    def show_first(self, group: dist.ProcessGroup) -> None:
        """Give the buffers of worker 0, which the first member of `group` runs first, to all.

        A collective. Evaluations read these buffers, as they read those of rank 0 in data
        parallelism. `hide_first` ends it.
        """
        self.switch(self._workers[0])
        self._states[self._present] = self._current()
        self._draws, self._drawn = self._present, {}
        for buffer in self._buffers.values():
            dist.broadcast(buffer, group=group, group_src=0)

    def draw_as(self, worker: int) -> None:
        """Draw as `worker` of this rank does, from `show_first` to `hide_first`: an evaluation may
        draw numbers too. The buffers stay those of worker 0."""
        if worker != self._draws:
            self._drawn[self._draws] = _random_state()
            _set_random(self._drawn.get(worker, self._states[worker].random))
            self._draws = worker

    def hide_first(self) -> None:
        """Give the worker that is present its own buffers again, and its random states of
        before."""
        self._set(self._states[self._present])

    def read(self) -> dict[str, Any]:
        """Return the states for a checkpoint, by the number of the worker, as plain data."""
        self._states[self._present] = self._current()
        return {"workers": {str(worker): _plain(self._states[worker]) for worker in self._workers}}

    def restore(self, checkpoint: Place, saved: Plan | None, plan: Plan, step: int) -> None:
        """Set the states to those in `checkpoint`, which was saved under the plan `saved` (None:
        unknown) after `step` steps.

        The checkpoint of a run with another number of workers, or with none, has no such states:
        workers then begin with the model's buffers, and random states of the seed and the step.
        """
        before = None if saved is None else saved.logical_workers
        if before is None or before.count != sum(map(len, _workers_of(plan))):
            self._seed_all(step)
            return
        rank_of = {worker: rank for rank, of in enumerate(before.of_ranks) for worker in of}
        files = {
            rank: read_json(random_file(checkpoint, rank))["workers"]
            for rank in {rank_of[worker] for worker in self._workers}
        }
        for worker in self._workers:
            self._states[worker] = self._read(files[rank_of[worker]][str(worker)])
        self._present = self._workers[0]
        self._set(self._states[self._present])

    def _seed_all(self, step: int) -> None:
        """Set all states to those of a run that begins after `step` steps."""
        for worker in reversed(self._workers):
            torch.manual_seed(self._seed + 1_000_003 * (worker + 1) + 7_368_787 * step)
            seed_python(self._seed)
            self._states[worker] = self._current()
        self._present = self._workers[0]

    def _current(self) -> _State:
        """Return a copy of the state of the worker that is present."""
        buffers = {path: buffer.clone() for path, buffer in self._buffers.items()}
        return _State(_random_state(), buffers)

    def _set(self, state: _State) -> None:
        _set_random(state.random)
        for path, value in state.buffers.items():
            self._buffers[path].copy_(value)

    def _read(self, plain: Mapping[str, Any]) -> _State:
        """Return the state that `_plain` wrote."""
        version, numbers, gauss = plain["python"]
        kind, words, *position = plain["numpy"]
        cuda = plain.get("cuda")
        return _State(
            random=_RandomState(
                cpu=tensor_of(plain["cpu"]),
                cuda=tensor_of(cuda) if cuda and torch.cuda.is_available() else None,
                python=(version, tuple(numbers), gauss),
                numpy=(kind, np.array(words, np.uint32), *position),
            ),
            buffers={
                path: tensor_of(plain["buffers"][path]).view(buffer.dtype).view(buffer.shape)
                for path, buffer in self._buffers.items()
            },
        )


def _workers_of(plan: Plan) -> Sequence[Sequence[int]]:
    assert plan.logical_workers is not None
    return plan.logical_workers.of_ranks


def _random_state() -> _RandomState:
    """Return a copy of the states of this process's generators."""
    return _RandomState(
        cpu=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        python=random.getstate(),
        numpy=np.random.get_state(),
    )


def _set_random(state: _RandomState) -> None:
    torch.set_rng_state(state.cpu)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda)
    random.setstate(state.python)
    np.random.set_state(state.numpy)


def _plain(state: _State) -> dict[str, Any]:
    """Return a state as JSON data; tensors are hexadecimal text."""
    drawn = state.random
    version, numbers, gauss = drawn.python
    kind, words, *position = drawn.numpy
    return {
        "cpu": bytes_text(drawn.cpu),
        **({} if drawn.cuda is None else {"cuda": bytes_text(drawn.cuda)}),
        "python": [version, list(numbers), gauss],
        "numpy": [kind, words.tolist(), *position],
        "buffers": {path: bytes_text(value) for path, value in state.buffers.items()},
    }
