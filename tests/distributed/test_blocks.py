"""A segment that runs block by block."""

import weakref

import torch
from torch import Tensor, fx, nn

from whale_train.runtime.base.node_meta import BLOCK
from whale_train.runtime.graph.block_modules import Blocks
from whale_train.runtime.graph.shard_rng import SharedRandom

aten = torch.ops.aten


class Seen(nn.Module):
    """Doubles what it is given, and notes how many of all it was ever given still live."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(weakref.ref(x))
        self.alive.append(sum(each() is not None for each in self.given))
        return x * 2


def test_a_value_goes_when_its_last_reader_has_run() -> None:
    graph, seen = fx.Graph(), Seen()
    root = nn.Module()
    root.add_module("seen", seen)
    x = value = graph.placeholder("x")
    early = None
    for number in range(5):
        value = graph.call_module("seen", (value,))
        value.meta[BLOCK] = f"layers.{number}"
        early = early or value
    # The first block's value is read again at the end, and is not let go of before.
    total = graph.call_function(aten.add.Tensor, (value, early))
    total.meta[BLOCK] = "norm"
    graph.output((total, x))
    module = fx.GraphModule(root, graph)
    graphs, random = {True: (module, ()), False: (module, ())}, SharedRandom(0, torch.device("cpu"))
    blocks = Blocks(nn.Module(), graphs, frozenset(), random)
    blocks.eval()
    given = torch.ones(2)
    with torch.no_grad():
        found, same = blocks(given)
    assert same is given
    assert found.tolist() == [34.0, 34.0]
    # What is given, what a block is given, and the first block's value.
    assert seen.alive == [1, 2, 3, 3, 3]
