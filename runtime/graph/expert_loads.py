"""How busy the experts of a step are: counted before their products, read a step later."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

_LISTED = 1024  # experts of a model, at most, whose loads are written one by one


@dataclass(frozen=True)
class MixtureLoad:
    """The rows that every expert of a mixture got in a step (`rows`), of the `slots` of tokens,
    each of which asks for one expert: some are dropped where experts have limits."""

    rows: tuple[int, ...]
    slots: int

    @property
    def imbalance(self) -> float:
        """How many times the mean the busiest expert's rows are; 0 where nobody has any."""
        total = sum(self.rows)
        return max(self.rows) * len(self.rows) / total if total else 0.0

    @property
    def dropped(self) -> int:
        return self.slots - sum(self.rows)


def written(mixtures: Sequence[MixtureLoad]) -> dict[str, Any]:
    """Return what `metrics.jsonl` says of the mixtures of a step, each a list in the model's
    order."""
    said: dict[str, Any] = {
        "imbalance": [round(mixture.imbalance, 4) for mixture in mixtures],
        "idle": [mixture.rows.count(0) for mixture in mixtures],
        "dropped": [mixture.dropped for mixture in mixtures],
    }
    if sum(len(mixture.rows) for mixture in mixtures) <= _LISTED:
        said["load"] = [mixture.rows for mixture in mixtures]
    return said


class ExpertLoads:
    """Counts the rows of a rank's experts, by mixture: the plan's `mixtures`, known by the value
    that says where their experts' rows end, have so many experts each."""

    def __init__(self, mixtures: Mapping[str, int], device: torch.device) -> None:
        self._mixtures, self._device = dict(mixtures), device
        self._rows: dict[str, Tensor] = {}
        self._slots = dict.fromkeys(mixtures, 0)
        self._counts = False

    def begin(self) -> None:
        """Forget what was counted."""
        self._rows = {}
        self._slots = dict.fromkeys(self._mixtures, 0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside it, forwards count: not where the backward runs parts of one again."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside it, so do products with experts of a model that runs as it is."""
        with self.counting(), _Watch(self.note, tuple(self._mixtures)):
            yield

    @torch.no_grad()
    def note(self, mixture: str, ends: Tensor, rows: Tensor) -> None:
        """Count the rows of one forward: experts' end at `ends` ([experts]) among `rows`."""
        if not self._counts:
            return
        counts = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
        seen = self._rows.get(mixture)
        self._rows[mixture] = counts if seen is None else seen + counts
        self._slots[mixture] += len(rows)

    def of_all_ranks(self) -> "PendingLoads":
        """Ask for the loads of the step since `begin`, of all ranks; all of them call it."""
        parts = []
        for mixture, experts in self._mixtures.items():
            rows = self._rows.get(mixture)
            if rows is None:
                rows = torch.zeros(experts, dtype=torch.int64, device=self._device)
            parts += [rows, torch.full_like(rows[:1], self._slots[mixture])]
        found = torch.cat(parts)
        work = dist.all_reduce(found, async_op=True) if dist.get_world_size() > 1 else None
        return PendingLoads(found, work, self._mixtures)


class PendingLoads:
    """Loads on their way to the host, which reads them a step later (as `ToHost`)."""

    def __init__(self, found: Tensor, work: dist.Work | None, mixtures: Mapping[str, int]) -> None:
        self._found, self._work, self._mixtures = found, work, mixtures
        self._there = found
        self._event: torch.cuda.Event | None = None
        if found.device.type == "cuda":
            self._wait()
            self._found = torch.empty_like(found, device="cpu", pin_memory=True)
            self._found.copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def read(self) -> list[MixtureLoad]:
        """Return the loads by mixture, when they have come; none where some mixture's products
        were not seen, as of a model that runs as it is and computes them in another way."""
        self._wait()
        if self._event is not None:
            self._event.synchronize()
        lists = (part.tolist() for part in self._parts(self._found))
        found = [MixtureLoad(tuple(rows), slots) for *rows, slots in lists]
        return found if all(mixture.slots for mixture in found) else []

    def rows(self) -> dict[str, Tensor]:
        """Return the rows of every expert ([experts], int64), by mixture, on the device."""
        self._wait()
        return dict(
            zip(self._mixtures, (part[:-1] for part in self._parts(self._there)), strict=True)
        )

    def _parts(self, found: Tensor) -> tuple[Tensor, ...]:
        return torch.split(found, [1 + experts for experts in self._mixtures.values()])


class _Watch(TorchFunctionMode):
    """Notes the first of the products of each mixture, in the order in which a model calls them:
    those of one mixture have one value that says where rows end."""

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
            new = ends is not None and all(ends is not each for each in self._ends)
            if new and len(self._ends) < len(self._mixtures):
                self._note(self._mixtures[len(self._ends)], ends, args[0])
                self._ends.append(ends)
        return func(*args, **kwargs)
