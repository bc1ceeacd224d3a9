"""The DeepSpeed config, whole and by hand: nothing of the mathematics is left to a default."""

from typing import Any

import pytest

from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.resolver.deepspeed_config import deepspeed_config, deepspeed_optimizer

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def config(grad_clip: float = 0.0, on_cpu: bool = False, **options: Any) -> dict[str, Any]:
    node = Replicate("strategy.graph.replicate", **options)
    found = deepspeed_config(node, 6, grad_clip, SGD, on_cpu)
    assert found is not None
    return found


def test_zero_0_is_not_deepspeeds() -> None:
    node = Replicate("strategy.graph.replicate")
    assert deepspeed_config(node, 6, 1.0, SGD, True) is None


def test_the_whole_config_of_zero_1() -> None:
    assert config(zero=1) == {
        "train_micro_batch_size_per_gpu": 6,
        # One backward may be many: nothing is divided by a number of micro-batches.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # 1.0 by default
        "gradient_clipping": 0.0,
        # Gradients are the mean over the copies, in fp32 whatever the precision: 16 bits are
        # autocast, and none of DeepSpeed's business
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 6_553_600,
            "allgather_bucket_size": 6_553_600,
            "overlap_comm": False,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": SGD,
        "steps_per_print": 2_147_483_648,
        "wall_clock_breakdown": False,
    }


STAGE_3 = {
    "stage": 3,
    # By default parameters of less than 100,000 elements stay whole; what is used again within
    # 1e9 elements stays; 5e7 are gathered ahead; and the update takes copies of 1e9 at a time.
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 6_553_600,
    "sub_group_size": 6_553_600,
    # On a GPU, reductions and gathers run beside the backward: auto by default.
    "overlap_comm": True,
}
ON_CPU = {"stage3_prefetch_bucket_size": 0, "overlap_comm": False}


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"zero": 2}, {"stage": 2, "overlap_comm": True}),
        ({"zero": 2, "on_cpu": True}, {"stage": 2}),
        ({"zero": 3}, STAGE_3),
        ({"zero": 3, "on_cpu": True}, {**STAGE_3, **ON_CPU}),
        (
            {"zero": 2, "offload_optimizer": "cpu"},
            {
                "stage": 2,
                "overlap_comm": True,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
        ),
        (
            {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
            {
                **STAGE_3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
            },
        ),
        (
            {"zero": 3, "offload_parameters": "cpu"},
            {**STAGE_3, "offload_param": {"device": "cpu", "pin_memory": True}},
        ),
    ],
)
def test_stages_and_offload_change_their_section_alone(
    options: dict[str, Any], differs: dict[str, Any]
) -> None:
    first = config(zero=1)
    expected = first | {"zero_optimization": first["zero_optimization"] | differs}
    assert config(**options) == expected


def test_clipping_is_what_was_asked_for() -> None:
    assert config(grad_clip=0.5, zero=2) == config(zero=2) | {"gradient_clipping": 0.5}


OPTIONS = {"lr": 0.1, "weight_decay": 0.01}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("offloaded", [True, False])
def test_sgd_is_torchs_wherever_its_state_is(fused: bool, offloaded: bool) -> None:
    found = deepspeed_optimizer("sgd", {**OPTIONS, "momentum": 0.9, "fused": fused}, offloaded)
    params = {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "fused": fused}
    assert found == {"type": "SGD", "params": params}


@pytest.mark.parametrize(
    ("name", "kind", "decoupled"), [("adam", "Adam", False), ("adamw", "AdamW", True)]
)
def test_adam_decays_where_its_name_says(name: str, kind: str, decoupled: bool) -> None:
    """DeepSpeed's Adam decouples weight decay unless told not to."""
    given = {**OPTIONS, "betas": [0.9, 0.99], "eps": 1e-6}
    own = {**given, "adam_w_mode": decoupled}
    torchs = {**own, "torch_adam": True, "fused": True}
    assert deepspeed_optimizer(name, {**given, "fused": True}, False) == {
        "type": kind,
        "params": torchs,
    }
    # DeepSpeed's own CPUAdam knows neither key.
    assert deepspeed_optimizer(name, {**given, "fused": True}, True) == {
        "type": kind,
        "params": own,
    }


def test_fused_is_off_unless_asked_for() -> None:
    assert deepspeed_optimizer("sgd", {"lr": 1.0}, False)["params"]["fused"] is False
    assert deepspeed_optimizer("adam", {"lr": 1.0}, False)["params"]["fused"] is False


def test_the_options_given_are_left_as_they_were() -> None:
    options = {"lr": 0.1, "fused": True}
    deepspeed_optimizer("adamw", options, True)
    assert options == {"lr": 0.1, "fused": True}
