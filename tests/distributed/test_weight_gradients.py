"""What reads weights: their gradients wait or are added in place, and the weights may be taken
away meanwhile."""

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from whale_train.runtime.base.autocast import autocast, casting_once
from whale_train.runtime.base.node_meta import BLOCK
from whale_train.runtime.graph.segment import SegmentModule
from whale_train.runtime.kernels.matmul import of_table
from whale_train.runtime.kernels.weight_gradients import WeightGradients

aten = torch.ops.aten
KEY = (0, 0)


def graph_of(kind: str) -> fx.GraphModule:
    """tanh of a product with a weight and of a bias that is made of a parameter."""
    graph = fx.Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    made = graph.call_function(aten.mul.Tensor, (bias, 2.0))
    if kind == "linear":
        product = graph.call_function(aten.linear.default, (x, weight, made))
    else:
        product = graph.call_function(aten.addmm.default, (made, x, weight))
    graph.output(graph.call_function(aten.tanh.default, (product,)))
    for node in graph.nodes:
        node.meta[BLOCK] = "layers.0"
    return fx.GraphModule(nn.Module(), graph)


def operands(kind: str) -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((6, 5), (3, 5), (3,)))
    weight = weight if kind == "linear" else weight.t().contiguous()
    return x.requires_grad_(), nn.Parameter(weight), nn.Parameter(bias)


def replaced(kind: str, deferred: WeightGradients) -> fx.GraphModule:
    graph = graph_of(kind)
    deferred.replace(graph, reading_weights(graph))
    graph.recompile()
    return graph


def reading_weights(graph: fx.GraphModule) -> list[fx.Node]:
    """The products and lookups of a graph, which have no other operations with such names."""
    read = (aten.linear.default, aten.addmm.default, aten.embedding.default)
    return [node for node in graph.graph.nodes if node.target in read]


@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_a_bias_that_is_made_of_a_parameter_has_its_gradient_at_once(kind: str) -> None:
    x, weight, bias = operands(kind)
    graph_of(kind)(x, weight, bias).sum().backward()
    expected = [t.grad for t in (x, weight, bias)]
    x, weight, bias = operands(kind)
    deferred = WeightGradients()
    loss = replaced(kind, deferred)(x, weight, bias).sum()
    with deferred.deferring(KEY):
        loss.backward()
    assert dict(deferred.left(KEY)) == {weight: 1}
    assert weight.grad is None
    torch.testing.assert_close([x.grad, bias.grad], [expected[0], expected[2]])
    deferred.accumulate(KEY, lambda parameter: None)
    torch.testing.assert_close(weight.grad, expected[1])


@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_a_product_stays_in_its_block(kind: str) -> None:
    nodes = replaced(kind, WeightGradients()).graph.nodes
    assert [node.meta.get(BLOCK) for node in nodes] == ["layers.0"] * len(nodes)


def test_no_view_of_a_weight_is_kept() -> None:
    """What ZeRO 3 gathered is free once it takes the weight away: the weight itself is kept, and
    read again when it is there."""
    assert views_kept(graph_of("linear"))
    assert not views_kept(replaced("linear", WeightGradients()))


def views_kept(graph: fx.GraphModule) -> list[tuple[int, ...]]:
    x, weight, bias = operands("linear")
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph(x, weight, bias)
    of_weight = [t for t in kept if t.untyped_storage()._cdata == weight.untyped_storage()._cdata]
    assert of_weight
    return [tuple(t.shape) for t in of_weight if not t.is_leaf]


def of_several(kind: str, owner: WeightGradients | None, dtype: torch.dtype) -> list[Tensor | None]:
    """The gradients of the weight and the bias after three backwards of different inputs; `owner`
    adds them up."""
    x, weight, bias = operands(kind)
    graph = graph_of(kind) if owner is None else replaced(kind, owner)
    for number in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            loss = graph((x * (number + 1)).sin(), weight, bias).float().sum()
        if owner is None:
            loss.backward()
            continue
        storage = weight.grad.data_ptr() if weight.grad is not None else None
        with owner.accumulating():
            loss.backward()
        assert weight.grad is not None
        assert storage in (None, weight.grad.data_ptr())
    return [weight.grad, bias.grad]


@pytest.mark.parametrize("kind", ["linear", "addmm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_in_place_by_the_product(kind: str, dtype: torch.dtype) -> None:
    expected, found = (of_several(kind, owner, dtype) for owner in (None, WeightGradients()))
    assert [x.dtype for x in found if x is not None] == [torch.float32] * 2
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("defers", [False, True])
def test_lookups_add_the_rows_they_took(padding: int | None, defers: bool) -> None:
    def graph() -> fx.GraphModule:
        made = fx.Graph()
        weight, rows = made.placeholder("weight"), made.placeholder("rows")
        options = () if padding is None else (padding,)
        made.output(made.call_function(aten.embedding.default, (weight, rows, *options)))
        return fx.GraphModule(nn.Module(), made)

    generator = torch.Generator().manual_seed(0)
    table = torch.randn(5, 3, generator=generator)
    rows = torch.tensor([[0, 2, 2], [4, 0, 1]])
    owner, module = WeightGradients(), graph()
    owner.replace(module, reading_weights(module))
    module.recompile()
    one, other = nn.Parameter(table.clone()), nn.Parameter(table.clone())
    for number in range(3):
        graph()(one, rows + number % 2 * (rows < 4)).square().sum().backward()
        loss = module(other, rows + number % 2 * (rows < 4)).square().sum()
        key = (0, number)
        if defers:
            with owner.deferring(key):
                loss.backward()
            owner.accumulate(key, lambda parameter: None)
        else:
            with owner.accumulating():
                loss.backward()
    torch.testing.assert_close(other.grad, one.grad)


def test_rows_of_a_16_bit_table_are_added_up_in_fp32() -> None:
    """A thousand of a row's: its sum would stand still at 256 where each was rounded."""
    indices, grad = torch.zeros(1000, dtype=torch.long), torch.ones(1000, 1, dtype=torch.bfloat16)
    for known in (None, torch.zeros(2, 1, dtype=torch.bfloat16)):
        found = of_table(grad, indices, 2, -1, known)
        assert (found.dtype, found.tolist()) == (torch.bfloat16, [[1000.0], [0.0]])


def test_hooks_of_a_parameter_run_once_when_all_that_reads_it_is_done() -> None:
    """What is final is told by them (`runtime/pipeline/grad_ready.py`), also of a tied weight, that
    is looked up and multiplied with."""
    table, alone = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3, 3))
    graph = fx.Graph()
    rows, first, second = (graph.placeholder(name) for name in ("rows", "first", "second"))
    found = graph.call_function(aten.embedding.default, (first, rows))
    hidden = graph.call_function(aten.linear.default, (found, second))
    graph.output((graph.call_function(aten.linear.default, (hidden, first)),))
    segment = SegmentModule((), ("logits",), {"table": table, "alone": alone})
    owner, module = WeightGradients(), fx.GraphModule(nn.Module(), graph)
    owner.replace(module, reading_weights(module))
    module.recompile()
    segment.set_graph(True, module, ("table", "alone"), ("rows",))
    seen: list[tuple[int, Tensor]] = []
    for parameter in (table, alone):
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append((id(p), p.grad.clone())))
    (logits,) = segment(torch.tensor([0, 1]))
    with owner.accumulating():
        logits.sum().backward()
    of_table, of_alone = [[18.0] * 3] * 2 + [[6.0] * 3] * 2, [[8.0] * 3] * 3
    assert {key: gradient.tolist() for key, gradient in seen} == {
        id(table): of_table, id(alone): of_alone
    }  # fmt: skip
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["linear", "addmm"])
@pytest.mark.parametrize("owned", [True, False])
def test_weights_are_cast_once_a_step(kind: str, owned: bool) -> None:
    """Two forwards in bf16 before their backwards: with one copy of the weight between them, the
    gradients of two copies."""

    def step(*, once: bool) -> tuple[int, list[Tensor | None]]:
        x, weight, bias = operands(kind)
        owner = WeightGradients()
        graph = replaced(kind, owner) if owned else graph_of(kind)
        copies: set[int] = set()

        def kept(tensor: Tensor) -> Tensor:
            if tensor.dtype == torch.bfloat16 and tensor.shape in (weight.shape, weight.t().shape):
                copies.add(tensor.untyped_storage().data_ptr())
            return tensor

        with ExitStack() as stack:
            if once:
                stack.enter_context(owner.casting_once())
                stack.enter_context(casting_once("cpu"))
            stack.enter_context(saved_tensors_hooks(kept, lambda tensor: tensor))
            losses = []
            for part in (x, 2 * x):
                with autocast("cpu", torch.bfloat16):
                    losses.append(graph(part, weight, bias).float().sum())
            for loss in losses:
                with owner.accumulating():
                    loss.backward()
        return len(copies), [t.grad for t in (x, weight, bias)]

    plainly, expected = step(once=False)
    copies, found = step(once=True)
    assert (plainly, copies) == (2, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
