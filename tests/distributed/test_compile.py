"""`train.compile`: what is compiled computes what the operations compute, equal blocks once."""

from collections.abc import Iterator

import pytest
import torch
from tests.distributed.equality import Jobs
from tests.distributed.test_parallel_strategies import pipeline
from tests.distributed.test_verify import EVEN, MODELS, OPTIMIZERS, Case, Sides
from tests.pairs import some
from torch import Tensor, fx, nn
from torch.nn.functional import cross_entropy

from whale_train.runtime.base.node_meta import BLOCK
from whale_train.runtime.compile.blocks import compile_blocks
from whale_train.runtime.compile.compiler import Compiler, uncompiled
from whale_train.runtime.compile.regions import compile_regions

LOSS = 2e-5  # how far losses may be off, relatively
COMPILED = "train.compile=true"
RECOMPUTED = f"strategy.graph={pipeline('[{stage: {recompute: full}}, {replicate: {}}]')}"
CASES = [
    Case("gpt", "zero3", "adamw", extra=(COMPILED,)),
    Case("gpt_tied", "split", "sgd", extra=(COMPILED,)),
    Case("gpt", "pipeline", "sgd", extra=(COMPILED, RECOMPUTED)),
    Case("image_classifier", "dp", "sgd", extra=(COMPILED,)),  # asks other ranks in its blocks
]


# The model as it is, compiled block by block; a graph's regions are compiled in the test below.
@pytest.mark.parametrize("case", some(CASES, CASES[-1:]), ids=str)
def test_a_compiled_plan_is_one_process(case: Case, sides: Sides) -> None:
    found = sides.verify(case)
    assert found.equal
    losses = [x.relative for x in found.differences if x.what == "loss"]
    assert losses
    assert max(losses) < LOSS


@pytest.mark.parametrize("strategy", some(["dp", "split"], ["split"]))
def test_dropout_draws_what_it_draws_uncompiled(strategy: str, jobs: Jobs) -> None:
    overrides = [*MODELS["gpt2"], f"strategy={strategy}", *EVEN, *OPTIMIZERS["sgd"]]
    overrides += ["train.steps=4", "train.global_batch=8"]
    plain, compiled = jobs.run(overrides), jobs.run([*overrides, COMPILED])
    assert compiled.losses == pytest.approx(plain.losses, rel=LOSS)
    assert compiled.norms == pytest.approx(plain.norms, rel=LOSS)


# --- What is compiled, and how often --------------------------------------------------------------


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.close()
    torch.compiler.reset()


def blocks(number: int, *, with_hole: bool = False) -> fx.GraphModule:
    """A graph of `number` equal blocks of [3, 4], in each an object's call if `with_hole`."""
    graph = fx.Graph()
    root = nn.Module()
    root.add_module("hole", nn.Identity())
    value = graph.placeholder("x")
    weights = [graph.placeholder(f"weight_{i}") for i in range(number)]
    for i, weight in enumerate(weights):
        made = [graph.call_function(torch.ops.aten.mul.Tensor, (value, weight))]
        if with_hole:
            made.append(graph.call_module("hole", (made[-1],)))
        made.append(graph.call_function(torch.ops.aten.tanh.default, (made[-1],)))
        made.append(graph.call_function(torch.ops.aten.add.Tensor, (made[-1], value)))
        for node in made:
            node.meta[BLOCK] = f"blocks.{i}"
        value = made[-1]
    graph.output((value,))
    return fx.GraphModule(root, graph)


def test_equal_blocks_are_compiled_once(compiler: Compiler) -> None:
    def run(number: int) -> int:
        """Run so many blocks forward and backward; the compilations so far."""
        given = [torch.randn(*size, requires_grad=True) for size in ((3, 4), *((4,),) * number)]
        graph = blocks(number)
        (expected,) = graph(*given)
        compile_regions(graph, compiler)
        called = [node.target for node in graph.graph.nodes if node.op == "call_module"]
        assert len(called) == number
        (found,) = graph(*given)
        assert torch.allclose(found, expected)
        found.sum().backward()
        assert all(value.grad is not None for value in given)
        return compiler.compilations

    once = run(1)
    assert once in (1, 2)  # the forward, and the backward, if that does not come with it from disk
    assert run(3) == once
    assert set(compiler.seconds) == {"blocks.0"}


def test_a_region_ends_where_an_object_decides(compiler: Compiler) -> None:
    graph = blocks(1, with_hole=True)
    compile_regions(graph, compiler)
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    assert called == ["hole", "region_tanh_default"]  # one product is not worth a region


def test_uncompiled_runs_operations_that_can_be_watched(compiler: Compiler) -> None:
    given = [torch.randn(3, 4), torch.randn(4)]
    graph = blocks(1)
    compile_regions(graph, compiler)
    with uncompiled():
        graph(*given)
    assert compiler.compilations == 0
    graph(*given)
    assert compiler.compilations == 1


class Member(nn.Module):
    """A block, of which some compute a loss."""

    def __init__(self, with_loss: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.with_loss = with_loss

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x)) + x
        if self.with_loss:
            x = x + cross_entropy(x, torch.zeros(len(x), dtype=torch.long))
        return x


def test_blocks_that_compute_a_loss_are_left_alone(compiler: Compiler) -> None:
    module = nn.Sequential(Member(False), Member(True), Member(False))
    found = compile_blocks(nn.ModuleDict({"model": module}), compiler)
    assert len(found) == 3
    given = torch.randn(3, 4, requires_grad=True)
    first = module(given)
    assert compiler.compilations == 0  # it is seen what they compute
    assert torch.allclose(module(given), first)
    assert set(compiler.seconds) == {"0"}
    assert compiler.compilations == 1
