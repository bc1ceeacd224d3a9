"""Weights under ZeRO 3 in unequal parts have memory only while something reads them."""

import torch
from tests.distributed.harness import run_ranks
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.engines.uneven.engine import UnevenEngine
from whale_train.runtime.engines.uneven.flat_unit import FlatUnit
from whale_train.runtime.optim.optimizers import make_optimizer

DEPTH, WIDTH = 6, 8


class Block(nn.Module):
    """A product, and a penalty that iterates over the block's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        return x + torch.tanh(self.inner(x)), penalty


class Net(nn.Module):
    """Equal blocks, an LSTM (which keeps its weights in a list of its own), and weights that a
    module reads of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        x, penalties = self.first(x) * self.scales[0], []
        for block in self.blocks:
            x, penalty = block(x)
            penalties.append(penalty)
        x, _ = self.lstm(x)
        return nn.functional.linear(x, self.first.weight).square().mean() + sum(penalties)


def step() -> tuple[list[int], list[int], float]:
    """Return how many blocks were gathered, at most and at the end, in a forward and in a backward,
    and the largest difference of a weight from plain training after a step."""
    torch.manual_seed(0)
    module, plain = Net(), Net()
    plain.load_state_dict(module.state_dict())
    gathered: set[FlatUnit] = set()
    most = [0]

    def gathers(unit: FlatUnit, is_gathered: bool) -> None:
        (gathered.add if is_gathered else gathered.discard)(unit)
        assert unit.flat.untyped_storage().nbytes() == (unit.nbytes if is_gathered else 0)
        most[0] = max(most[0], len(gathered))

    make = make_optimizer("sgd", {"lr": 0.1})
    engine = UnevenEngine(
        *(module, Copies(dist.group.WORLD), (3, 1), 3, lambda own: make, {}, 0.0, "fp32"),
        torch.device("cpu"),
        gathers=gathers,
    )
    batch = torch.randn(4, 3, WIDTH)
    loss = engine(batch) / 2  # of two copies of one batch
    counts = [[most[0], len(gathered)]]
    most[0] = 0
    engine.backward([loss], [torch.ones(())])
    counts.append([most[0], len(gathered)])
    engine.finish_backward()
    engine.step(None)
    plain(batch).backward()
    make(list(plain.parameters())).step()
    for unit in engine.units:
        unit.gather()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    off = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return counts[0], counts[1], off


def test_few_blocks_are_gathered_at_once_and_none_afterwards() -> None:
    for forward, backward, off in run_ranks(step, 2):
        assert forward == [2, 0]  # one, and `first`, whose weights another module has read
        assert backward == [2, 0]  # one, and the one that was read before it
        assert off < 1e-6
