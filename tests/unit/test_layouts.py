"""Each rule of the layout table: what it accepts and what it gives."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import END, Sketch, one_operation

from whale_train.strategies.graph.operation_graph import OperationGraph, Ref
from whale_train.strategies.layouts import rule_table as layout_rules
from whale_train.strategies.layouts.propagation import (
    BATCH,
    ENTERED,
    RULES,
    Assignment,
    Layout,
    P,
    R,
    RuleResult,
    Shard,
    assign,
    cast_kind,
)

S0, S1, S2 = (Shard(dim, "classes") for dim in range(3))
S0x3 = Shard(0, "classes", 3)
SAMPLES = Shard(0, BATCH)


def trained(graph: OperationGraph) -> OperationGraph:
    """With every floating-point input made from a parameter, so that it has a gradient."""
    operations = []
    for op in graph:
        if op.target == "input" and op.dtype.startswith("float"):
            source = replace(op, name=f"of_{op.name}", target="parameter", path=op.name)
            operations += [source, replace(op, target="made", args=(Ref(source.name),))]
        else:
            operations.append(op)
    return OperationGraph(tuple(operations))


def typed(graph: OperationGraph, layouts: Mapping[str, Layout]) -> Assignment:
    return assign(trained(graph), {"result"}, layouts)


def kinds(assignment: Assignment) -> dict[str, str]:
    return {cast.value: cast.kind for cast in assignment.casts}


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (R, ENTERED, "enter"),
        (P, R, "reduce"),
        (S1, R, "gather"),
        (R, S1, "slice"),
        (SAMPLES, ENTERED, "gather_enter"),
        (P, SAMPLES, "reduce_scatter"),
        (R, P, "once"),
        (P, ENTERED, "reduce_enter"),
        (S0, S1, "reshard"),
        (S0, P, "gather_once"),
        (ENTERED, R, "repeated"),
        (ENTERED, S0, "repeated_slice"),
        (ENTERED, P, "repeated_once"),
    ],
)
def test_the_casts(source: Layout, target: Layout, kind: str) -> None:
    assert cast_kind(source, target) == kind


@pytest.mark.parametrize(("source", "target"), [(R, R), (P, P)])
def test_what_no_collective_does_is_our_bug(source: Layout, target: Layout) -> None:
    with pytest.raises(AssertionError, match="no cast from"):
        cast_kind(source, target)


# target, arguments, their shapes, result's shape; layouts in; layout out, and the casts.
# fmt: off
LINEAR = ("linear.default", ("x", "w", "b"), {"x": "B 3 4", "w": "12 4", "b": "12"}, "B 3 12")
NO_BIAS = ("linear.default", ("x", "w"), {"x": "B 4", "w": "12 4"}, "B 12")
ADDMM = ("addmm.default", ("b", "x", "w"), {"b": "12", "x": "B 4", "w": "4 12"}, "B 12")
ADDMM_2D = ("addmm.default", ("b", "x", "w"), {"b": "B 12", "x": "B 4", "w": "4 12"}, "B 12")
MATMUL = ("matmul.default", ("x", "w"), {"x": "B 3 4", "w": "4 12"}, "B 3 12")
BATCHED = ("matmul.default", ("x", "w"), {"x": "B 3 4", "w": "B 4 12"}, "B 3 12")
MM = ("mm.default", ("x", "w"), {"x": "B 4", "w": "4 12"}, "B 12")
LOOKUP = ("embedding.default", ("w", "x", 0), {"w": "12 4", "x": "B 3"}, "B 3 4")
SCALED = ("embedding.default", ("w", "x", -1, True), {"w": "12 4", "x": "B 3"}, "B 3 4")
ADD = ("add.Tensor", ("x", "y"), {"x": "B 3 12", "y": "B 3 12"}, "B 3 12")
LOW = ("add.Tensor", ("x", "y"), {"x": "B 3 12", "y": "12"}, "B 3 12")
ONE = ("mul.Tensor", ("x", "y"), {"x": "B 3 12", "y": "B 3 1"}, "B 3 12")
SCALAR = ("mul.Tensor", ("x", "y"), {"x": "B 12", "y": ""}, "B 12")
CONSTANT = ("div.Tensor", ("x", 2.0), {"x": "B 12"}, "B 12")
NUMBER = ("mul.Tensor", ("x", "y"), {"x": "B 12", "y": None}, "B 12")
TYPE_AS = ("type_as.default", ("x", "y"), {"x": "B 12", "y": "B 3 7"}, "B 12")
AS_SHARD = ("type_as.default", ("y", "x"), {"x": "B 12", "y": ""}, "")
CROSS = ("sub.Tensor", ("x", "y"), {"x": "12 1", "y": "1 12"}, "12 12")
MERGED = ("flatten.using_ints", ("x", 0, 1), {"x": "B 3 12"}, "3B 12")
LAST_MERGED = ("view.default", ("x", (-1, 36)), {"x": "B 3 12"}, "B 36")
TAIL_SPLIT = ("view.default", ("x", (-1, 12, 2, 2)), {"x": "B 12 4"}, "B 12 2 2")
UNFLATTENED = ("unflatten.int", ("x", 0, (3, -1)), {"x": "3B 12"}, "3 B 12")
TURNED = ("view.default", ("x", (1, 12, -1)), {"x": "B 12"}, "1 12 B")
TWIN = ("reshape.default", ("x", (3, 12, 3)), {"x": "3 3 12"}, "3 12 3")
T = ("t.default", ("x",), {"x": "12 4"}, "4 12")
SWAP = ("transpose.int", ("x", 1, -1), {"x": "B 3 12"}, "B 12 3")
ORDER = ("permute.default", ("x", (2, 0, -2)), {"x": "B 3 12"}, "12 B 3")
PART = ("slice.Tensor", ("x", 1, 1, END), {"x": "B 3 12"}, "B 2 12")
ALL = ("slice.Tensor", ("x", -1, 0, END), {"x": "B 3 12"}, "B 3 12")
CUT_PART = ("slice.Tensor", ("x", -1, 1, END), {"x": "B 3 12"}, "B 3 11")
FIRST = ("select.int", ("x", 1, 0), {"x": "B 3 12"}, "B 12")
LAST = ("select.int", ("x", -1, 0), {"x": "B 3 12"}, "B 3")
NEW = ("unsqueeze.default", ("x", -1), {"x": "3 12"}, "3 12 1")
NEW_FIRST = ("unsqueeze.default", ("x", 0), {"x": "3 12"}, "1 3 12")
SQUARE = ("mul.Tensor", ("x", "x"), {"x": "B 12"}, "B 12")
PLUS = ("add.Tensor", ("x", 1.0), {"x": "B 12"}, "B 12")
SAME_DTYPE = ("to.dtype", ("x", "torch.float32"), {"x": "B 12"}, "B 12")
IDLE = ("dropout.default", ("x", 0.0, True), {"x": "B 12"}, "B 12")
DROPS = ("dropout.default", ("x", 0.5, True), {"x": "B 12"}, "B 12")
STACK = ("stack.default", (("x", "y"), -1), {"x": "B 12", "y": "B 12"}, "B 12 2")
NO_RULE = ("softmax.int", ("x", -1), {"x": "B 12"}, "B 12")

CASES = [
    # A weight cut by rows: SP1. What x is replicated over gets a partial gradient, so it enters.
    (LINEAR, {"x": R, "w": S0, "b": R}, S2, {"x": "enter", "b": "slice"}),
    (LINEAR, {"x": R, "w": S0, "b": S0}, S2, {"x": "enter"}),
    (LINEAR, {"x": SAMPLES, "w": S0x3, "b": R}, Shard(2, "classes", 3),
     {"x": "gather_enter", "b": "slice"}),
    (NO_BIAS, {"x": SAMPLES, "w": S0}, S1, {"x": "gather_enter"}),
    # Cut along what is summed over: SP2. The bias joins the sum on one rank only.
    (NO_BIAS, {"x": R, "w": S1}, P, {"x": "slice"}),
    (NO_BIAS, {"x": S1, "w": S1}, P, {}),
    (LINEAR, {"x": S2, "w": S1, "b": R}, P, {"b": "once"}),
    (LINEAR, {"x": P, "w": S0, "b": S0}, S2, {"x": "reduce_enter"}),
    (LINEAR, {"x": P, "w": S1, "b": R}, P, {"x": "reduce_scatter", "b": "once"}),
    (LINEAR, {"x": S1, "w": R, "b": R}, S1, {"w": "enter", "b": "enter"}),
    (LINEAR, {"x": S2, "w": S0, "b": S0}, S2, {"x": "gather_enter"}),
    (LINEAR, {"x": S2, "w": S1, "b": S0}, R, {"x": "gather", "w": "gather", "b": "gather"}),
    (NO_BIAS, {"x": S1, "w": R}, P, {"w": "slice"}),
    (NO_BIAS, {"x": P, "w": R}, R, {"x": "reduce"}),
    (ADDMM, {"b": R, "x": SAMPLES, "w": S1}, S1, {"b": "slice", "x": "gather_enter"}),
    (ADDMM, {"b": S0, "x": R, "w": S1}, S1, {"x": "enter"}),
    (ADDMM_2D, {"b": S1, "x": R, "w": S1}, S1, {"x": "enter"}),
    (ADDMM, {"b": R, "x": R, "w": S0}, P, {"b": "once", "x": "slice"}),
    (MATMUL, {"x": SAMPLES, "w": S1}, S2, {"x": "gather_enter"}),
    (MATMUL, {"x": R, "w": S0}, P, {"x": "slice"}),
    (BATCHED, {"x": R, "w": S2}, S2, {"x": "enter"}),
    (BATCHED, {"x": R, "w": S1}, P, {"x": "slice"}),
    (MM, {"x": R, "w": S1}, S1, {"x": "enter"}),
    (LOOKUP, {"w": S0, "x": SAMPLES}, P, {"x": "gather"}),
    (LOOKUP, {"w": S0, "x": R}, P, {}),
    (LOOKUP, {"w": S1, "x": R}, S2, {}),
    (LOOKUP, {"w": S0x3, "x": R}, R, {"w": "gather"}),
    (LOOKUP, {"w": R, "x": SAMPLES}, R, {"x": "gather"}),
    (SCALED, {"w": S0, "x": R}, R, {"w": "gather"}),
    # Pointwise
    (ADD, {"x": S2, "y": S2}, S2, {}),
    (ADD, {"x": S2, "y": R}, S2, {"y": "slice"}),
    (ADD, {"x": R, "y": SAMPLES}, SAMPLES, {"x": "slice"}),
    (ADD, {"x": S2, "y": SAMPLES}, R, {"x": "gather", "y": "gather"}),
    (ADD, {"x": S2, "y": P}, S2, {"y": "reduce_scatter"}),
    (ADD, {"x": P, "y": P}, P, {}),
    (ADD, {"x": P, "y": R}, R, {"x": "reduce"}),
    (LOW, {"x": P, "y": P}, P, {}),
    (LOW, {"x": R, "y": P}, R, {"y": "reduce"}),
    (SQUARE, {"x": P}, R, {"x": "reduce"}),
    (ONE, {"x": P, "y": R}, P, {"y": "enter"}),
    (ONE, {"x": R, "y": P}, R, {"y": "reduce"}),
    (CONSTANT, {"x": P}, P, {}),
    (PLUS, {"x": P}, R, {"x": "reduce"}),
    (SAME_DTYPE, {"x": P}, P, {}),
    (IDLE, {"x": P}, P, {}),
    (DROPS, {"x": P}, R, {"x": "reduce"}),
    (LOW, {"x": S2, "y": S0}, S2, {}),
    (LOW, {"x": SAMPLES, "y": R}, SAMPLES, {"y": "enter"}),
    (LOW, {"x": R, "y": S0}, S2, {"x": "slice"}),
    (ONE, {"x": S2, "y": R}, S2, {"y": "enter"}),
    (SCALAR, {"x": S1, "y": R}, S1, {"y": "enter"}),
    (CONSTANT, {"x": S1}, S1, {}),
    (NUMBER, {"x": S1, "y": R}, S1, {}),
    (TYPE_AS, {"x": S1, "y": R}, S1, {}),
    (AS_SHARD, {"x": S1, "y": R}, R, {}),
    (CROSS, {"x": S0, "y": S1}, R, {"x": "gather", "y": "gather"}),
    # Views
    (MERGED, {"x": S2}, S1, {}),
    (MERGED, {"x": SAMPLES}, R, {"x": "gather"}),
    (LAST_MERGED, {"x": SAMPLES}, SAMPLES, {}),
    (LAST_MERGED, {"x": S2}, Shard(1, "classes", 3), {}),
    (TAIL_SPLIT, {"x": S1}, S1, {}),
    (UNFLATTENED, {"x": S1}, S2, {}),
    (TURNED, {"x": S1}, R, {"x": "gather"}),  # what comes before it is not the batch
    (TWIN, {"x": S1}, R, {"x": "gather"}),  # a 3 comes out last, but is not the one cut
    (TWIN, {"x": S0}, S0, {}),
    (T, {"x": S0}, S1, {}),
    (T, {"x": S0x3}, Shard(1, "classes", 3), {}),
    (SWAP, {"x": S1}, S2, {}),
    (SWAP, {"x": SAMPLES}, SAMPLES, {}),
    (ORDER, {"x": S2}, S0, {}),
    (ORDER, {"x": SAMPLES}, Shard(1, BATCH), {}),
    (PART, {"x": S2}, S2, {}),
    (PART, {"x": S1}, R, {"x": "gather"}),
    (ALL, {"x": S2}, S2, {}),
    (CUT_PART, {"x": S2}, R, {"x": "gather"}),
    (FIRST, {"x": S2}, S1, {}),
    (FIRST, {"x": SAMPLES}, SAMPLES, {}),
    (LAST, {"x": S2}, R, {"x": "gather"}),
    (NEW, {"x": S1}, S1, {}),
    (NEW_FIRST, {"x": S1}, S2, {}),
    (NEW_FIRST, {"x": S0}, S1, {}),
    *((case, {"x": P}, P, {}) for case in (MERGED, T, ORDER, PART, FIRST, NEW)),
    (STACK, {"x": S1, "y": R}, S1, {"y": "slice"}),
    (STACK, {"x": S1, "y": P}, S1, {"y": "reduce_scatter"}),
    (STACK, {"x": S1, "y": SAMPLES}, R, {"x": "gather", "y": "gather"}),
    (STACK, {"x": P, "y": P}, P, {}),
    (STACK, {"x": P, "y": R}, R, {"x": "reduce"}),
    (NO_RULE, {"x": S1}, R, {"x": "gather"}),
    (NO_RULE, {"x": P}, R, {"x": "reduce"}),
]
# fmt: on


@pytest.mark.parametrize(("operation", "layouts", "gives", "casts"), CASES)
def test_each_rule(
    operation: tuple[Any, ...],
    layouts: dict[str, Layout],
    gives: Layout,
    casts: dict[str, str],
) -> None:
    assignment = typed(one_operation(*operation), layouts)
    assert assignment.layouts["result"] == gives
    assert kinds(assignment) == casts
    for cast in assignment.casts:
        assert cast.user == "result"
        assert cast.source == layouts[cast.value]


@pytest.mark.parametrize("operation", [LINEAR, LOOKUP, ADD, MERGED, T, ORDER, PART, FIRST, NEW])
def test_whole_values_stay_whole(operation: tuple[Any, ...]) -> None:
    assignment = typed(one_operation(*operation), {})
    assert assignment == Assignment({"result": R}, (), {}, ())


POINTWISE = [
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "tanh.default",
    "to.dtype", "to.dtype_layout", "_to_copy.default", "type_as.default", "float.default",
    "contiguous.default", "clone.default", "alias.default", "clamp.default", "relu.default",
]  # fmt: skip
VIEWS = ["view.default", "reshape.default", "_unsafe_view.default"]


@pytest.mark.parametrize("target", POINTWISE)
def test_pointwise_operations_keep_the_cut(target: str) -> None:
    graph = one_operation(target, ("x",), {"x": "B 3 12"}, "B 3 12")
    for layout in (S2, SAMPLES, Shard(2, "classes", 3)):
        assert typed(graph, {"x": layout}) == Assignment(
            {"x": layout, "result": layout}, (), {}, ()
        )


@pytest.mark.parametrize("target", VIEWS)
def test_views_keep_the_cut(target: str) -> None:
    graph = one_operation(target, ("x", (-1, 12)), {"x": "B 3 12"}, "3B 12")
    assert typed(graph, {"x": S2}).layouts["result"] == S1


def entropy(
    *args: Any, shape: str = "B 12", target: str = "B", dtype: str = "int64", **kwargs: Any
) -> OperationGraph:
    shapes = {"x": shape, "y": target, "weights": "12"}
    dtypes = {"y": dtype}
    operation = ("cross_entropy_loss.default", ("x", "y", *args), shapes, "")
    return one_operation(*operation, dtypes, kwargs)


@pytest.mark.parametrize(
    "graph",
    [
        entropy(),
        entropy(None, 1, -100, 0.1),
        entropy(None, 1, 0),
        entropy(reduction=1, ignore_index=-1),
        entropy(weight=None, label_smoothing=0.5),
        entropy(None, 2),  # a sum
    ],
)
def test_a_plain_cross_entropy_is_computed_on_shards(graph: OperationGraph) -> None:
    assignment = typed(graph, {"x": S1, "y": SAMPLES})
    assert assignment.becomes == {"result": "split_cross_entropy"}
    assert kinds(assignment) == {"y": "gather"}
    assert assignment.layouts["result"] == R
    assert assignment.gathered == ()


@pytest.mark.parametrize(
    ("graph", "layout"),
    [
        (entropy(), SAMPLES),  # not cut by classes
        (entropy(), Shard(1, "classes", 3)),
        (entropy("weights"), S1),
        (entropy(weight="weights"), S1),
        (entropy(None, 0), S1),  # no reduction
        (entropy(shape="B 12 3", target="B 3"), S1),  # classes are not the last dimension
        (entropy(target="B 12", dtype="float32"), S1),  # probabilities
    ],
)
def test_any_other_cross_entropy_is_given_whole_logits(
    graph: OperationGraph, layout: Layout
) -> None:
    assignment = typed(graph, {"x": layout, "y": R})
    assert assignment.becomes == {}
    assert kinds(assignment) == {"x": "gather"}
    assert assignment.gathered == (() if layout == SAMPLES else ("result",))


def test_only_an_embedding_cut_by_rows_becomes_a_split_one() -> None:
    graph = one_operation(*LOOKUP)
    assert typed(graph, {"w": S0}).becomes == {"result": "split_embedding"}
    assert typed(graph, {"w": S1}).becomes == {}


def test_what_lacks_a_rule_is_reported_unless_it_only_brings_samples_together() -> None:
    graph = one_operation(*NO_RULE)
    assert typed(graph, {"x": S1}).gathered == ("result",)
    assert typed(graph, {"x": SAMPLES}).gathered == ()


def test_results_are_cast_for_whoever_takes_them() -> None:
    graph = one_operation(*LOOKUP)
    assignment = assign(graph, ["result"], {"w": S0}, {"result": SAMPLES})
    (cast,) = assignment.casts
    assert (cast.user, cast.value, cast.kind) == ("", "result", "reduce_scatter")
    assert (cast.source, cast.target) == (P, SAMPLES)
    assert assign(graph, ["result"], {}, {"result": R}).casts == ()


def test_a_parameter_added_to_a_sum_joins_it_on_one_rank() -> None:
    sketch = Sketch()
    sketch.parameter("bias", "12")
    sketch.input("x", "B 12", "float32")
    sketch.call("result", "add.Tensor", "x", "bias", shape="B 12")
    assignment = assign(sketch.graph("result"), {"result"}, {"x": P})
    assert (assignment.layouts["result"], kinds(assignment)) == (P, {"bias": "once"})


def test_what_has_no_gradient_need_not_enter() -> None:
    assignment = assign(one_operation(*NO_BIAS), {"result"}, {"w": S0})
    assert (assignment.layouts["result"], assignment.casts) == (S1, ())


@pytest.mark.parametrize(
    ("operation", "layout", "whose"),
    [
        (DROPS, R, "shared"),
        (DROPS, S1, "own"),
        (NO_RULE, S1, "shared"),  # it is gathered first
    ],
)
def test_what_draws_random_numbers_is_marked(
    operation: tuple[Any, ...], layout: Layout, whose: str
) -> None:
    graph = one_operation(*operation)
    assert typed(graph, {"x": layout}).random == {}
    drawn = OperationGraph(tuple(replace(op, random=op.name == "result") for op in graph))
    assert typed(drawn, {"x": layout}).random == {"result": whose}


def test_a_value_changed_in_place_is_read_as_it_is_then() -> None:
    sketch = Sketch()
    sketch.input("x", "B 12", "float32")
    sketch.input("y", "B 12", "float32")
    sketch.call("changed", "add_.Tensor", "x", "y", shape="B 12")
    sketch.call("result", "neg.default", "x", shape="B 12")
    assignment = assign(sketch.graph("result"), ["changed", "result"], {"y": S1})
    assert kinds(assignment) == {"x": "slice"}
    assert assignment.layouts["result"] == S1


def test_a_rule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_train.strategies.layouts.rule_table.RULES", dict(RULES))
    rules = layout_rules.RULES
    monkeypatch.setattr("whale_train.strategies.layouts.propagation.RULES", rules)
    layout_rules.register_rule("mine.twice.default", lambda typed: RuleResult({}, typed.only))
    sketch = Sketch()
    sketch.input("x", "B 12", "float32")
    sketch.call("result", "neg.default", "x", shape="B 12")
    (x, result, output) = sketch.graph("result")
    graph = OperationGraph((x, replace(result, target="mine.twice.default"), output))
    assert assign(graph, {"result"}, {"x": S1}).layouts["result"] == S1
    with pytest.raises(ValueError, match=r"aten\.relu\.default has a layout rule"):
        layout_rules.register_rule("aten.relu.default", lambda typed: None)


def test_only_the_region_is_typed() -> None:
    sketch = Sketch()
    sketch.input("x", "B 12", "float32")
    sketch.call("outside", "neg.default", "x", shape="B 12")
    sketch.call("inside", "neg.default", "outside", shape="B 12")
    assignment = assign(sketch.graph("inside"), {"inside"}, {"outside": S1})
    assert assignment.layouts == {"outside": S1, "inside": S1}
