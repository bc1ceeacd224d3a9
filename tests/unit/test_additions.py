"""What a plan says of low-rank additions, by the names that peft gives in a mixture."""

import pytest

from whale_train.launcher.planning.additions import explain_additions
from whale_train.strategies.graph.operation_graph import ModelProfile, Parameter

FROZEN = {
    "h.0.attn.q_proj.base_layer.weight": (16, 16),
    "h.0.mlp.gate.base_layer.weight": (4, 16),
    "h.0.mlp.up.base_layer.weight": (64, 16),
    "h.0.mlp.experts.base_layer.base_layer.gate_up_proj": (4, 64, 16),
    "h.0.mlp.experts.base_layer.base_layer.down_proj": (4, 16, 32),
    "norm.weight": (16,),
}


def said(*modules: str) -> list[tuple[str, str, str]]:
    """Return what is said of additions to `modules`, beside all that is frozen."""
    trained = tuple(
        Parameter(f"{module}.lora_{factor}.default.weight", (2, 16), 4)
        for module in modules
        for factor in "AB"
    )
    frozen = tuple(Parameter(path, shape, 4) for path, shape in FROZEN.items())
    profile = ModelProfile("Net", trained, (), 1.0, 1.0, frozen=frozen)
    return [(x.key, x.chosen, x.reason) for x in explain_additions(profile)]


@pytest.mark.parametrize(
    ("modules", "chosen", "reason"),
    [
        ("h.0.attn.q_proj", "added to 1 weight", "all else is frozen"),
        (
            "h.0.attn.q_proj h.0.mlp.gate h.0.mlp.experts h.0.mlp.experts.base_layer",
            "added to 4 weights",
            "all else is frozen; 2 are stacks of experts, 1 a router",
        ),
        (
            "h.0.mlp.up h.0.mlp.experts",
            "added to 2 weights",
            "all else is frozen; 1 is a stack of experts, no routers",
        ),
    ],
)
def test_experts_and_routers_are_counted(modules: str, chosen: str, reason: str) -> None:
    assert said(*modules.split()) == [("model.adapters", chosen, reason)]


def test_nothing_is_said_where_nothing_is_added() -> None:
    assert said() == []
