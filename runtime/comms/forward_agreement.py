"""Whether the ranks of a group are at the same place of a forward before they communicate in it.

A model that looks at values may run a module, or a loss, for the samples of some ranks and not for
those of others. A collective in it would wait for ranks that never come, or take what they send in
another one for its own. So each rank says first where it is, and all of them stop where they
differ. This costs a number a collective, and is done for models that can differ only.
"""

import traceback
from hashlib import blake2b
from pathlib import Path

import torch
from torch import distributed as dist

_OURS = "whale_train"


class ForwardsDiffer(RuntimeError):
    """The ranks of a group are at different places of their forwards; the message says which."""


class ForwardAgreement:
    """What the ranks of `group`, on `device`, say of where they are in a forward."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def at(self, place: str) -> None:
        """Say that this rank is at `place`, such as "the batch norm blocks.2"; all members call it
        as often. Raises ForwardsDiffer on all of them where one is elsewhere."""
        digest = blake2b(place.encode(), digest_size=7).digest()
        own = torch.tensor([int.from_bytes(digest, "little")], device=self._device)
        places = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(places, own, group=self._group)
        if own.is_meta or all(torch.equal(other, own) for other in places):
            return  # a rehearsal's tensors have no values
        told: list[str] = [""] * self._group.size()
        dist.all_gather_object(told, f"{place} ({_line()})", group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        where = "; ".join(f"rank {r} is at {said}" for r, said in zip(ranks, told, strict=True))
        rule = "the forward branches on values, and not alike on all ranks, which communicate there"
        remedy = "have it do the same for all samples, or use strategy=single"
        raise ForwardsDiffer(f"{rule}: {where}; {remedy}")


def _line() -> str:
    """Return the line of the model's code that runs."""
    for frame in reversed(traceback.extract_stack()):
        parts = Path(frame.filename).parts
        is_a_file = not frame.filename.startswith("<")
        if is_a_file and not {"torch", "deepspeed", _OURS}.intersection(parts):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return "after its forward"
