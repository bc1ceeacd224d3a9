"""What is alive in a forward and a backward, against the same played by hand."""

import pytest

from whale_train.strategies.graph.block_paths import blocks_of, unit_of
from whale_train.strategies.graph.operation_graph import (
    INSIDE,
    OWN,
    PRODUCTS,
    Operation,
    OperationGraph,
    Ref,
    Size,
)
from whale_train.strategies.graph.rewrites import Rewrite
from whale_train.strategies.graph.saved_tensors import View, halves, kept
from whale_train.strategies.memory.liveness import (
    MemoryPoint,
    profile_by_unit,
    profile_forward_backward,
)

HIDDEN = (Size(0, 1), Size(8))  # 32 bytes a sample
WEIGHT = (Size(8), Size(8))  # 256 bytes


def operation(
    name: str,
    target: str,
    *reads: str,
    saved: tuple[tuple[int, float], ...] = (),
    memory: int = OWN,
    shape: tuple[Size, ...] = HIDDEN,
    module: str = "",
) -> Operation:
    arguments = tuple(Ref(read) for read in reads)
    given = {"shape": shape, "dtype": "float32", "module": module}
    return Operation(name, target, arguments, saved=saved, memory=memory, **given)  # type: ignore[arg-type]


def weight(name: str) -> Operation:
    return operation(name, "parameter", shape=WEIGHT)


LINEAR, GELU = "aten.linear.default", "aten.gelu.default"
# x -> h, seen as v -> g -> y -> loss. Kept: x, h (as v) and g.
CHAIN = OperationGraph(
    (
        operation("x", "input"),
        weight("w"),
        operation("h", LINEAR, "x", "w", saved=((0, 32.0),), module="blocks.0"),
        operation("v", "aten.view.default", "h", memory=0, module="blocks.0"),
        operation("g", GELU, "v", saved=((0, 32.0),), module="blocks.0"),
        weight("u"),
        operation("y", LINEAR, "g", "u", saved=((0, 32.0),), module="blocks.1"),
        operation("loss", "aten.sum.default", "y", shape=(), module="loss"),
        operation("output", "output", "loss"),
    )
)
NAMES = [op.name for op in CHAIN]
GRADIENTS = {"w": 256.0, "u": 256.0}


def test_a_view_lies_in_what_it_is_a_view_of() -> None:
    assert CHAIN.memory_of["v"] == CHAIN.memory_of["h"] == "h"
    assert kept(View(CHAIN), NAMES) == {("x", OWN): 32, ("h", OWN): 32, ("g", OWN): 32}


def test_gradients_come_as_values_go() -> None:
    products = [name for name in NAMES if CHAIN[name].target in PRODUCTS]
    run = profile_forward_backward(View(CHAIN), NAMES, GRADIENTS, own_gradients=products)
    assert (run.kept, run.gradients) == (96.0, 512.0)
    # When the loss is computed, y is there as well, which nobody keeps.
    assert run.forward == (MemoryPoint(0.0, 96 + 32 + 4),)
    # u's gradient comes with those of y and of g while all is kept; w's with that of h and x.
    assert run.first == (MemoryPoint(512.0, 32 + 32), MemoryPoint(256.0, 96 + 32 + 32))
    # One that is added to gradients there are is let go of again.
    assert run.again == (MemoryPoint(256.0, 96 + 32 + 32),)
    # Left for later: what the products read but for x, which needs no gradient, and y's and h's.
    assert run.deferred == 32 + 2 * 32


def test_what_crosses_stays() -> None:
    run = profile_forward_backward(View(CHAIN), NAMES[:5], {"w": 256.0}, gives=("g",))
    assert run.kept == 96.0  # x and h, and g, which the next part of the model keeps
    assert run.first == (MemoryPoint(256.0, 96.0), MemoryPoint(0.0, 96 + 32 + 32))


def test_of_a_part_a_part_is_kept() -> None:
    cut = View(CHAIN).held_by(lambda name: 0.5 if name in ("h", "g") else 1.0)
    assert kept(cut, NAMES) == {("x", OWN): 32, ("h", OWN): 16, ("g", OWN): 16}


def test_computed_again_keeps_what_enters_a_block() -> None:
    run = profile_by_unit(View(CHAIN), NAMES, GRADIENTS, {"blocks.0", "blocks.1"})
    assert run.kept == 32.0  # g enters blocks.1, and the loss keeps nothing; x is the batch's
    assert run.gradients == 512.0
    assert max(moment.values for moment in run.first) <= 96 + 3 * 32


@pytest.mark.parametrize(("classes", "values"), [(1.0, 3 * 32), (0.5, 16)])
def test_split_classes_write_their_gradient_over_the_softmax(classes: float, values: float) -> None:
    loss = operation(
        "loss", "aten.cross_entropy_loss.default", "y", saved=((INSIDE, 32.0),), shape=()
    )
    graph = OperationGraph((weight("w"), operation("y", LINEAR, "w"), loss))
    view = View(graph).held_by(lambda name: classes if name == "y" else 1.0)
    run = profile_forward_backward(view, ["y", "loss"], {})
    # The softmax, its gradient, that of the logits; or all of them in one.
    assert max(moment.values for moment in run.first) == values


def test_what_autocast_halves() -> None:
    added = operation("a", "aten.add.Tensor", "y", "x2")
    graph = OperationGraph(
        (
            *CHAIN.operations[:-2],
            weight("e"),
            operation("x2", "aten.embedding.default", "e"),
            added,
            operation("b", "aten.add.Tensor", "y", "h"),
            operation("loss", "aten.cross_entropy_loss.default", "b", shape=()),
        )
    )
    # A sum with what is fp32 is fp32, and so is a loss.
    assert halves(graph) == {"h", "v", "g", "y", "b"}
    view = View.at(graph, "bf16")
    # x is kept as the product's copy of it.
    assert sum(kept(view, ["h", "v", "g", "y"]).values()) == 3 * 16


def test_a_norm_that_runs_as_one_keeps_its_input() -> None:
    scale, times = (Size(8),), "aten.mul.Tensor"
    graph = OperationGraph(
        (
            operation("e", "parameter", shape=WEIGHT),
            operation("x", "aten.embedding.default", "e"),
            operation("r", "aten.rsqrt.default", "x", shape=(Size(0, 1), Size(1))),
            operation("normed", times, "x", "r", saved=((0, 32.0), (1, 4.0))),
            operation("w", "parameter", shape=scale),
            operation("y", times, "w", "normed", saved=((1, 32.0),)),
            operation("loss", "aten.sum.default", "y", shape=()),
        )
    )
    norm = Rewrite("rms_norm", ("square", "mean", "shifted", "r", "normed", "y"))
    assert sum(kept(View(graph), ["normed", "y"]).values()) == 32 + 4 + 32
    assert sum(kept(View(graph).rewritten([norm]), ["normed", "y"]).values()) == 32 + 4


def of_modules(*modules: str) -> list[Operation]:
    return [Operation(f"v{i}", "aten.relu.default", module=x) for i, x in enumerate(modules)]


def test_blocks_are_the_innermost_entries_that_have_modules() -> None:
    model = of_modules("embed", "h.0.norm", "h.0.mlp.0", "h.0.mlp.2", "h.1.norm", "head")
    assert blocks_of(model) == ("h.0", "h.1")  # the layers of a Sequential are no blocks
    assert blocks_of(of_modules("stages.0.layers.1.conv")) == ("stages.0.layers.1",)
    assert blocks_of(of_modules("h.0", "h.0", "h.1", "h.1")) == ("h.0", "h.1")
    assert blocks_of(of_modules("0", "1", "2")) == ()


def test_a_module_is_part_of_the_outermost_unit() -> None:
    units = {"h.1", "h.1.mlp", "head"}
    paths = ("h.1", "h.1.mlp.0", "h.10.mlp", "head", "h", "")
    assert [unit_of(path, units) for path in paths] == ["h.1", "h.1", "", "head", "", ""]
