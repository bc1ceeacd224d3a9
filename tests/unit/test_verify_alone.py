"""The one process that a plan is verified against."""

from tests.unit import nvml_machines as machines
from tests.unit.operation_graphs import gpt
from tests.unit.test_devices_here import inventory, machine, planned, request

from whale_train.launcher.modes.verify import on_one_process
from whale_train.launcher.planning.devices.devices_here import where
from whale_train.launcher.planning.plan_request import Resolved


def test_one_process_of_a_verification_has_the_first_card() -> None:
    asked = request("mode=verify", "strategy=dp")
    there = [machine(machines.V100_32, machines.V100_32)]
    place = where(asked, inventory((2, "v100_sxm2_32gb")), there)
    plan = planned(place, there)
    resolved = Resolved(plan, place.cluster, gpt(), place.device, False, 48)
    _, alone = on_one_process(asked, resolved)
    assert [rank.uuid for rank in alone.plan.ranks] == [plan.ranks[0].uuid]
    assert plan.ranks[0].uuid is not None
