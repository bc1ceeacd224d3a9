"""The files for sbatch: golden files, and what holds for the step of any job."""

import os
import shlex
from difflib import unified_diff
from pathlib import Path

import pytest
from tests.unit.test_started_elsewhere import request_of

from whale_train.errors import ConfigError
from whale_train.launcher.slurm.sbatch_file import Component, SbatchFile
from whale_train.launcher.slurm.submit import Submission, planned_file, sbatch_file

GOLDEN = Path(__file__).parents[1] / "golden"
REGENERATE = "REGENERATE_GOLDEN=1 python -m pytest tests/unit/test_sbatch_file.py -k golden"
V100 = "devices: 8, device: v100_sxm2_32gb, link: nvlink2"
P100 = "devices: 8, device: p100_pcie_16gb, link: pcie3_x16"
T4 = "devices: 2, device: t4_16gb, link: pcie3_x16"
NEW, OLD = (
    "slurm: {partition: new, constraint: v100}",
    "slurm: {partition: old, gres: 'gpu:p100:8'}",
)
# Overrides of the request, and the number of jobs.
GOLDEN_FILES = {
    "slurm_one_node": (("hardware=dgx_a100", "launcher.sbatch={gres: 'gpu:8', time: 90}"), 1),
    "slurm_two_partitions": (
        (
            *("hardware=v100_p100_mix", f"hardware.nodes=[{{{V100}, {NEW}}},{{{P100}, {OLD}}}]"),
            *("launcher.sbatch={account: whale, constraint: fast}", "checkpoint.every=100"),
        ),
        1,
    ),
    "slurm_three_kinds": (
        (
            "hardware=v100_p100_mix",
            f"hardware.nodes=[{{count: 4, {V100}, slurm: {{cpus_per_task: 8}}}},"
            f"{{count: 2, devices: 4, device: p100_pcie_16gb, link: pcie3_x16}},"
            f"{{{T4}, slurm: {{cpus_per_task: 2, mem: 30G}}}}]",
            "launcher.sbatch.cpus_per_task=4",
        ),
        1,
    ),
    "slurm_array": (("hardware=dgx_a100", "checkpoint.every=100"), 3),
    "slurm_cpus": (
        (
            *("hardware=cpu", "hardware.devices=8", "launcher.nodes=4"),
            *("launcher.ranks_per_node=2", "launcher.sbatch={exclusive: true, overcommit: false}"),
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_golden_files(name: str) -> None:
    overrides, num_jobs = GOLDEN_FILES[name]
    path = GOLDEN / f"{name}.sh"
    request = request_of("launcher=slurm", *overrides)
    run_dir = Path("/runs/a b")
    submission = Submission.of(request, ["seed=1", "data.field='a b'"], run_dir, commands=())
    at = run_dir / "slurm" / "submission.sh"
    text = sbatch_file(submission, at, Path("/home/user"), num_jobs, "/opt/bin/python").text()
    if os.environ.get("REGENERATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != golden:
        lines = unified_diff(golden.splitlines(), text.splitlines(), name, "now", n=2, lineterm="")
        pytest.fail("\n".join([*lines, f"if the new file is right: {REGENERATE}"]), pytrace=False)


@pytest.mark.parametrize("cores", [(), (2,), (2, 2, 2), (2, 4), (2, 2, 4), (None, 4)])
def test_every_component_is_in_the_step_once_with_its_cores(cores: tuple[int | None, ...]) -> None:
    options = [{} if number is None else {"cpus-per-task": number} for number in cores or [None]]
    file = SbatchFile(
        tuple(Component(1, 1, own) for own in options), ("true",), srun={"label": True}
    )
    *_, step = file.text().replace("\\\n", " ").splitlines()
    program, *words = shlex.split(step)
    assert program == "srun"
    groups: list[tuple[str, str | None]] = []
    for part in " ".join(words).split(" : "):
        own = dict(word.lstrip("-").partition("=")[::2] for word in part.split()[:-1])
        assert own.pop("label") == ""
        first, _, last = own.pop("het-group", "0").partition("-")
        numbers = range(int(first), int(last or first) + 1)
        groups += [(str(number), own.get("cpus-per-task")) for number in numbers]
        assert part.endswith("${command[@]}")
    expected = [None if number is None else str(number) for number in cores or [None]]
    assert groups == [(str(number), own) for number, own in enumerate(expected)]


def test_a_planned_job_trains_below_the_plan() -> None:
    given = ("mode=plan", "++rehearse=true", "hydra.run.dir=/p", "seed=2", "--config-dir=/c")
    request = request_of("launcher=slurm", "mode=plan", "hardware=dgx_a100")
    command = planned_file(request, given, Path("/p")).command
    start = command.index("--")
    assert "--folder=/p/slurm" in command[:start]
    assert command[start + 1 :] == (
        *("hydra.run.dir=/p/run", "seed=2", "--config-dir=/c", "launcher.kind=auto"),
    )
    with pytest.raises(ConfigError, match=r"launcher\.ranks_per_node=null is not known"):
        planned_file(request_of("launcher=slurm", "mode=plan"), given, Path("/p"))
