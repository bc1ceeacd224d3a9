"""Give all copies gradients of the same parameters, whichever branches their forwards took.

ZeRO 1 reduces gradients in the step, in one order. A copy of a model that branches on values gets a
gradient of zeros for every parameter that its forward did not reach; zeros are what its samples
contribute. ZeRO 2 reduces gradients in the order in which backwards make them, and ZeRO 3 gathers
parameters in the order in which modules run. Copies that differ would mix up each other's tensors,
so they are stopped.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.models.export.export import model_path
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.comms.forward_agreement import ForwardAgreement, ForwardsDiffer


class ReachedAlike:
    """Checks that the copies of `module` make gradients of the same parameters, under ZeRO `stage`.

    copies: the ranks that hold the same shards.
    agreement: compares the point that each copy's forward has reached.

    Make it before DeepSpeed partitions the module, so that its hooks run before DeepSpeed's.
    """

    def __init__(
        self, module: nn.Module, copies: Copies, agreement: ForwardAgreement, stage: int
    ) -> None:
        self._agreement, self._stage, self._group = agreement, stage, copies.group
        named = module.named_parameters()
        self._trained = {model_path(path): p for path, p in named if p.requires_grad}
        self._ran: list[str] = []
        for path, part in module.named_modules() if stage > 1 else ():
            if next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(self._noting(model_path(path)))

    def _noting(self, path: str) -> Callable[..., None]:
        """Return a forward pre-hook that records that the module at `path` runs in training.

        Under ZeRO 3 the hook also checks that the module runs on all copies.
        """

        def note(part: nn.Module, _: object) -> None:
            if part.training:  # an evaluation has no backward whose order would matter
                self._ran.append(path)
            if self._stage == 3:
                self._agreement.at(f"the module {path}")

        return note

    def missing(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """Return scalars of 0 that depend on the parameters reached by the losses of other copies
        only.

        losses: this copy's losses of one backward.

        Raises ForwardsDiffer where copies differ and the stage does not allow that, and for a
        parameter that no copy reaches.
        """
        order, self._ran = blake2b(repr(self._ran).encode(), digest_size=4).hexdigest(), []
        if self._stage > 1:
            self._agreement.at(f"the backward of modules that ran in the order {order}")
        reached = _leaves(losses)
        parameters, paths = list(self._trained.values()), list(self._trained)
        flags = torch.tensor([p in reached for p in parameters], device=losses[0].device)
        copies = flags.to(torch.int32)
        dist.all_reduce(copies, group=self._group)
        unreached = [paths[i] for i in (copies == 0).nonzero().flatten().tolist()]
        if unreached:
            rule = f"no sample of this step reaches the parameter {unreached[0]}, which ZeRO would "
            rule += "move by its momentum and decay, and one process would not"
            raise ForwardsDiffer(f"{rule}; use strategy=dp")
        if self._stage > 1:
            some = copies < dist.get_world_size(self._group)
            unlike = [paths[i] for i in some.nonzero().flatten().tolist()]
            if unlike:
                rule = f"the samples of some ranks alone reach the parameter {unlike[0]}, and ZeRO "
                rule += f"{self._stage} reduces gradients in the order in which they are made"
                raise ForwardsDiffer(f"{rule}; use strategy=zero1 or strategy=dp")
        elsewhere = ((copies > 0) & ~flags).nonzero().flatten().tolist()
        # The gradient of a sum over no elements is zeros, even where the parameter is infinite.
        return [parameters[i].flatten()[:0].sum() for i in elsewhere]


def _leaves(values: Iterable[Tensor]) -> set[Tensor]:
    """Return the leaves of autograd's graph that `values` are computed from."""
    nodes = [x.grad_fn for x in values]
    seen, leaves = set(nodes), set[Tensor]()
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(leaf)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return leaves
