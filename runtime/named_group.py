"""What torch.distributed wants of a process group that is written in Python."""

from torch import distributed as dist


class NamedGroup(dist.ProcessGroup):
    """One that keeps its name: torch keeps it only of those written in C++ (2.13)."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs know one constructor

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name
