"""The search for weight patterns, on small graphs whose best answer is known by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import END, Sketch

from whale_train.errors import PlanError
from whale_train.strategies.graph.operation_graph import OperationGraph
from whale_train.strategies.layouts.propagation import Layout, P, R, Shard
from whale_train.strategies.layouts.shape_check import shape_check
from whale_train.strategies.schedule.apportion import tile
from whale_train.strategies.tensor_parallel.choose import Sharded, choose_patterns

HEADS, WIDTH, INNER, CLASSES = 4, 16, 48, 40


def block(s: Sketch, x: str, path: str, *, grouped: int = HEADS) -> str:
    """Attention with `grouped` heads of keys and values, and a gated MLP, each with a residual."""
    kv = WIDTH * grouped // HEADS
    shapes = {
        "q": f"{WIDTH} {WIDTH}", "k": f"{kv} {WIDTH}", "v": f"{kv} {WIDTH}",
        "o": f"{WIDTH} {WIDTH}", "gate": f"{INNER} {WIDTH}", "up": f"{INNER} {WIDTH}",
        "down": f"{WIDTH} {INNER}",
    }  # fmt: skip
    name = path.replace(".", "_")
    weights = {key: s.parameter(f"{path}.{key}.weight", shape) for key, shape in shapes.items()}
    s.parameter(f"{path}.norm.weight", f"{WIDTH}")
    s.parameter(f"{path}.norm2.weight", f"{WIDTH}")

    def call(key: str, target: str, *args: object, shape: str) -> str:
        return s.call(f"{name}_{key}", target, *args, shape=shape)

    hidden = f"B 3 {WIDTH}"
    normed = call("n1", "layer_norm.default", x, (WIDTH,), f"{name}_norm_weight", shape=hidden)
    parts = {}
    for key, heads in (("q", HEADS), ("k", grouped), ("v", grouped)):
        flat = call(f"{key}l", "linear.default", normed, weights[key], shape=f"B 3 {4 * heads}")
        seen = call(f"{key}v", "view.default", flat, (-1, 3, heads, 4), shape=f"B 3 {heads} 4")
        parts[key] = call(f"{key}t", "transpose.int", seen, 1, 2, shape=f"B {heads} 3 4")
    for key in ("k", "v") if grouped != HEADS else ():
        parts[key] = call(
            f"{key}r", "repeat_interleave.self_int", parts[key], HEADS // grouped, 1,
            shape=f"B {HEADS} 3 4",
        )  # fmt: skip
    mixed = call(
        "a", "scaled_dot_product_attention.default", parts["q"], parts["k"], parts["v"],
        shape=f"B {HEADS} 3 4",
    )  # fmt: skip
    back = call("at", "transpose.int", mixed, 1, 2, shape=f"B 3 {HEADS} 4")
    merged = call("av", "reshape.default", back, (-1, 3, WIDTH), shape=hidden)
    out = call("o", "linear.default", merged, weights["o"], shape=hidden)
    x = call("r1", "add.Tensor", x, out, shape=hidden)
    normed = call("n2", "layer_norm.default", x, (WIDTH,), f"{name}_norm2_weight", shape=hidden)
    gate = call("g", "linear.default", normed, weights["gate"], shape=f"B 3 {INNER}")
    gate = call("gs", "silu.default", gate, shape=f"B 3 {INNER}")
    up = call("u", "linear.default", normed, weights["up"], shape=f"B 3 {INNER}")
    both = call("gu", "mul.Tensor", gate, up, shape=f"B 3 {INNER}")
    down = call("d", "linear.default", both, weights["down"], shape=hidden)
    return call("r2", "add.Tensor", x, down, shape=hidden)


def decoder(depth: int = 1, tied: bool = False, grouped: int = HEADS) -> OperationGraph:
    s = Sketch()
    s.parameter("token.weight", f"{CLASSES} {WIDTH}")
    if not tied:
        s.parameter("head.weight", f"{CLASSES} {WIDTH}")
    s.parameter("last.weight", f"{WIDTH}")
    s.input("ids", "B 3")
    s.input("labels", "B 3")
    x = s.call("embedded", "embedding.default", "token_weight", "ids", shape=f"B 3 {WIDTH}")
    for number in range(depth):
        x = block(s, x, f"blocks.{number}", grouped=grouped)
    x = s.call("last", "layer_norm.default", x, (WIDTH,), "last_weight", shape=f"B 3 {WIDTH}")
    head = "token_weight" if tied else "head_weight"
    s.call("logits", "linear.default", x, head, shape=f"B 3 {CLASSES}")
    s.call("rows", "view.default", "logits", (-1, CLASSES), shape=f"3B {CLASSES}")
    s.call("targets", "view.default", "labels", (-1,), shape="3B", dtype="int64")
    s.call("loss", "cross_entropy_loss.default", "rows", "targets", shape="")
    return s.graph("loss")


def choose(
    graph: OperationGraph,
    members: int = 2,
    by_hand: tuple[tuple[str, str], ...] = (),
    dim: str = "auto",
    wanted: Mapping[str, Layout] | None = None,
) -> Sharded:
    parameters = {op.name: op.path for op in graph if op.target == "parameter"}
    held = {}
    for op in graph:
        held[op.path] = 1
        for size in op.shape or ():
            held[op.path] *= size.fixed
    found = choose_patterns(
        graph,
        [op.name for op in graph if op.target != "output"],
        parameters=parameters,
        held=held,
        group_size=members,
        given={},
        wanted=wanted or {graph.operations[-1].inputs[0]: R},
        by_hand=by_hand,
        dim=dim,
    )
    axes = {axis: tile(units, shares(units, members)) for axis, units in found.axes.items()}
    assert shape_check(graph, found.assignment, axes) == ()
    return found


def shares(units: int, members: int) -> tuple[int, ...]:
    """As uneven as can be: one unit each, the first has the rest."""
    return (units - members + 1, *(1 for _ in range(members - 1)))


def once(found: Sharded) -> dict[str, int]:
    """Collectives by kind, each value's counted once."""
    counts: dict[str, int] = {}
    for kind, _, _ in {(c.kind, c.value, c.target) for c in found.assignment.casts}:
        counts[kind] = counts.get(kind, 0) + 1
    return counts


BLOCK = {
    "q": "column", "k": "column", "v": "column", "o": "row", "gate": "column", "up": "column",
    "down": "row",
}  # fmt: skip


@pytest.mark.parametrize("depth", [1, 3])
def test_two_sums_a_block_each_way(depth: int) -> None:
    found = choose(decoder(depth))
    for number in range(depth):
        for key, pattern in BLOCK.items():
            assert found.patterns[f"blocks.{number}.{key}.weight"] == pattern
    assert found.patterns["token.weight"] == "column"  # half the bytes of rows, whose sum is two
    assert found.patterns["head.weight"] == "vocabulary"
    assert once(found) == {"gather": 1, "reduce": 2 * depth, "enter": 2 * depth + 1}
    assert found.assignment.becomes == {"loss": "split_cross_entropy"}
    assert found.whole == ()
    assert found.assignment.gathered == ()


def test_weights_of_one_attention_share_an_axis_of_heads() -> None:
    found = choose(decoder())
    q = found.weights["blocks.0.q.weight"]
    assert q == Shard(0, q.axis, 1, (WIDTH,))
    assert found.weights["blocks.0.o.weight"] == Shard(1, q.axis, 1, (WIDTH,))
    assert {found.weights[f"blocks.0.{key}.weight"].axis for key in "kv"} == {q.axis}
    assert found.axes[q.axis] == HEADS
    down = found.weights["blocks.0.down.weight"]
    assert found.axes[down.axis] == INNER
    assert found.axes[found.weights["head.weight"].axis] == CLASSES
    assert found.assignment.layouts["blocks_0_a"] == Shard(1, q.axis, 1, (HEADS,))
    assert found.assignment.layouts["blocks_0_d"] == P


def test_grouped_heads_are_cut_by_group() -> None:
    found = choose(decoder(grouped=2))
    q, k = found.weights["blocks.0.q.weight"], found.weights["blocks.0.k.weight"]
    assert (q.axis, q.pieces, k.pieces) == (k.axis, (WIDTH,), (WIDTH // 2,))
    assert found.axes[q.axis] == 2


def test_fewer_groups_than_members_are_gathered() -> None:
    found = choose(decoder(grouped=2), members=3, by_hand=(("token", "vocabulary"),))
    assert found.axes[found.weights["blocks.0.q.weight"].axis] == HEADS
    gathered = {c.value for c in found.assignment.casts if c.kind == "gather"}
    assert len(gathered) == 2  # keys and values


def test_a_weight_read_twice_has_one_cut() -> None:
    found = choose(decoder(tied=True))
    assert found.patterns["token.weight"] == "vocabulary"
    assert found.weights["token.weight"] == Shard(0, "token.weight", 1, (CLASSES,))
    assert once(found) == {"reduce": 3, "enter": 3}


def fused(parts: tuple[int, ...], by_slices: bool) -> OperationGraph:
    """One weight for parts of these widths, multiplied, and a product after them."""
    s = Sketch()
    s.parameter("fused.weight", f"{sum(parts)} {WIDTH}")
    s.parameter("fused.bias", f"{sum(parts)}")
    s.parameter("after.weight", f"{WIDTH} {parts[0]}")
    s.parameter("after.bias", f"{WIDTH}")
    s.input("x", f"B {WIDTH}", "float32")
    s.call("y", "linear.default", "x", "fused_weight", "fused_bias", shape=f"B {sum(parts)}")
    if not by_slices:
        s.call("parts", "split_with_sizes.default", "y", parts, -1, shape=None)
    names, start = [], 0
    for i, width in enumerate(parts):
        if by_slices:
            end = END if i == len(parts) - 1 else start + width
            names.append(s.call(f"p{i}", "slice.Tensor", "y", 1, start, end, shape=f"B {width}"))
        else:
            names.append(s.call(f"p{i}", "item", "parts", i, shape=f"B {width}"))
        start += width
    product = names[0]
    for i, name in enumerate(names[1:]):
        other = name
        if parts[i + 1] != parts[0]:
            count = parts[0] // parts[i + 1]
            other = s.call(
                f"r{i}", "repeat_interleave.self_int", name, count, 1, shape=f"B {parts[0]}"
            )
        product = s.call(f"m{i}", "mul.Tensor", product, other, shape=f"B {parts[0]}")
    s.call("z", "linear.default", product, "after_weight", "after_bias", shape=f"B {WIDTH}")
    s.call("loss", "mean.default", "z", shape="")
    graph = s.graph("loss")
    getitem = "<built-in function getitem>"
    items = (replace(op, target=getitem) if op.target == "aten.item" else op for op in graph)
    return OperationGraph(tuple(items))


@pytest.mark.parametrize("by_slices", [False, True])
def test_fused_weights_are_found_by_what_takes_them_apart(by_slices: bool) -> None:
    found = choose(fused((24, 24, 24), by_slices))
    laid = Shard(0, "fused.weight", 3, (24,))
    assert found.weights["fused.weight"] == found.weights["fused.bias"] == laid
    assert found.patterns == {"fused.weight": "column", "after.weight": "row"}
    assert once(found) == {"once": 1, "reduce": 1}  # the bias of a sum, and the sum
    unequal = choose(fused((24, 8, 8), by_slices))
    assert unequal.weights["fused.weight"] == Shard(0, "fused.weight", 1, (24, 8, 8))
    assert unequal.axes == {"fused.weight": 8}


def test_patterns_by_hand() -> None:
    by_hand = (("blocks.0.q", "replicate"), ("*.gate", "replicate"), ("*", "replicate"))
    found = choose(decoder(), by_hand=by_hand[:2])
    assert found.patterns["blocks.0.q.weight"] == found.patterns["blocks.0.gate.weight"]
    assert found.patterns["blocks.0.up.weight"] == "column"
    assert found.whole == ("blocks.0.q", "blocks.0.gate")
    assert "blocks.0.q.weight" not in found.weights
    nothing = choose(decoder(), by_hand=by_hand[2:])
    assert (nothing.weights, nothing.assignment.casts) == ({}, ())
    other = choose(decoder(), by_hand=(("blocks.0.down", "column"), ("*.weight", "row")))
    assert other.patterns["blocks.0.down.weight"] == "column"
    assert other.patterns["blocks.0.q.weight"] == "row"


def test_the_first_pattern_that_matches_wins() -> None:
    found = choose(decoder(), by_hand=(("*.up", "replicate"), ("*.up", "row")))
    assert found.patterns["blocks.0.up.weight"] == "replicate"


def test_what_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(PlanError) as error:
        choose(decoder(), by_hand=(("*.q", "experts"), ("*.k", "colum")))
    assert [str(fault) for fault in error.value.faults] == [
        "strategy.graph.split.patterns.*.q=experts cannot be had for blocks.0.q.weight; "
        "use column or row or replicate",
        "strategy.graph.split.patterns.*.k=colum is not a pattern; "
        "use one of: replicate, column, row, vocabulary, experts",
    ]


def test_only_classes_are_cut_if_asked() -> None:
    found = choose(decoder(), dim="vocabulary")
    assert set(found.weights) == {"token.weight", "head.weight"}
    assert once(found) == {"reduce": 1, "enter": 1}
    assert "blocks.0.q" in found.whole


def test_between_the_products_tokens_are_cut_if_asked() -> None:
    found = choose(decoder(), dim="sequence")
    assert once(found) == {"reduce_scatter": 3, "gather_enter": 3, "enter": 3}
    assert found.axes["sequence.3"] == 3
    assert found.assignment.layouts["blocks_0_r1"] == Shard(1, "sequence.3", 1, (3,))


def test_too_few_of_anything_stays_whole() -> None:
    s = Sketch()
    s.parameter("tiny.weight", "2 2")
    s.input("x", "B 2", "float32")
    s.call("y", "linear.default", "x", "tiny_weight", shape="B 2")
    s.call("loss", "mean.default", "y", shape="")
    found = choose(s.graph("loss"), members=3)
    assert (found.weights, found.patterns, found.whole) == ({}, {}, ())


def test_statistics_are_cut_with_their_channels() -> None:
    s = Sketch()
    s.parameter("conv.weight", "8 4 3 3")
    s.parameter("norm.weight", "8")
    s.parameter("norm.bias", "8")
    s.buffer("norm.mean", "8")
    s.buffer("norm.var", "8")
    s.parameter("out.weight", "4 8 1 1")
    s.input("x", "B 4 6 6", "float32")
    s.call("y", "conv2d.default", "x", "conv_weight", shape="B 8 4 4")
    s.call(
        "n", "batch_norm.default", "y", "norm_weight", "norm_bias", "norm_mean", "norm_var", True,
        0.1, 1e-5, True, shape="B 8 4 4",
    )  # fmt: skip
    s.call("z", "conv2d.default", "n", "out_weight", shape="B 4 4 4")
    s.call("loss", "mean.default", "z", shape="")
    found = choose(s.graph("loss"))
    channels = Shard(0, "conv.weight", 1, (8,))
    for path in ("conv.weight", "norm.weight", "norm.bias", "norm.mean", "norm.var"):
        assert found.weights[path] == channels
    assert found.weights["out.weight"] == Shard(1, "conv.weight", 1, (8,))
    assert once(found) == {"reduce": 1}


def test_the_same_graph_gives_the_same_answer() -> None:
    assert choose(decoder(2)) == choose(decoder(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head.weight": ((0, 20), (20, 41))}, "head_weight has pieces of (40,), which 41 units"),
        ({"head.weight": ((0, 20), (21, 40))}, "the intervals of head.weight leave a gap"),
        ({"head.weight": None}, "is cut along head.weight, which nobody deals out"),
    ],
)
def test_shapes_that_do_not_fit_are_told(change: dict[str, Any], said: str) -> None:
    graph = decoder()
    found = choose(graph)
    axes: dict[str, Any] = {
        axis: tile(units, shares(units, 2)) for axis, units in found.axes.items()
    }
    axes |= change
    dealt = {axis: intervals for axis, intervals in axes.items() if intervals}
    assert any(said in each for each in shape_check(graph, found.assignment, dealt))


def test_operations_whose_parts_do_not_fit_are_told() -> None:
    graph = decoder()
    found = choose(graph)
    axes = {axis: tile(units, shares(units, 2)) for axis, units in found.axes.items()}
    found.assignment.layouts["blocks_0_up_weight"] = R
    (said, *_) = shape_check(graph, found.assignment, axes)
    assert said.startswith("blocks_0_u (aten.linear.default) on member 0: ")


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_is_cut_as_moves_the_fewest_bytes(tied: bool) -> None:
    """Columns are gathered (one time the values around the ring), rows are summed (two times); the
    head that is tied to a table by columns would have logits of partial sums."""
    free = choose(decoder(tied=tied), members=4)
    assert free.patterns["token.weight"] == ("vocabulary" if tied else "column")
    (cast,) = {(c.kind, c.target) for c in free.assignment.casts if c.value == "embedded"}
    assert cast == ("reduce" if tied else "gather", R)
