"""Which weights round their products' factors to 8 bits, and what these products cost."""

from dataclasses import replace

import pytest
from tests.unit.operation_graphs import Sketch

from whale_train.strategies.cost.op_work import KernelKind, Traffic, Work, Works
from whale_train.strategies.cost.roofline import kernel_of, work_times
from whale_train.strategies.graph.operation_graph import ModelProfile, OperationGraph, Parameter
from whale_train.strategies.graph.rewrites import RewriteScope
from whale_train.strategies.graph.scaled_weights import scaled_weights
from whale_train.strategies.hardware.cluster import Device, Kernel, Reached, Roofline

SHAPES = {
    "blocks.0.up.weight": (256, 64),
    "blocks.0.router.weight": (8, 64),
    "blocks.0.odd.weight": (100, 64),
    "blocks.0.norm.weight": (64,),
    "blocks.0.experts.weight": (4, 64, 64),
    "blocks.1.down.weight": (64, 256),
    "blocks.1.gate.weight": (64, 64),
    "tail.1.weight": (512, 64),
    "head.weight": (512, 64),
}
LINEAR = tuple(x for x in SHAPES if "norm" not in x and "experts" not in x)


def profile() -> ModelProfile:
    parameters = tuple(Parameter(path, shape, 4) for path, shape in SHAPES.items())
    return ModelProfile("net", parameters, (), 1.0, 1.0, linear_weights=LINEAR)


def test_large_linear_layers_of_blocks() -> None:
    assert scaled_weights(profile()) == ("blocks.0.up.weight", "blocks.1.down.weight")


def test_frozen_weights_too() -> None:
    whole = profile()
    frozen = replace(whole, parameters=whole.parameters[1:], frozen=whole.parameters[:1])
    assert scaled_weights(frozen) == scaled_weights(whole)


@pytest.mark.parametrize("chooses", [True, False])
def test_a_router_is_what_a_top_k_goes_back_to(chooses: bool) -> None:
    sketch = Sketch()
    x = sketch.input("x", "B 4 64")
    for name in ("before", "router"):
        sketch.parameter(name, "64 64")
    h = sketch.call("h", "linear.default", x, "before", shape="B 4 64")
    scores = sketch.call("scores", "linear.default", h, "router", shape="B 4 64")
    weights = sketch.call("weights", "softmax.int", scores, -1, shape="B 4 64")
    if chooses:
        weights = sketch.call("top", "topk.default", weights, 2, shape="B 4 2")
    graph = sketch.graph(sketch.call("loss", "sum.default", weights, shape=""))
    paths = [x.path for x in graph if x.target == "parameter"]
    named = {path: f"blocks.0.{path}.weight" for path in paths}
    graph = OperationGraph(
        tuple(replace(x, path=named.get(x.path, x.path)) if x.path else x for x in graph)
    )
    parameters = tuple(Parameter(path, (64, 64), 4) for path in named.values())
    routed = replace(
        profile(), parameters=parameters, linear_weights=tuple(named.values()), graph=graph
    )
    expected = ["before"] if chooses else ["before", "router"]
    assert scaled_weights(routed) == tuple(named[name] for name in expected)


def two_products() -> Sketch:
    """A product with a weight, and one of two values."""
    sketch = Sketch()
    x = sketch.input("x", "B 4 64")
    sketch.parameter("weight", "64 128")
    sketch.parameter("bias", "128")
    h = sketch.call("h", "relu.default", x, shape="B 4 64")
    y = sketch.call("y", "addmm.default", "bias", h, "weight", shape="B 4 128")
    sketch.call("z", "matmul.default", y, y, shape="B 4 4")
    return sketch


def test_products_with_a_named_weight() -> None:
    sketch = two_products()
    graph = sketch.graph(sketch.call("loss", "sum.default", "z", shape=""))
    scope = RewriteScope.whole(graph)
    assert list(scope.scaled_products({"weight"})) == ["y"]
    assert not list(scope.scaled_products({"other"}))
    scaled = next(x for x in Works(graph, {"y"}).of(["y"]) if x.flops or x.rounded.fixed)
    assert scaled.kind is KernelKind.SCALED
    assert scaled.rounded == Traffic(4 * 128 * 64, 4 * 4 * 64)


# 1 TFLOP/s in bf16, 3 in fp8; a fifth of a microsecond for each operation.
DEVICE = Device(
    *("round", {"fp32": 5e11, "bf16": 1e12, "fp8": 3e12}, 16e9, 1e11),
    reached=Reached(products=0.5, bandwidth=1.0, overhead_s=2e-7),
)
WORK = Work(
    *(KernelKind.SCALED, 6e9, Traffic(4e8), None, True, True),
    rounded=Traffic(2e8),
)


def test_seconds_of_a_scaled_product() -> None:
    """Forward and gradient of the input have fp8's rate and round two factors each, by 15 kernels
    that read them twice in 16 bits; the gradient of the weight has bf16's rate."""
    times = work_times({WORK: 2}, 1.0, DEVICE, "fp8")
    rounding = 30 * 2e-7 + 2 * (2e8 / 2) / 1e11
    product = 2e-7 + 6e9 / 1.5e12 + (4e8 / 2) / 1e11
    assert times.forward == pytest.approx(2 * (product + rounding))
    assert times.backward_input == pytest.approx(2 * (product + rounding))
    assert times.backward_weight == pytest.approx(2 * (2e-7 + 6e9 / 5e11 + (4e8 / 2) / 1e11))


def test_without_gradients_of_inputs() -> None:
    times = work_times({replace(WORK, input_gradient=False): 1}, 1.0, DEVICE, "fp8")
    assert times.backward_input == 0
    assert times.backward_weight > 0


def test_all_else_is_in_bf16() -> None:
    for kind in set(KernelKind) - {KernelKind.SCALED}:
        assert kernel_of(DEVICE, "fp8", kind) == kernel_of(DEVICE, "bf16", kind)


def test_what_is_measured_in_bf16_is_scaled() -> None:
    """A measured product tells the part of the peak that products reach in 8 bits, too."""
    roofline = Roofline(1e-6, 8e11, 5e10)
    measured = replace(DEVICE, kernels={"bf16": {KernelKind.PRODUCT: Kernel(roofline, roofline)}})
    assert measured.measured("fp8") == measured.kernels["bf16"]
    forward = kernel_of(measured, "fp8", KernelKind.SCALED).forward
    assert forward == Roofline(1e-6, pytest.approx(3 * 8e11), 5e10)
