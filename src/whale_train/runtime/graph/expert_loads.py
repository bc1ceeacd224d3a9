"""Count the rows of each expert in a step.

Rows are counted before the experts' products, and read on the host one step later.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

_LISTED = 1024  # with more experts, the load of each expert is not written


@dataclass(frozen=True)
class MixtureLoad:
    """The rows of one mixture's experts in one step, over all ranks.

    rows: the number of rows that each expert computed.
    slots: the number of (token, chosen expert) pairs. Rows are dropped where experts have limits.
    """

    rows: tuple[int, ...]
    slots: int

    @property
    def imbalance(self) -> float:
        """Return the rows of the busiest expert divided by the mean rows of an expert; 0 without
        rows."""
        total = sum(self.rows)
        return max(self.rows) * len(self.rows) / total if total else 0.0

    @property
    def dropped(self) -> int:
        """Return the number of slots that no expert computed."""
        return self.slots - sum(self.rows)


def load_metrics(mixtures: Sequence[MixtureLoad]) -> dict[str, Any]:
    """Return the entries of `metrics.jsonl` for the mixtures of a step.

    Each entry is a list in the model's order: imbalance, number of idle experts, dropped slots. The
    load of every expert is added where the model has at most 1024 experts.
    """
    entries: dict[str, Any] = {
        "imbalance": [round(mixture.imbalance, 4) for mixture in mixtures],
        "idle": [mixture.rows.count(0) for mixture in mixtures],
        "dropped": [mixture.dropped for mixture in mixtures],
    }
    if sum(len(mixture.rows) for mixture in mixtures) <= _LISTED:
        entries["load"] = [mixture.rows for mixture in mixtures]
    return entries


class ExpertLoads:
    """A counter of the rows of a rank's experts, by mixture.

    `mixtures` are the plan's: the number of experts, by the name of the value that holds the end of
    each expert's rows. Counts are stored on `device`.
    """

    def __init__(self, mixtures: Mapping[str, int], device: torch.device) -> None:
        self._mixtures, self._device = dict(mixtures), device
        self._rows: dict[str, Tensor] = {}
        self._slots = dict.fromkeys(mixtures, 0)
        self._counts = False

    def begin(self) -> None:
        """Set all counts to zero."""
        self._rows = {}
        self._slots = dict.fromkeys(self._mixtures, 0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the rows of forwards inside the context.

        Forwards that a backward recomputes run outside it, and are not counted.
        """
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the rows of grouped products inside the context, for a model whose graph is not
        rewritten."""
        with self.counting(), _Watch(self.note, tuple(self._mixtures)):
            yield

    @torch.no_grad()
    def note(self, mixture: str, ends: Tensor, rows: Tensor) -> None:
        """Count the rows of one forward of `mixture`.

        `ends` [experts] holds the end of each expert's rows in `rows` [rows, ..]. Does nothing
        outside of `counting`.
        """
        if not self._counts:
            return
        counts = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
        seen = self._rows.get(mixture)
        self._rows[mixture] = counts if seen is None else seen + counts
        self._slots[mixture] += len(rows)

    def of_all_ranks(self) -> "PendingLoads":
        """Start the sum of the loads since `begin` over all ranks. A collective of the world."""
        parts = []
        for mixture, experts in self._mixtures.items():
            rows = self._rows.get(mixture)
            if rows is None:
                rows = torch.zeros(experts, dtype=torch.int64, device=self._device)
            parts += [rows, torch.full_like(rows[:1], self._slots[mixture])]
        counts = torch.cat(parts)
        work = dist.all_reduce(counts, async_op=True) if dist.get_world_size() > 1 else None
        return PendingLoads(counts, work, self._mixtures)


class PendingLoads:
    """The loads of a step on their way to the host, which reads them one step later (as `ToHost`).

    `counts` (int64) holds, for each of `mixtures` in turn, the rows of its experts and its slots.
    `work` is the all-reduce that sums `counts`, or None on one rank.
    """

    def __init__(self, counts: Tensor, work: dist.Work | None, mixtures: Mapping[str, int]) -> None:
        self._found, self._work, self._mixtures = counts, work, mixtures
        self._there = counts
        self._event: torch.cuda.Event | None = None
        if counts.device.type == "cuda":
            self._wait()
            self._found = torch.empty_like(counts, device="cpu", pin_memory=True)
            self._found.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def read(self) -> list[MixtureLoad]:
        """Return the loads by mixture, after waiting for them.

        The list is empty where the products of some mixture were not seen: a model whose graph is
        not rewritten may compute them in another way.
        """
        self._wait()
        if self._event is not None:
            self._event.synchronize()
        lists = (part.tolist() for part in self._parts(self._found))
        loads = [MixtureLoad(tuple(rows), slots) for *rows, slots in lists]
        return loads if all(mixture.slots for mixture in loads) else []

    def rows(self) -> dict[str, Tensor]:
        """Return the rows of every expert, [experts] int64 on the device, by mixture."""
        self._wait()
        return dict(
            zip(self._mixtures, (part[:-1] for part in self._parts(self._there)), strict=True)
        )

    def _parts(self, counts: Tensor) -> tuple[Tensor, ...]:
        """Split `counts` by mixture into slices [experts + 1]: the rows of the experts, then the
        slots."""
        return torch.split(counts, [1 + experts for experts in self._mixtures.values()])


class _Watch(TorchFunctionMode):
    """A mode that notes the first grouped product of each mixture, in the order of the model's
    calls.

    Products of one mixture share one tensor of the ends of each expert's rows.
    """

    def __init__(
        self, note: Callable[[str, Tensor, Tensor], None], mixtures: tuple[str, ...]
    ) -> None:
        super().__init__()
        self._note, self._mixtures = note, mixtures
        self._ends: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if "grouped_mm" in getattr(func, "__name__", ""):
            ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
            new = ends is not None and all(ends is not seen_ends for seen_ends in self._ends)
            if new and len(self._ends) < len(self._mixtures):
                self._note(self._mixtures[len(self._ends)], ends, args[0])
                self._ends.append(ends)
        return func(*args, **kwargs)
