"""The torch-free operation graph: extents that follow the batch, who reads whom, what is tied."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import examples
from tests.unit.operation_graphs import Sketch, bert, classifier, gpt, shape_of

from whale_train.strategies.graph.operation_graph import (
    ModelProfile,
    Operation,
    OperationGraph,
    Parameter,
    Ref,
    Size,
)


@pytest.mark.parametrize(
    ("size", "at_1", "at_5", "text"),
    [
        (Size(7), 7, 7, "7"),
        (Size(0, 1), 1, 5, "batch"),
        (Size(0, 12), 12, 60, "12*batch"),
        (Size(1, 1), 2, 6, "batch+1"),
        (Size(4, 3), 7, 19, "3*batch+4"),
    ],
)
def test_sizes(size: Size, at_1: int, at_5: int, text: str) -> None:
    assert (size.at(1), size.at(5), str(size)) == (at_1, at_5, text)


def test_sizes_are_equal_only_for_every_batch() -> None:
    assert Size(3) != Size(0, 3)
    assert shape_of("B 3 12B") == (Size(0, 1), Size(3), Size(0, 12))


def test_inputs_are_the_values_read_in_order_once_each() -> None:
    operation = Operation(
        "x",
        "aten.cat.default",
        args=((Ref("b"), (Ref("a"), 3)), Ref("b"), "a string", None, 2.5),
        kwargs=(("out", Ref("c")), ("dim", 1), ("others", (Ref("a"), Ref("d")))),
    )
    assert operation.inputs == ("b", "a", "c", "d")


def test_users_and_lookup() -> None:
    graph = gpt(tied=True).graph
    assert graph is not None
    assert graph.users["lm_head_weight"] == ("embedding", "logits")
    assert graph.users["token_weight"] == ()
    assert graph.users["loss"] == ("output",)
    assert graph["logits"].module == "lm_head"
    assert [op.name for op in graph][:2] == ["token_weight", "block_weight"]


def test_ancestors_and_descendants_by_hand() -> None:
    graph = classifier().graph
    assert graph is not None
    assert graph.ancestors({"hidden"}) == {"hidden", "features", "trunk_weight", "trunk_bias"}
    assert graph.ancestors({"counted"}) == {"counted", "norm_num_batches_tracked"}
    assert graph.ancestors(set()) == set()
    assert graph.descendants({"labels"}) == {"labels", "loss", "output"}
    assert graph.descendants({"counted", "head_bias"}) == {
        "counted", "head_bias", "logits", "float", "loss", "output",
    }  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn) -> OperationGraph:
    """Any acyclic graph: each operation reads some of those before it."""
    operations: list[Operation] = []
    for number in range(draw(st.integers(1, 9))):
        earlier = [op.name for op in operations]
        read = draw(st.lists(st.sampled_from(earlier), max_size=3)) if earlier else []
        operations.append(Operation(f"n{number}", "aten.any", tuple(Ref(name) for name in read)))
    return OperationGraph(tuple(operations))


@settings(max_examples=examples(50))
@given(graphs(), st.data())
def test_ancestors_and_descendants_are_reachability(
    graph: OperationGraph, data: st.DataObject
) -> None:
    """Against walking the edges one at a time until nothing is added."""
    names = [op.name for op in graph]
    start = data.draw(st.sets(st.sampled_from(names)))
    edges = [(name, op.name) for op in graph for name in op.inputs]

    def closure(pairs: list[tuple[str, str]]) -> set[str]:
        found = set(start)
        while added := {after for before, after in pairs if before in found} - found:
            found |= added
        return found

    assert graph.descendants(start) == closure(edges)
    assert graph.ancestors(start) == closure([(after, before) for before, after in edges])
    assert all(user in graph.users[name] for name, user in edges)
    assert sum(map(len, graph.users.values())) == len(set(edges))


def test_a_tied_parameter_has_every_name_and_counts_once() -> None:
    profile = bert()
    assert [p.path for p in profile.parameters] == [
        "embeddings.weight", "transform.weight", "transform.bias", "decoder.bias",
    ]  # fmt: skip
    assert profile.parameter_by_path["decoder.weight"].path == "embeddings.weight"
    # 12 x 4 once, 4 x 4, 4, 12
    assert profile.parameter_elements == 48 + 16 + 4 + 12


def test_elements() -> None:
    assert Parameter("scale", ()).elements == 1
    assert Parameter("weight", (3, 5, 7)).elements == 105
    assert Parameter("empty", (3, 0)).elements == 0
    assert ModelProfile("none", (), (), 0.0, 0.0).parameter_elements == 0


def test_reading_a_value_that_is_not_there_is_our_bug() -> None:
    sketch = Sketch()
    sketch.operations.append(Operation("x", "aten.neg.default", (Ref("missing"),)))
    with pytest.raises(KeyError, match="missing"):
        _ = sketch.graph("x").users
