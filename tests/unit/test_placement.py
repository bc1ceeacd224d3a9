"""Ranks started by torchrun or srun, told from processes that were not, without either."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_train.errors import ConfigError
from whale_train.launcher.ranks.rank_env import (
    LaunchPlace,
    first_host,
    place_from_environment,
    tasks_per_node,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29511",
}
# The second task of the second node of `srun -N2`, inside a larger allocation.
SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_TASKS_PER_NODE": "8(x4)",
    "SLURM_STEP_NODELIST": "gpu[004,007]",
    "SLURM_JOB_NODELIST": "gpu[003-005,007]",
}


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


# Ranks 0 to 3 are on pear and quince, and rank 4 is on apple.
TWO_COMPONENTS = SLURM | {
    "SLURM_HET_SIZE": "2",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "apple,pear,quince",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "pear,quince",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "apple",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1",
}


def test_ranks_of_a_heterogeneous_job_follow_its_components() -> None:
    assert place_from_environment(TWO_COMPONENTS) == LaunchPlace(4, 5, 0, 1, "pear", 20345)
    second = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    expected = LaunchPlace(3, 5, 1, 2, "pear", 20345)
    assert place_from_environment(TWO_COMPONENTS | second) == expected
    # A step over nodes of one component has nodes of its own.
    alone = {"SLURM_STEP_NODELIST": "gpu[004,007]", "SLURM_STEP_TASKS_PER_NODE": "3,2"}
    place = place_from_environment(TWO_COMPONENTS | alone | {"SLURM_NODEID": "1"})
    assert place == LaunchPlace(4, 5, 0, 2, "gpu004", 20345)
    # Variables of no such step, in which the nodes are as srun has them.
    place = place_from_environment(TWO_COMPONENTS | {"SLURM_TASKS_PER_NODE_HET_GROUP_1": "x"})
    assert place is not None
    assert place.address == "apple"


def test_torchrun() -> None:
    assert place_from_environment(TORCHRUN) == LaunchPlace(5, 8, 1, 4, "10.0.0.7", 29511)


def test_srun() -> None:
    assert place_from_environment(SLURM) == LaunchPlace(4, 5, 1, 2, "gpu004", 20345)


def test_torchrun_inside_srun_is_torchrun() -> None:
    assert place_from_environment(SLURM | TORCHRUN) == place_from_environment(TORCHRUN)


def test_a_batch_script_may_choose_the_rendezvous() -> None:
    place = place_from_environment(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    assert place is not None
    assert (place.address, place.port) == ("head", 4000)


def test_older_slurm_says_less() -> None:
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    environment = without(SLURM, *names) | {"SLURM_TASKS_PER_NODE": "3,2(x1)"}
    assert place_from_environment(environment) == LaunchPlace(4, 5, 1, 2, "gpu003", 20345)


def test_steps_of_one_job_have_their_own_ports() -> None:
    places = [place_from_environment(SLURM | {"SLURM_STEP_ID": str(step)}) for step in range(3)]
    assert len({place.port for place in places if place}) == 3


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"},
        # An sbatch script, with and without the step id of scripts.
        without(SLURM, "SLURM_STEP_ID"),
        SLURM | {"SLURM_STEP_ID": "4294967291"},
        # The shell of salloc as an interactive step.
        SLURM | {"SLURM_STEP_ID": "4294967290"},
        # A shell of salloc that is not a step.
        without(SLURM, "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
        # srun with one task.
        SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        without(SLURM, "SLURM_STEP_NUM_TASKS") | {"SLURM_NTASKS": "1"},
        # MPI is not asked.
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_not_a_rank(environment: dict[str, str]) -> None:
    assert place_from_environment(environment) is None


@pytest.mark.parametrize(
    ("environment", "key", "value", "rule"),
    [
        ({"RANK": "0"}, "WORLD_SIZE", "", "is not set while RANK=0 is"),
        ({"WORLD_SIZE": "2"}, "RANK", "", "is not set while WORLD_SIZE=2 is"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR", "", "is not set while RANK=5 is"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK", "", "is not set while RANK=5 is"),
        (TORCHRUN | {"RANK": "8"}, "RANK", "8", "is not below WORLD_SIZE=8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK", "-1", "is not a whole number from 0 up"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE", "two", "is not a whole number from 0 up"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK", "4", "is not below LOCAL_WORLD_SIZE=4"),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "16"},
            "LOCAL_WORLD_SIZE",
            "16",
            "is more than WORLD_SIZE=8, the whole job",
        ),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT", "0", "is not a port, 1 to 65535"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT", "70000", "is not a port, 1 to 65535"),
        (
            without(SLURM, "SLURM_LOCALID"),
            "SLURM_LOCALID",
            "",
            "is not set while SLURM_PROCID=4 is",
        ),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "4"},
            "SLURM_PROCID",
            "4",
            "is not below SLURM_STEP_NUM_TASKS=4",
        ),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3;2"},
            "SLURM_STEP_TASKS_PER_NODE",
            "3;2",
            "is not a list of tasks per node, like 2(x3),1",
        ),
        (
            SLURM | {"SLURM_NODEID": "2"},
            "SLURM_NODEID",
            "2",
            "is outside of the 2 nodes of SLURM_STEP_TASKS_PER_NODE",
        ),
        (
            SLURM | {"SLURM_STEP_NODELIST": "gpu[004"},
            "SLURM_STEP_NODELIST",
            "gpu[004",
            "is not a list of nodes, like gpu[003-007,012]",
        ),
        (
            SLURM | {"SLURM_JOB_ID": "x"},
            "SLURM_JOB_ID",
            "x",
            "is not a whole number from 0 up",
        ),
    ],
)
def test_what_is_no_place_is_refused(
    environment: dict[str, str], key: str, value: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        place_from_environment(environment)
    faults = {fault.key: fault for fault in caught.value.faults}
    assert (faults[key].value, faults[key].rule) == (value, rule)


def test_all_faults_at_once_each_with_a_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        place_from_environment({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    keys = [fault.key for fault in caught.value.faults]
    assert keys == ["RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    assert str(caught.value.faults[0]) == (
        "RANK=x is not a whole number from 0 up; start the ranks with torchrun, which sets its "
        "variables itself, or unset them"
    )


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("localhost", "localhost"),
        ("gpu[003-007,012]", "gpu003"),
        ("gpu[12,003]", "gpu12"),
        ("login1,gpu[1-2]", "login1"),
        ("rack[1-2]n[04-08]-ib", "rack1n04-ib"),
        ("a-1.b,c", "a-1.b"),
    ],
)
def test_the_first_host_of_a_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", ",", "gpu[", "gpu[]", "gpu[a-b]", "gpu]1", "a b"])
def test_what_is_no_node_list(node_list: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(node_list)}$"):
        first_host(node_list)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1))
def test_tasks_per_node_undoes_slurms_shorthand(runs: list[tuple[int, int]]) -> None:
    shorthand = ",".join(f"{n}(x{times})" if times > 1 else f"{n}" for n, times in runs)
    expected = [n for n, times in runs for _ in range(times)]
    assert list(tasks_per_node(shorthand)) == expected
