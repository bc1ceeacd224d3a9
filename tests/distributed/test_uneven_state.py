"""State that ZeRO partitions in parts of unequal size computes what one process does."""

import pytest
from tests.distributed.cases import CLIPPED, EVALUATED, TOLERANCE, UNEVEN, UNEVEN_3, Case, Run
from tests.distributed.equality import JobFailed, assert_equal
from tests.distributed.test_verify import UNEVEN as UNLIKE
from tests.distributed.test_verify import Case as Verified
from tests.distributed.test_verify import Sides

TWICE = ("train.accumulate=2",)


def state(zero: int, parts: str) -> tuple[str, ...]:
    return (f"strategy.graph={{replicate: {{zero: {zero}, state: {parts}}}}}",)


GROUPS = 'optimizer.groups=[{match: "*.bias", lr_scale: 0.1, weight_decay: 0.0}]'
RADAM = ("optimizer._target_=torch.optim.RAdam", "optimizer.lr=2e-3", "+optimizer.eps=1e-3")

CASES = [
    *(
        Case("gpt", f"zero{zero}", 2, optimizer, UNEVEN, state(zero, "[3, 1]"))
        for zero in (1, 2, 3)
        for optimizer in ("momentum", "adamw")
    ),
    # Shares of the batch by speed, parts by memory: rank 2 is slow, and keeps most. One keeps none.
    Case("gpt", "zero2", 3, "sgd", UNEVEN_3, (*state(2, "[1, 0, 5]"), *CLIPPED)),
    Case("gpt_tied", "zero3", 3, "adamw", UNEVEN_3, (*state(3, "[2, 1, 4]"), *CLIPPED)),
    # The gradients of several backwards.
    *(
        Case("bert", f"zero{zero}", 2, "momentum", UNEVEN, (*state(zero, "[3, 1]"), *TWICE))
        for zero in (1, 2, 3)
    ),
    # A parameter that nothing reads, and one that is frozen; BatchNorm; large gradients.
    Case("own", "zero3", 2, "momentum", UNEVEN, state(3, "[1, 4]")),
    Case("own_unexported", "zero2", 2, "momentum", UNEVEN, state(2, "[1, 4]")),
    Case("image_classifier", "zero3", 2, "sgd", UNEVEN, state(3, "[3, 1]")),
    Case("class_head", "zero1", 2, "momentum", UNEVEN, state(1, "[3, 1]")),
    Case("gpt2", "zero3", 2, "adamw", UNEVEN, (*state(3, "memory"), *EVALUATED)),
    # Blocks whose forward runs again in the backward.
    *(
        Case("gpt", f"zero{zero}", 2, "adamw", UNEVEN, state(zero, "[1, 3], recompute: full"))
        for zero in (1, 3)
    ),
    # Options of some parameters, and an optimizer that is named by its class.
    Case("gpt", "zero3", 2, "adamw", UNEVEN, (*state(3, "[3, 1]"), GROUPS)),
    Case("gpt", "zero2", 2, "none", UNEVEN, (*state(2, "[3, 1]"), *RADAM, GROUPS)),
    # Code that torch.compile made of them.
    pytest.param(
        Case("gpt", "zero3", 2, "adamw", UNEVEN, (*state(3, "[1, 3]"), "train.compile=true")),
        marks=pytest.mark.full,
    ),
]


def single(case: Case, *extra: str) -> Case:
    apart = (*TWICE, "train.compile=true")
    kept = [x for x in (*case.extra, *extra) if x not in apart and not x.startswith("strategy.")]
    return Case(case.model, "single", 1, case.optimizer, (), tuple(kept))


def copies_of(parts: str, zero: int, of: str) -> tuple[str, ...]:
    node = f"degree: 2, zero: {zero}, state: {parts}, of: {of}"
    return (f"strategy.graph={{replicate: {{{node}}}}}",)


PIPELINE = "{pipeline: {stages: 2, micro_batches: 2}}"
OF_PARTS = [
    Case("gpt", "zero1", 4, "adamw", (), (*copies_of("[3, 1]", 1, PIPELINE), *CLIPPED)),
    # One weight as the embedding and the head, of two stages.
    Case("gpt_tied", "zero1", 4, "momentum", (), copies_of("[1, 4]", 1, PIPELINE)),
    Case("gpt", "zero2", 4, "momentum", (), copies_of("[3, 1]", 2, "{split: {degree: 2}}")),
]


@pytest.mark.parametrize("case", OF_PARTS, ids=str)
def test_copies_of_stages_and_of_shards(run: Run, case: Case) -> None:
    found = run(case)
    assert all(len(set(x["state_parts"])) == 2 for x in found.plan["task_graphs"])
    assert_equal(found, run(single(case)), TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_norms_and_weights_are_those_of_one_process(run: Run, case: Case) -> None:
    found = run(case)
    (task_graph,) = found.plan["task_graphs"]
    assert len(set(task_graph["state_parts"])) > 1 or "memory" in case.extra[0]
    assert all(rank["deepspeed"] == {"0": None} for rank in found.plan["ranks"])
    assert_equal(found, run(single(case)), TOLERANCE)


def test_bf16_is_deepspeeds(run: Run) -> None:
    """Masters and gradients are of fp32 in both. The stages differ in what is sent when, and in no
    bit of the result."""
    extra = ("train.precision=bf16", *CLIPPED)
    found = [
        run(Case("gpt", f"zero{zero}", 2, "adamw", UNEVEN, (*state(zero, "[3, 1]"), *extra)))
        for zero in (1, 2, 3)
    ]
    even = run(Case("gpt", "zero1", 2, "adamw", UNEVEN, extra))
    assert found[0].plan["task_graphs"][0]["narrow"]
    assert even.plan["ranks"][0]["deepspeed"]["0"]
    assert_equal(found[0], even, 2e-3)
    for other in found[1:]:
        assert other.losses == found[0].losses
        for path, (value, *_) in found[0].values.items():
            assert all((x == value).all() for x in other.values[path]), path


def test_devices_of_unlike_memory_train_what_equal_parts_do_not_fit(run: Run) -> None:
    """Four processes stand for two devices of 190 MB and two of 105, of equal speed."""
    device = "{{devices: 2, link: nvlink2, device: {{name: gpu_{}, flops: {{fp32: 1e12}}, "
    device += "memory_bytes: {}, memory_bandwidth_bytes_s: 1e11}}}}"
    nodes = f"hardware.nodes=[{device.format('large', 190e6)}, {device.format('small', 105e6)}]"

    def case(mode: str) -> Case:
        return Case("class_head", "zero2", 4, "adamw", UNEVEN, (*state(2, mode), nodes))

    with pytest.raises(JobFailed) as failure:
        run(case("even"))
    assert "on rank 2 (gpu_small) for one sample" in str(failure.value)
    found = run(case("auto"))
    parts = found.plan["task_graphs"][0]["state_parts"]
    assert parts[0] == parts[1] > 2 * parts[2] == 2 * parts[3]
    assert found.plan["task_graphs"][0]["shares"] == [2, 2, 2, 2]
    needs = [rank["memory_bytes"]["total"] for rank in found.plan["ranks"]]
    assert max(needs[:2]) <= 190e6
    assert max(needs[2:]) <= 105e6
    assert_equal(found, run(Case("class_head", "single", 1, "adamw")), TOLERANCE)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_verification_sees_gradients_and_values_of_all_copies(sides: Sides, zero: int) -> None:
    found = sides.verify(Verified("gpt", f"zero{zero}", "adamw", UNLIKE, state(zero, "[3, 1]")))
    assert found.equal, found.to_json()
    compared = {x.what for x in found.differences}
    assert {"loss", "gradient norm"} <= compared
    assert {x.split()[-1] for x in compared} >= {"value", "gradient", "update"}
