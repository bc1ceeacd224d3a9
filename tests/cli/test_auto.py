"""`strategy=auto` as a user meets it: found, shown, kept as a file, used again, trained."""

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.cli.command import whale_train

MIXED = ("hardware=v100_p100_mix", "train.global_batch=64", "hydra.run.dir=found")


def test_what_is_found_can_be_used_again(tmp_path: Path) -> None:
    answer = whale_train(["mode=plan", "strategy=auto", *MIXED], tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    said = " ".join(answer.stdout.split())
    assert re.search(r"the fastest of \d+ strategies simulated, of [\d,]+ estimated", said)
    assert "whatever the details" not in said
    assert f"the strategy, as a file: {tmp_path / 'found' / 'strategy.yaml'}" in answer.stdout
    text = (tmp_path / "found" / "strategy.yaml").read_text()
    assert text.startswith("# Found for model=gpt hardware=v100_p100_mix train.global_batch=64\n")
    folder = tmp_path / "mine" / "strategy"
    folder.mkdir(parents=True)
    (folder / "found.yaml").write_text(text)
    options = ["--config-dir", str(tmp_path / "mine"), "mode=plan", *MIXED[:2]]
    again = whale_train([*options, "strategy=found"], tmp_path)
    assert again.status == 0, again
    (step,) = set(re.findall(r"predicted +(.*) a step", answer.stdout))
    assert step in again.stdout
    compared = whale_train([*options, "compare=[found,dp,auto]"], tmp_path)
    assert compared.status == 0, compared
    rows = {line.split(",")[0].split()[0]: line for line in compared.stdout.splitlines() if line}
    assert "fastest" in rows["auto"]
    assert "fastest" in rows["found"]
    assert "fastest" not in rows["dp"]


def test_what_is_found_is_trained(tmp_path: Path) -> None:
    asked = ["strategy=auto", "hardware=cpu", "hardware.devices=2", "experiment=smoke"]
    answer = whale_train([*asked, "hydra.run.dir=run"], tmp_path)
    assert answer.status == 0, answer
    assert answer.left_running == ()
    written = yaml.safe_load((tmp_path / "run" / "strategy.yaml").read_text())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert set(written) <= {"graph", "devices"}
    assert plan["world_size"] == sum(written.get("devices", {"cpu_process": 2}).values())
    assert plan["decisions"][0]["key"] == "strategy.graph"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 5


def test_devices_in_the_middle_of_an_inventory_stay_idle(tmp_path: Path) -> None:
    """What is used are the first and the last node; ranks are numbered without the others."""
    hardware, strategy = tmp_path / "mine" / "hardware", tmp_path / "mine" / "strategy"
    hardware.mkdir(parents=True)
    strategy.mkdir()
    nodes = [
        {"count": 1, "devices": count, "device": device, "link": "pcie3_x16"}
        for device, count in (("v100_sxm2_32gb", 1), ("p100_pcie_16gb", 2), ("v100_sxm2_32gb", 1))
    ]
    inventory = {"nodes": nodes, "network": "ethernet_50g"}
    (hardware / "apart.yaml").write_text(yaml.safe_dump(inventory))
    stages = [{"stage": {"device": "v100_sxm2_32gb"}}] * 2
    graph = {"pipeline": {"micro_batches": 4, "stages": stages}}
    file = {"devices": {"v100_sxm2_32gb": 2}, "graph": graph}
    (strategy / "ends.yaml").write_text(yaml.safe_dump(file))
    asked = ["--config-dir", str(tmp_path / "mine"), "experiment=smoke", "hardware=apart"]
    asked += ["~hardware.devices", "launcher=emulate", "strategy=ends", "hydra.run.dir=run"]
    answer = whale_train(asked, tmp_path)
    assert answer.status == 0, answer
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    ranks = [(rank["rank"], rank["node"], rank["device"]) for rank in plan["ranks"]]
    assert ranks == [(0, 0, "v100_sxm2_32gb"), (1, 1, "v100_sxm2_32gb")]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 5


@pytest.mark.full
def test_ten_trillion_parameters_fit_where_hosts_keep_them(tmp_path: Path) -> None:
    asked = ["mode=plan", "strategy=auto", "model=m6_10t", "hardware=v100_512"]
    answer = whale_train([*asked, "train.global_batch=64"], tmp_path)
    assert answer.status == 0, answer
    assert "ZeRO 3, optimizer on cpu, parameters on cpu" in answer.stdout
    assert "of whose memory hardware=v100_512 says nothing" in " ".join(answer.stdout.split())


@pytest.mark.full
def test_nothing_fits(tmp_path: Path) -> None:
    asked = ["mode=plan", "strategy=auto", "model=m6_10t", "hardware=v100_p100_mix"]
    answer = whale_train(asked, tmp_path)
    assert answer.status == 2, answer
    assert "strategy=auto finds no strategy whose weights, gradients and optimizer" in answer.stderr
    assert "use more devices" in " ".join(answer.stderr.split())
