"""Check that the ranks of a group are at the same place of a forward before they communicate in it.

A model that branches on values may run a module, or a loss, for the samples of some ranks only. A
collective in such a branch would wait for ranks that never call it, or receive the data of another
collective. So each rank first announces its place, and all ranks stop where the places differ. The
check costs a collective of one number, and is made only for models whose forwards can differ.
"""

import traceback
from hashlib import blake2b
from pathlib import Path

import torch
from torch import distributed as dist

_OURS = "whale_train"


class ForwardsDiffer(RuntimeError):
    """The ranks of a group are at different places of their forwards; the message names the
    places."""


class ForwardAgreement:
    """Checks that all ranks of `group` are at one place of a forward.

    device: the device for the tensors of the check.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def at(self, place: str) -> None:
        """Announce that this rank is at `place`, such as "the batch norm blocks.2", and compare.

        All members must call it equally often. Raises ForwardsDiffer on every member if any two
        places differ. Tensors of a rehearsal have no values, and are not compared.
        """
        digest = blake2b(place.encode(), digest_size=7).digest()
        own = torch.tensor([int.from_bytes(digest, "little")], device=self._device)
        places = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(places, own, group=self._group)
        if own.is_meta or all(torch.equal(other, own) for other in places):
            return  # a rehearsal's tensors have no values
        texts: list[str] = [""] * self._group.size()
        dist.all_gather_object(texts, f"{place} ({_line()})", group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        where = "; ".join(f"rank {r} is at {text}" for r, text in zip(ranks, texts, strict=True))
        rule = "the forward branches on values, and not alike on all ranks, which communicate there"
        remedy = "have it do the same for all samples, or use strategy=single"
        raise ForwardsDiffer(f"{rule}: {where}; {remedy}")


def _line() -> str:
    """Return the line of the model's code that is running, or "after its forward" if none is
    running."""
    for frame in reversed(traceback.extract_stack()):
        parts = Path(frame.filename).parts
        is_a_file = not frame.filename.startswith("<")
        if is_a_file and not {"torch", "deepspeed", _OURS}.intersection(parts):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return "after its forward"
