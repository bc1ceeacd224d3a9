"""Which parameters the optimizer updates with options of their own."""

import pytest

from whale_train.errors import Fault
from whale_train.strategies.graph.operation_graph import Parameter
from whale_train.strategies.plan.plan import PlannedParameterGroup
from whale_train.strategies.plan.training import GroupRule, Training
from whale_train.strategies.resolver.parameter_groups import (
    explain_parameter_groups,
    parameter_groups,
    refuse_unmatched,
)

PARAMETERS = (
    Parameter("token.weight", (8, 4), aliases=("lm_head.weight",)),
    Parameter("norm.weight", (4,)),
    Parameter("experts.bias", (2, 4)),
    Parameter("scale", ()),
)


def training(decay: float, no_decay: bool = True, groups: tuple[GroupRule, ...] = ()) -> Training:
    options = {"lr": 0.1, "weight_decay": decay}
    return Training(8, "fp32", 0.0, "adamw", options, no_decay=no_decay, groups=groups)


def test_norms_and_biases_are_spared_where_there_is_decay() -> None:
    assert parameter_groups(training(0.1), PARAMETERS) == (
        PlannedParameterGroup(0.1, 1.0, ("token.weight",)),
        PlannedParameterGroup(0.0, 1.0, ("norm.weight", "experts.bias", "scale")),
    )
    (decision,) = explain_parameter_groups(training(0.1), PARAMETERS)
    assert decision.reason.endswith("norm.weight, experts.bias, scale")
    for without in (training(0.0), training(0.1, no_decay=False)):
        assert parameter_groups(without, PARAMETERS) == ()
        assert explain_parameter_groups(without, PARAMETERS) == ()


@pytest.mark.parametrize("pattern", ["token.weight", "token", "lm_head", "*k*.we?ght", "t*"])
def test_a_pattern_is_of_a_path_or_of_a_module_and_the_first_counts(pattern: str) -> None:
    rules = (GroupRule((pattern,), None, 0.5), GroupRule(("*",), 0.3, 2.0))
    assert parameter_groups(training(0.1, groups=rules), PARAMETERS) == (
        PlannedParameterGroup(0.1, 0.5, ("token.weight",)),
        PlannedParameterGroup(0.3, 2.0, ("norm.weight", "experts.bias", "scale")),
    )


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    faults: list[Fault] = []
    refuse_unmatched((GroupRule(("norm", "nrom"), 0.0, 1.0),), PARAMETERS, faults)
    (fault,) = faults
    assert (fault.key, fault.value) == ("optimizer.groups[0].match", "nrom")
    assert "such as norm," in fault.remedy
