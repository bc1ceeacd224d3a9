"""`mode=schedule launcher=ray`: jobs that shrink for a late one, on two Ray nodes."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_schedule import FAST, SLOW, losses, written
from tests.distributed.jobs import Job, job_in
from tests.distributed.ray_nodes import OPEN, ray_nodes
from tests.distributed.test_on_ray import P100, V100, assert_nothing_left

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray"),
    pytest.mark.xdist_group("ray"),
]
HARDWARE = (
    "hardware=v100_p100_mix",
    f"hardware.nodes=[{{devices: 2, device: {V100}, link: nvlink2}},"
    f"{{devices: 2, device: {P100}, link: pcie3_x16}}]",
)
STEPS = 50


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_jobs_make_room_for_a_late_one(job: Job, tmp_path: Path) -> None:
    own: dict[str, list[str]] = {"a": [], "b": ["seed=1"]}
    jobs: list[dict[str, Any]] = [
        {"name": name, "command": [*SLOW, f"train.steps={STEPS}", *words], "devices": 1}
        for name, words in own.items()
    ]
    jobs[1] |= {"guaranteed": False}
    late = {"name": "late", "command": [*SLOW, "train.steps=6"], "devices": 2, "arrival_s": 25}
    jobs.append(late)
    given = ["mode=schedule", "launcher=ray", written(job.folder, jobs), "hydra.run.dir=all"]
    given += ["schedule.round_s=1000", "schedule.reconfiguration_s=0", "schedule.plans=[]"]
    given += ["schedule.least_useful_share=0"]
    # The node that Ray knows first has the devices of the inventory's second.
    with ray_nodes(tmp_path, [{"CPU": 2, P100: 2}, {"CPU": 2, V100: 2}]) as address:
        program = ("-m", "whale_train.launcher.cli", *given, *HARDWARE)
        job.start(*program, environment={"RAY_ADDRESS": address, **OPEN})
        assert job.wait(500.0) == [0], job.said("err")
        assert_nothing_left(job)
    schedule = json.loads((job.folder / "all/schedule.json").read_text())
    assert [x["status"] for x in schedule["jobs"]] == ["done"] * 3
    held = {x["name"]: [y["devices"] for y in x["history"]] for x in schedule["jobs"]}
    assert held["late"][0] >= 2
    for name in ("a", "b"):
        assert held[name][0] == 2
        assert min(held[name]) == 1
        words = [*FAST, *own[name], f"train.steps={STEPS}", "hardware=cpu", "hardware.devices=1"]
        (tmp_path / name).mkdir()
        written(tmp_path / name, [])
        with job_in(tmp_path / name) as alone:
            alone.start("-m", "whale_train.launcher.cli", *words, "launcher.threads=1")
            assert alone.wait() == [0], alone.said("err")
            untouched = alone.losses()
        ran = losses(job.folder / "all/jobs" / name)
        assert len(ran) == STEPS
        assert ran == pytest.approx(untouched, rel=2e-5)
