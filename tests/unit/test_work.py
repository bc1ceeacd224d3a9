"""What operations ask of a device, counted by hand on a graph of a few."""

from tests.unit.operation_graphs import Sketch, classifier, gpt

from whale_train.strategies.cost.op_cost import part_of
from whale_train.strategies.cost.op_work import KernelKind, Traffic, Work, Works
from whale_train.strategies.graph.operation_graph import OperationGraph
from whale_train.strategies.layouts.propagation import BATCH, Assignment, Layout, R, Shard
from whale_train.strategies.layouts.types import Cast

# [B, 3] numbers of a table [10, 4]; the rows, once through a product [8, 4], once added to what
# came of it transposed and back.
F32 = 4.0

CLASSES = "classes"


def sketched() -> OperationGraph:
    sketch = Sketch()
    sketch.input("numbers", "B 3")
    sketch.parameter("table.weight", "10 4")
    sketch.parameter("up.weight", "8 4")
    sketch.call("rows", "embedding.default", "table_weight", "numbers", shape="B 3 4")
    sketch.call("up", "linear.default", "rows", "up_weight", shape="B 3 8", flops=192.0)
    sketch.call("half", "slice.Tensor", "up", 2, 0, 4, shape="B 3 4")
    sketch.call("turned", "transpose.int", "half", 1, 2, shape="B 4 3")
    sketch.call("flat", "reshape.default", "turned", (0, 12), shape="B 12")
    sketch.call("sum", "add.Tensor", "rows", "half", shape="B 3 4")
    return sketch.graph("sum")


def only(graph: OperationGraph, name: str) -> list[tuple[Work, int]]:
    return list(Works(graph).of([name]).items())


def test_a_lookup_reads_rows_and_gives_a_gradient_of_the_whole_table() -> None:
    work = Work(
        KernelKind.LOOKUP,
        0.0,
        Traffic(0, 2 * 12 * F32),
        Traffic(40 * F32, 2 * 12 * F32),
        False,
        True,
    )
    # Two operations read the rows: their gradients are added.
    added = Work(KernelKind.POINTWISE, 0.0, Traffic(), Traffic(0, 3 * 12 * F32), True, False)
    assert only(sketched(), "rows") == [(work, 1), (added, 1)]


def test_a_product_moves_its_factors_and_its_result() -> None:
    moved = Traffic(32 * F32, (12 + 24) * F32)
    assert only(sketched(), "up") == [(Work(KernelKind.PRODUCT, 192.0, moved, None, True, True), 1)]


def test_a_recurrent_layer_is_its_products() -> None:
    """Three steps of [B, 3, 4] into hidden states of 5, four gates each."""
    sketch = Sketch()
    sketch.input("x", "B 3 4", "float32")
    sketch.parameter("cell.weight_ih", "20 4")
    sketch.parameter("cell.weight_hh", "20 5")
    sketch.call("start", "zeros.default", shape="1 B 5")
    weights, flops = ("cell_weight_ih", "cell_weight_hh"), 2.0 * 3 * 20 * (4 + 5)
    arguments = ("x", ("start", "start"), weights, False, 1, 0.0, True, False, True)
    sketch.call("lstm", "lstm.input", *arguments, shape=None, flops=flops)
    sketch.call("made", "getitem", "lstm", 0, shape="B 3 5")
    moved = Traffic(20 * (4 + 5) * F32, (3 * 4 + 5) * F32)
    # What it is given has no gradient; what it made of the step before has one.
    work = Work(KernelKind.PRODUCT, flops, moved, None, True, True)
    assert only(sketch.graph("made"), "lstm") == [(work, 1)]


def test_a_bias_gets_a_sum_of_gradients() -> None:
    """[B, 3, 4] through a product [8, 4] with a bias: of [B, 3, 8] gradients, all read."""
    sketch = Sketch()
    sketch.input("x", "B 3 4", "float32")
    sketch.parameter("up.weight", "8 4")
    sketch.parameter("up.bias", "8")
    sketch.call("up", "linear.default", "x", "up_weight", "up_bias", shape="B 3 8", flops=192.0)
    product, summed = only(sketch.graph("up"), "up")
    assert product[0].kind is KernelKind.PRODUCT
    moved = Traffic(0, 24 * F32)
    assert summed == (Work(KernelKind.SUM, 0.0, Traffic(), moved, False, True), 1)
    # Of a rank with a quarter of the columns.
    parts = {"up": 0.25, "up_weight": 0.25, "up_bias": 0.25}
    found = Works(sketch.graph("up")).of(["up"], lambda name, reader: parts.get(name, 1.0))
    assert Work(KernelKind.SUM, 0.0, Traffic(), Traffic(0, 6 * F32), False, True) in found


def test_what_is_gathered_on_its_way_is_read_whole() -> None:
    """A split head: samples lie in halves, the product reads all of them for 3 of 4 columns."""
    sketch = Sketch()
    sketch.input("x", "B 3 4", "float32")
    sketch.parameter("up.weight", "8 4")
    sketch.call("up", "linear.default", "x", "up_weight", shape="B 3 8", flops=192.0)
    columns, halves = Shard(2, CLASSES), Shard(0, BATCH)
    layouts: dict[str, Layout] = {"x": halves, "up_weight": Shard(0, CLASSES), "up": columns}
    casts = (Cast("up", "x", "gather_enter", halves, R),)
    axes = {BATCH: ((0, 1), (1, 2)), CLASSES: ((0, 6), (6, 8))}
    part = part_of(Assignment(layouts, casts, {}, ()), axes, 0)
    (product,) = Works(sketch.graph("up")).of(["up"], part)
    assert product.flops == 192 * 3 / 4
    assert product.forward == Traffic(3 / 4 * 32 * F32, (12 + 3 / 4 * 24) * F32)


def test_a_part_moves_in_the_backward_only() -> None:
    half, *_ = only(sketched(), "half")
    # The whole's gradient is written, and read what there is of it.
    put = Traffic(0, (24 + 12) * F32)
    assert half == (Work(KernelKind.COPY, 0.0, Traffic(), put, True, False), 1)
    turned = Work(KernelKind.VIEW, 0.0, Traffic(), Traffic(), True, False)
    assert only(sketched(), "turned") == [(turned, 1)]


def test_the_parts_of_a_split_are_joined_once() -> None:
    """[B, 3, 8] in two: the gradients of both are read, that of the whole is written."""
    sketch = Sketch()
    sketch.input("x", "B 3 4", "float32")
    sketch.parameter("up.weight", "8 4")
    sketch.call("up", "linear.default", "x", "up_weight", shape="B 3 8", flops=192.0)
    sketch.call("parts", "split.Tensor", "up", 4, 2, shape=None)
    sketch.call("first", "getitem", "parts", 0, shape="B 3 4")
    joined = Work(KernelKind.COPY, 0.0, Traffic(), Traffic(0, 2 * 24 * F32), True, False)
    assert only(sketch.graph("first"), "parts") == [(joined, 1)]
    shown = Work(KernelKind.VIEW, 0.0, Traffic(), Traffic(), True, False)
    assert only(sketch.graph("first"), "first") == [(shown, 1)]


def test_what_a_transpose_parted_is_copied_when_joined() -> None:
    copied = Work(KernelKind.COPY, 0.0, Traffic(0, 2 * 12 * F32), None, True, False)
    assert only(sketched(), "flat") == [(copied, 1)]


def test_a_sum_hands_its_gradient_through() -> None:
    added = Work(KernelKind.POINTWISE, 0.0, Traffic(0, 3 * 12 * F32), Traffic(), True, False)
    assert only(sketched(), "sum") == [(added, 1)]


def test_a_rank_has_a_part() -> None:
    parts = {"up": 0.5, "up_weight": 0.5}
    found = Works(sketched()).of(["up"], lambda name, reader: parts.get(name, 1.0))
    moved = Traffic(16 * F32, (12 + 12) * F32)
    assert list(found) == [Work(KernelKind.PRODUCT, 96.0, moved, None, True, True)]


def test_all_flops_are_somebodys() -> None:
    for profile in (classifier(), gpt(tied=True)):
        assert profile.graph is not None
        works = Works(profile.graph).of(profile.graph.by_name)
        flops = sum(work.flops * count for work, count in works.items())
        assert flops == sum(operation.flops for operation in profile.graph)
