"""The base of process groups that are written in Python, as torch.distributed requires it."""

from datetime import timedelta
from typing import ClassVar

from torch import distributed as dist


class NamedGroup(dist.ProcessGroup):
    """A process group that keeps its name: torch keeps names only for groups written in C++ (2.13).

    BACKEND: the name of this kind of group in torch.
    """

    BACKEND: ClassVar[str]

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs know one constructor

    @classmethod
    def new(cls, ranks: list[int], timeout: timedelta, group_desc: str) -> dist.ProcessGroup:
        """Return a group of CPU ranks, made by `dist.new_group`. Every rank of the job must call
        it.

        ranks: the members.
        timeout: the limit of every wait in the group.
        group_desc: torch's description of the group.
        """
        if cls.BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(cls.BACKEND, cls, devices=["cpu"])
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=cls.BACKEND, group_desc=group_desc
        )
        return group

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Return the name that torch gave the group."""
        return self._name
