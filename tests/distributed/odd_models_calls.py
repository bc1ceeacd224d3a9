"""Modules whose calls differ: teachers without gradients, draws of their own, state that moves,
branches on values, and weights that are made. Inputs and outputs are those of `odd_models`."""

import random
from typing import Any

import numpy as np
import torch
from tests.distributed.odd_models import CLASSES, WIDTH, Loss, Odd, each
from torch import Tensor, nn
from torch.nn import functional as F


class Own(Odd):
    """Its loss is a cross-entropy of the logits of `changed` features."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.changed(z, labels)), labels)

    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError


class Noisy(Own):
    """Adds noise to its features."""

    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        return z + 0.5 * self.noise(z)

    def noise(self, z: Tensor) -> Tensor:
        raise NotImplementedError


# --- Teachers ------------------------------------------------------------------------------------


class InferenceTeacher(Own):
    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        with torch.inference_mode():
            target = self.blocks[0](z)
        return z + target.clone()


class InferenceMethod(Own):
    @torch.inference_mode()
    def target(self, z: Tensor) -> Tensor:
        made: Tensor = self.blocks[0](z)
        return made

    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        return z * self.target(z).clone()


class GradientsInsideInference(Own):
    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad(), torch.inference_mode(False):
            return z + self.blocks[1](z)


class AsksForInference(Own):
    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        with torch.inference_mode():
            factor = 2.0 if torch.is_inference_mode_enabled() else 3.0
        return z * factor


class FrozenTeacher(Own):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        with torch.inference_mode():
            target = torch.tanh(self.teacher(z))
        return z - target.clone()


# --- Draws that are part of the model -------------------------------------------------------------


class SeededNoise(Noisy):
    def noise(self, z: Tensor) -> Tensor:
        return torch.randn(z.shape, generator=torch.Generator().manual_seed(7))


class HeldGenerator(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def noise(self, z: Tensor) -> Tensor:
        return torch.empty_like(z).normal_(generator=self.generator)


class ForkedSeed(Noisy):
    def noise(self, z: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return torch.randn_like(z)


class SeededDropout(Own):
    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return F.dropout(z, 0.5)


class SavedRandomState(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.get_rng_state()

    def noise(self, z: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.set_rng_state(self.state)
            return torch.rand(z.shape)


class NoiseOfAll(Noisy):
    """The same for every sample: copies draw it alike."""

    def noise(self, z: Tensor) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(7))


class DrawnWhenBuilt(Noisy):
    drawn: Tensor

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(WIDTH, generator=torch.Generator().manual_seed(5))
        self.register_buffer("drawn", drawn)

    def noise(self, z: Tensor) -> Tensor:
        return self.drawn


# --- Draws in Python ------------------------------------------------------------------------------


class SkipsByPython(Own):
    def __init__(self) -> None:
        super().__init__()
        self.random: Any = random.Random(3)

    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        return z + self.blocks[1](z) if self.random.random() < 0.5 else z


class SkipsByNumpy(SkipsByPython):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(3)


class SkipsRarely(SkipsByPython):
    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        return z if self.random.random() < 0.05 else z + self.blocks[1](z)


class SkipsByTheGlobal(SkipsByPython):
    def __init__(self) -> None:
        super().__init__()
        self.random = random


_OF_THE_MODULE = random.Random(4)


class SkipsByTheModules(SkipsByPython):
    def __init__(self) -> None:
        super().__init__()
        del self.random

    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        return z + self.blocks[1](z) if _OF_THE_MODULE.random() < 0.5 else z


class PicksABlock(SkipsByPython):
    """Blocks that are not picked get no gradient, others in every step."""

    def hidden(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.inner(points)).mean(1)
        return x + torch.tanh(self.random.choice(list(self.blocks))(x))

    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        return z


# --- State that is read, and moved ----------------------------------------------------------------


class Counting(Own):
    calls: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.ones(3))


class ReadsThenMoves(Counting):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        temperature = 1 + 0.3 * self.calls
        self.calls.add_(1)
        return F.cross_entropy(logits / temperature, labels)


class MovesWithoutGradients(Counting):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        temperature = 1 + 0.3 * self.calls
        with torch.no_grad():
            self.calls += 1
        return F.cross_entropy(logits / temperature, labels)


class MovesAPart(Counting):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        temperature = self.seen.sum()
        self.seen[1:].mul_(1.5)
        return F.cross_entropy(logits / temperature, labels)


class ReadsOnBothSides(Counting):
    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        logits = self.head(self.hidden(points * (1 + 0.1 * self.calls)))
        loss = F.cross_entropy(logits / (1 + 0.3 * self.calls), labels)
        self.calls.add_(1)
        return Loss(loss)


class MovesThenReadsTwice(Counting):
    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        self.calls.add_(1)
        logits = self.head(self.hidden(points / self.calls))
        return Loss(F.cross_entropy(logits / (1 + 0.2 * self.calls), labels))


class TwoThatMoveEachOther(Counting):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        temperature = 1 + 0.3 * self.calls
        self.seen.copy_(self.seen * 1.1 + self.calls)
        self.calls.add_(self.seen[0] * 0.1)
        return F.cross_entropy(logits / temperature, labels)


# --- Modules that the samples of some ranks reach -------------------------------------------------


class NormOfSome(Own):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        some, out = labels % 2 == 0, self.other(z)
        if int(some.sum()) > 1:
            out[some] = self.norm(z[some])
        return out


class OneOfTwoNorms(NormOfSome):
    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        chosen = self.norm if float(labels.float().mean()) > 1.5 else self.other
        normed: Tensor = chosen(z)
        return normed


class LossOfSome(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        loss, some = F.cross_entropy(logits, labels), labels == 4
        if bool(some.any()):
            loss = loss + 0.5 * F.cross_entropy(logits[some], labels[some])
        return loss


class AdaptiveSoftmax(Odd):
    """Clusters of classes whose weights only samples with such a class reach."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, [2, 3], div_value=2.0)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        adapted: Tensor = self.classes(z, labels).loss
        return adapted + F.cross_entropy(logits, labels)


class ExpertsByLabel(Own):
    """As large as each other, so that their gradients would fit in each other's place."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(CLASSES))

    def changed(self, z: Tensor, labels: Tensor) -> Tensor:
        out = torch.zeros_like(z)
        for number, expert in enumerate(self.experts):
            rows = (labels == number).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_copy(0, rows, expert(z[rows]))
        return out


# --- Weights that are made ------------------------------------------------------------------------


class MakesItsHead(Odd):
    """By products of a vector, which has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.maker = nn.Parameter(torch.randn(4)), nn.Linear(4, CLASSES * WIDTH)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        weight = torch.tanh(self.maker(self.code)).view(CLASSES, WIDTH)
        return F.cross_entropy(F.linear(z, weight) + logits, labels)


class LowRank(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Parameter(0.3 * torch.randn(*shape)) for shape in ((3, WIDTH), (CLASSES, 3))
        )

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits + F.linear(z, self.up @ self.down), labels)


class MakesABias(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(WIDTH))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits + self.head(self.blocks[0](self.code)), labels)


class WeighsItsLosses(Odd):
    """A loss that an earlier stage of a pipeline makes."""

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        x = torch.tanh(self.inner(points)).mean(1)
        early = F.cross_entropy(x[:, :CLASSES], labels)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return Loss(0.3 * early + each(self.head(x), labels).mean())


_BASES = (Own, Noisy, Counting)
ODD_CALLS = [
    made
    for made in list(globals().values())
    if isinstance(made, type) and made.__module__ == __name__ and made not in _BASES
]
