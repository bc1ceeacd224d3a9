"""Modules that call losses out of sight, and such as keep state between calls or change later."""

import random
from typing import Any

import torch
from tests.distributed.odd_models import CLASSES, WIDTH, Loss, Odd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
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


class CountsCalls(Odd):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, labels) + z.square().mean() / self.calls


class CountsWithoutGradients(CountsCalls):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        return F.cross_entropy(logits, labels) + z.square().mean() / self.calls


class CountsInAPart(Odd):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.seen[1:].mul_(1.5)
        return F.cross_entropy(logits, labels) + z.square().mean() / self.seen.sum()


class CountsInPython(Odd):
    calls = 0

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, labels) + min(1.0, 0.3 * self.calls) * z.square().mean()


class FollowsTheBatch(Odd):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * z.mean(0))
        return F.cross_entropy(self.head(z - self.seen), labels)


class RemembersTheLast(Odd):
    last: Any = None

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        pull = z.mean() * 0 if self.last is None else (z.mean(0) * self.last).sum()
        self.last = z.detach().mean(0)
        return F.cross_entropy(logits, labels) + pull


class Collects(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.seen.append(len(z))
        return F.cross_entropy(logits, labels) + z.square().mean() / len(self.seen)


class DropsBlocksByPython(Odd):
    def hidden(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.inner(points))
        for block in self.blocks:
            if random.random() < 2:
                x = x + random.choice([1.0, 1.0]) * torch.tanh(block(x))
        return x.mean(1)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class CountsIntoATensor(Odd):
    calls = 0

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, labels) * torch.tensor(1.0 + self.calls)


class RunningInstanceNorm(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(6, track_running_stats=True)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        return Loss(F.cross_entropy(self.head(self.hidden(self.norm(points))), labels))


# --- Settings of torch's own, set in a forward ---------------------------------------------------


class CtcWithoutCudnn(Odd):
    """A loss over sequences, as transformers calls it: in fp32 and not by cuDNN."""

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        logits = self.head(torch.tanh(self.inner(points)))
        scores = F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
        targets = 1 + torch.stack([labels, ids[:, 0]], 1) % (CLASSES - 1)
        places = torch.full_like(labels, points.shape[1])
        with torch.backends.cudnn.flags(enabled=False):
            loss = F.ctc_loss(scores, targets, places, torch.full_like(labels, 2), reduction="none")
        return Loss((loss / 2).mean())


class SetsTorchUp(Odd):
    """What it sets to what it was, or puts back, and what only chooses a kernel."""

    def hidden(self, points: Tensor) -> Tensor:
        torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
        before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
        with torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH):
            x = torch.tanh(self.inner(points))
            x = x + F.scaled_dot_product_attention(x, x, x)
        with torch.backends.flags(fp32_precision="ieee"), torch.autocast("cpu", enabled=False):
            for block in self.blocks:
                x = x + torch.tanh(block(x))
        return x.mean(1)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


ODD_STATE = [
    made
    for made in list(globals().values())
    if isinstance(made, type) and issubclass(made, Odd) and made is not Odd
]
