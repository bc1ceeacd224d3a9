"""Models that ask how large their batch is: the sizes their graphs are of, and plans of those."""

from dataclasses import replace

import pytest
import torch
from tests.unit.plan_requests import mixed, shipped, training
from torch import Tensor, nn

from whale_train.errors import PlanError
from whale_train.models.export.batch_bounds import sizes_of
from whale_train.models.export.export import export
from whale_train.models.export.to_operation_graph import operation_graph
from whale_train.strategies.graph.operation_graph import ModelProfile, Parameter
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import resolve


class Asking(nn.Module):
    """Squares of a product, doubled where the batch `is_so`."""

    def __init__(self, is_so: str) -> None:
        super().__init__()
        self.inner, self.is_so = nn.Linear(4, 64), is_so

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.inner(x)
        if eval(self.is_so, {"batch": x.shape[0], "other": y.shape[0]}):
            hidden = hidden * 2
        return (hidden.sum(1) - y).square().mean()


def exported(is_so: str) -> tuple[object, str]:
    batch = {"x": torch.empty(3, 4, device="meta"), "y": torch.empty(3, device="meta")}
    return export(Asking(is_so).to("meta"), batch)


@pytest.mark.parametrize(
    ("is_so", "sizes"),
    [
        ("batch < 64", (1, 63)),
        ("batch >= 64", (1, 63)),
        ("16 * batch <= 1024", (1, 64)),
        ("batch >= 3", (3, 0)),
        ("batch > 2 and batch < 40", (3, 39)),
        ("batch < 64 and batch < 32", (1, 31)),
        ("batch > 0", (1, 0)),
        ("batch == other", (1, 0)),
        ("True", (1, 0)),
    ],
)
def test_a_graph_is_of_the_batches_that_its_forward_treats_alike(
    is_so: str, sizes: tuple[int, int]
) -> None:
    graph, error = exported(is_so)
    assert (graph is not None, error) == (True, "")
    assert sizes_of(graph) == sizes
    targets = [str(node.target) for node in graph.graph.nodes]
    assert ("aten.mul.Tensor" in targets) == eval(is_so, {"batch": 3, "other": 3})


@pytest.mark.parametrize(
    ("is_so", "constraint"),
    [
        ("batch % 2 == 0", "satisfy the generated guard (L['x'].size()[0] % 2) != 0"),
        ("batch == 5", "satisfy the generated guard L['x'].size()[0] != 5"),
        ("int(batch) in (3,)", "your code specialized it to be a constant (3)"),
    ],
)
def test_other_constraints_are_said_in_torchs_words(is_so: str, constraint: str) -> None:
    graph, error = exported(is_so)
    assert graph is None
    assert error.startswith("UserError: Constraints violated (batch)! ")
    assert error.endswith(constraint)


def plan_of(strategy: str, global_batch: int, sizes: tuple[int, int]) -> Plan:
    """Return the plan of a model whose graph is of batches of `sizes`, on the first 2 devices."""
    graph, _ = exported("batch < 64")
    operations = operation_graph(graph, {}, {}, {})
    paths = {op.path: op.shape for op in operations if op.target == "parameter"}
    parameters = tuple(
        Parameter(path, tuple(size.fixed for size in shape), 4) for path, shape in paths.items()
    )
    profile = ModelProfile("Asking", parameters, (), 1.0, 1.0, graph=operations, batch_sizes=sizes)
    return resolve(replace(shipped(strategy), devices=2), mixed(), profile, training(global_batch))


def test_a_plan_that_runs_the_graph_keeps_to_its_sizes() -> None:
    (decision,) = (d for d in plan_of("split", 32, (1, 63)).decisions if "a graph of" in d.chosen)
    assert decision.chosen == "a graph of 1 to 63 samples"
    with pytest.raises(PlanError) as refused:
        plan_of("split", 64, (1, 63))
    assert str(refused.value) == (
        "model=Asking asks for the size of its batch: its graph is that of 1 to 63 samples, and "
        "this plan takes a step's 64 samples in parts of 64; use a train.global_batch of 1 to 63 "
        "samples"
    )
    with pytest.raises(PlanError, match="its graph is that of 40 samples or more"):
        plan_of("split", 32, (40, 0))
    assert not any("a graph of" in d.chosen for d in plan_of("split", 64, (1, 0)).decisions)


def test_copies_of_the_model_as_it_is_may_leave_them_but_are_compared() -> None:
    within, beyond = plan_of("dp", 63, (1, 63)), plan_of("dp", 64, (1, 63))
    chosen = [[decision.chosen for decision in plan.decisions] for plan in (within, beyond)]
    assert ["compared before the first step" in x for x in chosen] == [False, True]
