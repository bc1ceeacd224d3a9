"""Modules that call losses out of sight, and such as leave something behind or change later."""

import torch
from tests.distributed.odd_models import CLASSES, WIDTH, Loss, Odd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# --- Losses called out of sight ------------------------------------------------------------------


class LossesInChunks(Odd):
    """The losses of some places at a time, whose logits are not kept."""

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        x, total = torch.tanh(self.inner(points)), points.new_zeros(())
        for place in range(0, 6, 2):
            chunk, wanted = x[:, place : place + 2], ids[:, place : place + 2] % CLASSES
            total = total + checkpoint(self._loss, chunk, wanted, use_reentrant=False) ** 2
        return Loss(total / 3 if len(points) else total)

    def _loss(self, chunk: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.head(chunk).flatten(0, 1), wanted.flatten(), ignore_index=0)


class LossMadeAgain(Odd):
    """A loss times a learned factor, both made again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = checkpoint(self._loss, z, labels, use_reentrant=False)
        return made

    def _loss(self, z: Tensor, labels: Tensor) -> Tensor:
        return self.factor * F.cross_entropy(self.head(z), labels, ignore_index=0)


class ReentrantBlocks(Odd):
    def hidden(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.inner(points))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return x.mean(1)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class LossOfEachRow(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = torch.vmap(lambda row, label: F.cross_entropy(row, label))(logits, labels)
        return made.mean()


@torch.jit.script
def _scripted(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=0)


class ScriptedLoss(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = _scripted(logits, labels)
        return made


# --- What a forward leaves behind ----------------------------------------------------------------


class ReplacesItsBuffer(Odd):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return F.cross_entropy(logits, labels) + z.square().mean() / self.calls


class NormalisesItsWeight(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Linear(WIDTH, CLASSES, bias=False)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        return F.cross_entropy(self.prototypes(F.normalize(z)) / 0.2, labels)


class ClampsItsWeight(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.head.weight.data.clamp_(-0.1, 0.1)
        return F.cross_entropy(self.head(z), labels)


# --- What is another model after some calls ------------------------------------------------------


class WarmsUp(Odd):
    """A loss over the batch begins after many calls: here the third."""

    calls = 0

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        loss = F.cross_entropy(logits, labels)
        return loss + F.relu(1 - z.std(0)).mean() if self.calls > 2 else loss


class FreezesLater(Odd):
    calls = 0

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.blocks.requires_grad_(False)
        return F.cross_entropy(logits, labels)


class MixesUpInAnOrder(Odd):
    """A random order of the samples, in a forward that looks at values."""

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        if bool(points.isnan().any()):
            raise ValueError("not a number")
        order = torch.randperm(len(points))
        logits = self.head(self.hidden(0.7 * points + 0.3 * points[order]))
        return Loss(F.cross_entropy(logits, labels))


# --- Parameters of other kinds -------------------------------------------------------------------


class LazyHead(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(CLASSES)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.lazy(z), labels)


class ComplexFilter(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, 8, dtype=torch.cfloat))

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        filtered = torch.fft.irfft(torch.fft.rfft(points, dim=1) * self.filter, n=6, dim=1)
        return Loss(F.cross_entropy(self.head(self.hidden(filtered)), labels))


class Temperature(Odd):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits * self.temperature.exp(), labels)


class WideHead(Odd):
    """A head in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.double)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        z = torch.tanh(self.inner(points)).mean(1)
        return Loss(F.cross_entropy(self.head(z.double()), labels))


ODD_STATE = [
    made
    for made in list(globals().values())
    if isinstance(made, type) and issubclass(made, Odd) and made is not Odd
]
