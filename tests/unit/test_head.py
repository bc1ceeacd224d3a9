"""The output projection is found by what the graph does with its weight, whatever it is called."""

import pytest
from tests.unit.operation_graphs import (
    Sketch,
    auxiliary_loss,
    bert,
    classifier,
    conv1d_head,
    gpt,
    head_read_elsewhere,
    transposed_head,
    two_heads,
    without_head,
)

from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.partition.output_head import Head, find_heads, matching

# The operation, the weight's canonical path, its dimension over the classes, their number, module.
HEADS = {
    "gpt": (gpt(), Head("logits", "lm_head.weight", 0, 12, "lm_head")),
    "gpt_tied": (gpt(tied=True), Head("logits", "token.weight", 0, 12, "lm_head")),
    "classifier": (classifier(), Head("logits", "head.weight", 0, 10, "head")),
    "conv1d": (conv1d_head(), Head("addmm", "head.weight", 1, 10, "head")),
    "transposed": (transposed_head(), Head("logits", "classes", 0, 10, "")),
    "bert": (bert(), Head("linear", "embeddings.weight", 0, 12, "decoder")),
    "centred": (head_read_elsewhere(), Head("logits", "head.weight", 0, 10, "head")),
    "routed": (auxiliary_loss(), Head("logits", "head.weight", 0, 10, "head")),
}


@pytest.mark.parametrize(("profile", "head"), HEADS.values(), ids=HEADS)
def test_the_largest_projection_comes_first(profile: ModelProfile, head: Head) -> None:
    assert find_heads(profile)[0] == head


@pytest.mark.parametrize("name", [n for n in HEADS if n != "routed"])
def test_hidden_projections_are_no_heads(name: str) -> None:
    """Every other product of these graphs has a parameter between it and the loss."""
    profile, head = HEADS[name]
    assert find_heads(profile) == (head,)


def test_two_heads_in_order_of_their_weights() -> None:
    fine = Head("fine", "fine.weight", 0, 10, "fine")
    coarse = Head("coarse", "coarse.weight", 0, 6, "coarse")
    assert find_heads(two_heads()) == (fine, coarse)


def test_a_model_without_one() -> None:
    assert find_heads(without_head()) == ()


def product(
    *args: str, weight: str, target: str, swap: str = "", between: str = ""
) -> ModelProfile:
    """`x` times a weight, seen through `swap`, and `between` it and the loss another operation
    that reads the parameter `scale`."""
    s = Sketch()
    s.parameter("trunk.weight", "4 8")
    s.parameter("weight", weight)
    s.parameter("scale", "12")
    s.input("features", "B 8", "float32")
    s.input("labels", "B")
    s.call("x", "linear.default", "features", "trunk_weight", shape="B 4")
    if swap:
        s.call("seen", swap, "weight", *((0, 1) if "transpose" in swap else ()), shape="4 12")
    s.call("logits", target, *args, shape="B 12")
    last = "logits"
    if between:
        last = s.call("after", between, "logits", "scale", shape="B 12")
    s.call("loss", "cross_entropy_loss.default", last, "labels", shape="")
    return s.profile("product", "loss")


@pytest.mark.parametrize(
    ("profile", "dim"),
    [
        (product("x", "weight", weight="12 4", target="linear.default"), 0),
        (product("x", "weight", weight="4 12", target="matmul.default"), 1),
        (product("x", "weight", weight="4 12", target="mm.default"), 1),
        (product("scale", "x", "weight", weight="4 12", target="addmm.default"), 1),
        (product("x", "seen", weight="12 4", target="mm.default", swap="t.default"), 0),
        (product("x", "seen", weight="12 4", target="matmul.default", swap="transpose.int"), 0),
        (product("scale", "x", "seen", weight="12 4", target="addmm.default", swap="t.default"), 0),
    ],
)
def test_the_dimension_of_the_classes(profile: ModelProfile, dim: int) -> None:
    (head,) = find_heads(profile)
    assert (head.dim, head.classes) == (dim, 12)


@pytest.mark.parametrize("between", ["add.Tensor", "mul.Tensor", "div.Tensor"])
def test_an_elementwise_parameter_may_follow(between: str) -> None:
    profile = product("x", "weight", weight="12 4", target="linear.default", between=between)
    assert [head.operation for head in find_heads(profile)] == ["logits"]


@pytest.mark.parametrize(
    "between", ["layer_norm.default", "linear.default", "convolution.default", "embedding.default"]
)
def test_a_parameter_that_mixes_elements_may_not(between: str) -> None:
    profile = product("x", "weight", weight="12 4", target="linear.default", between=between)
    assert all(head.operation != "logits" for head in find_heads(profile))


def test_a_product_of_two_activations_is_no_head() -> None:
    profile = product("x", "x", weight="12 4", target="matmul.default")
    assert find_heads(profile)[0].operation == "x"  # then the trunk is the projection


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (("head",), ["fine", "coarse"]),
        (("*",), ["fine", "coarse"]),
        (("coarse",), ["coarse"]),
        (("co*", "nothing"), ["coarse"]),
        (("coarse", "fine"), ["fine", "coarse"]),
        (("Fine",), []),
        (("fine.*",), []),
    ],
)
def test_patterns_name_modules(patterns: tuple[str, ...], found: list[str]) -> None:
    heads = find_heads(two_heads())
    assert [head.module for head in matching(heads, patterns)] == found
