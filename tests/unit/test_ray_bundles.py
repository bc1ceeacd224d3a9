"""What `launcher=ray` asks of a cluster, and which ranks each node starts."""

from collections.abc import Mapping

import pytest
from tests.unit.test_started_elsewhere import MIX, request_of

from whale_train.errors import ConfigError
from whale_train.launcher.ranks.elsewhere import starts_of
from whale_train.launcher.ranks.on_ray.bundles import Bundles, RayNode, bundles_of
from whale_train.launcher.ranks.on_ray.run_on_ray import bundles_by_host, starts_by_bundle

BYTES = {"memory": 1e9, "object_store_memory": 1e9, "node:10.0.0.1": 1.0}


def node(number: int, **resources: float) -> RayNode:
    return RayNode(f"id{number}", f"10.0.0.{number}", f"host{number}", {**resources, **BYTES})


def asked(*overrides: str, nodes: list[RayNode]) -> Bundles:
    return bundles_of(request_of("launcher=ray", *overrides), nodes)


@pytest.mark.parametrize(
    ("resources", "bundles", "strategy"),
    [
        # The kinds by resources that the cluster defines itself.
        (
            [{"CPU": 64, "GPU": 8, "v100_sxm2_32gb": 8}, {"CPU": 64, "GPU": 8}],
            [{"CPU": 8, "GPU": 8, "v100_sxm2_32gb": 8}, {"CPU": 8, "GPU": 8}],
            "STRICT_SPREAD",
        ),
        # By the kinds that Ray finds.
        (
            [{"GPU": 8, "accelerator_type:V100": 1}, {"GPU": 8, "accelerator_type:P100": 1}],
            [
                {"CPU": 8, "GPU": 8, "accelerator_type:V100": 0.001},
                {"CPU": 8, "GPU": 8, "accelerator_type:P100": 0.001},
            ],
            "STRICT_SPREAD",
        ),
        # CPU processes that emulate them, on two hosts and on one.
        (
            [{"CPU": 8, "p100_pcie_16gb": 8}, {"CPU": 8}],
            [{"CPU": 8}, {"CPU": 8, "p100_pcie_16gb": 8}],
            "STRICT_SPREAD",
        ),
        ([{"CPU": 16}], [{"CPU": 8}, {"CPU": 8}], "STRICT_PACK"),
    ],
)
def test_a_bundle_is_a_node_of_the_inventory(
    resources: list[Mapping[str, float]], bundles: list[Mapping[str, float]], strategy: str
) -> None:
    nodes = [node(number, **offered) for number, offered in enumerate(resources)]
    found = asked(MIX, nodes=nodes)
    assert [dict(bundle) for bundle in found.resources] == bundles
    assert (found.ranks, found.strategy, found.labels) == ((8, 8), strategy, ())


@pytest.mark.parametrize(
    ("overrides", "resources", "bundles", "ranks", "strategy"),
    [
        (["hardware=cpu", "hardware.devices=3"], [{"CPU": 4}], [{"CPU": 1}] * 3, (1,) * 3, "PACK"),
        (
            ["hardware=cpu", "hardware.devices=2", "launcher.threads=4"],
            [{"CPU": 8, "GPU": 2}],
            [{"CPU": 4}] * 2,
            (1, 1),
            "PACK",
        ),
        ([], [{"CPU": 9, "GPU": 2}, {"CPU": 4}], [{"GPU": 2}], (2,), "STRICT_SPREAD"),
        ([], [{"CPU": 2}, {"CPU": 4}], [{"CPU": 2}, {"CPU": 4}], (2, 4), "STRICT_SPREAD"),
    ],
)
def test_devices_without_nodes(
    overrides: list[str],
    resources: list[Mapping[str, float]],
    bundles: list[Mapping[str, float]],
    ranks: tuple[int, ...],
    strategy: str,
) -> None:
    nodes = [node(number, **offered) for number, offered in enumerate(resources)]
    found = asked(*overrides, nodes=nodes)
    assert [dict(bundle) for bundle in found.resources] == bundles
    assert (found.ranks, found.strategy) == (ranks, strategy)


def test_nodes_are_chosen_by_name() -> None:
    nodes = [node(number, CPU=8) for number in range(3)]
    found = asked(MIX, "launcher.hosts=[host2,10.0.0.0]", nodes=nodes)
    assert [dict(x) for x in found.labels] == [
        {"ray.io/node-id": "in(id2)"},
        {"ray.io/node-id": "in(id0)"},
    ]
    few = ("hardware=cpu", "hardware.devices=2", "launcher.hosts=[id0,id2]")
    assert [dict(x) for x in asked(*few, nodes=nodes).labels] == [
        {"ray.io/node-id": "in(id0,id2)"}
    ] * 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [MIX, "launcher.hosts=[id0]"],
            "launcher.hosts=10.0.0.0 are 1, and hardware=v100_p100_mix has 2 nodes; name a Ray "
            "node for each node, in their order",
        ),
        (
            [MIX, "launcher.hosts=[id0,fig]"],
            "launcher.hosts[1]=fig names no living node of the Ray cluster; use an id: id0 "
            "(10.0.0.0), id1 (10.0.0.1)",
        ),
        (
            ["hardware=cpu"],
            "hardware=cpu finds no CPU in the Ray cluster: 10.0.0.0 has nothing, 10.0.0.1 has "
            "nothing; add a node that has some",
        ),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked(*overrides, nodes=[node(0), node(1)])
    assert [str(fault) for fault in error.value.faults] == [said]


def test_bundles_of_a_host_have_its_ranks() -> None:
    """Ray packed four bundles on two nodes, not in their order."""
    by_host = bundles_by_host(["a", "b", "a", "a"])
    starts = starts_of(["x=1"], [4, 2], "10.0.0.1", 5000)
    found = starts_by_bundle(starts, by_host, [1, 2, 2, 1])
    ranks = [[int(rank["RANK"]) for rank in start.ranks] for start in found]
    assert ranks == [[0], [4, 5], [1, 2], [3]]
    assert [start.ranks[0]["GROUP_RANK"] for start in found] == ["0", "1", "0", "0"]
    assert [start.ranks[0]["LOCAL_WORLD_SIZE"] for start in found] == ["4", "2", "4", "4"]
    assert {start.environment["WORLD_SIZE"] for start in found} == {"6"}
    assert len({start.environment["WHALE_TRAIN_SECRET"] for start in found}) == 1
