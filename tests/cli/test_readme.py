"""Every command of README.md's blocks, read there: its overrides are those of a plan.

What trains or starts ranks on other hosts is planned, and what rehearses, keeps, resumes and
exports is run as well. A full run verifies, sweeps and calibrates too, trains the Hugging Face
example, and plans what takes long to plan.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.cli.command import ROOT, environment_for, whale_train
from tests.docs.sample_files import GROUPS, write_files

from whale_train.rehearsal import Rehearsal

_SLOW = ("m6_10b", "model=bert_large", "resnet50_100k", "v100_512", "strategy=auto", "auto]")
_STUDY = "hydra/sweeper=optuna"
_PLANNED = ("mode=plan", "mode=rehearse", "mode=verify", "mode=calibrate")


def blocks() -> list[tuple[str, str]]:
    """Return the fenced blocks of README.md: the kind each is of, and its text."""
    parts = re.split(r"^```(.*)\n", (ROOT / "README.md").read_text(), flags=re.M)
    return list(zip(parts[1::4], parts[2::4], strict=True))


def commands() -> list[str]:
    """Return the commands of the blocks: lines joined at backslashes, without comments."""
    lines = "".join(text for kind, text in blocks() if not kind).replace("\\\n", " ").splitlines()
    starts = ("whale-train ", "torchrun ", "srun ", "make ")
    return [re.sub(r"\s+#\s.*", "", line).strip() for line in lines if line.startswith(starts)]


COMMANDS = commands()
OURS = [command for command in COMMANDS if "whale-train" in command]


def overrides_of(command: str) -> list[str]:
    """Return what is given to whale-train, whoever starts it."""
    words = shlex.split(command.replace('"$(which whale-train)"', "whale-train"))
    return words[words.index("whale-train") + 1 :]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the commands name."""
    write_files(tmp_path, tuple(group for group in GROUPS if group != "llama"))
    return tmp_path


def test_the_blocks_are_read() -> None:
    assert len(OURS) > 30
    assert {"make train", "make test"} <= {command.split("  ")[0] for command in COMMANDS}


TO_PLAN = [
    pytest.param(x, marks=pytest.mark.full) if any(word in x for word in _SLOW) else x
    for x in OURS
    if "mode=export" not in x and "mode=audit" not in x and _STUDY not in x
]


@pytest.mark.parametrize("command", TO_PLAN)
def test_a_command_of_the_readme_has_a_plan(command: str, folder: Path) -> None:
    given = overrides_of(command)
    if "model.pretrained=DIR" in given:
        write_files(folder, ("llama",))
    modes = [word for word in given if word in _PLANNED]
    kept = [x for x in given if x not in modes and not x.startswith("train.resume")]
    kept = [x for x in kept if x not in ("-m", "launcher.wait=false")]
    for number, job in enumerate(jobs_of(kept)):
        run = folder / f"planned_{number}"
        job = [x for x in job if not x.startswith("hydra.run.dir")]
        job = [x for x in job if not x.startswith(("launcher.device_speed", "launcher.link_speed"))]
        where = ["--config-dir", "conf", "mode=plan", f"hydra.run.dir={run}"]
        answer = whale_train([*job, *where], folder)
        assert (answer.status, answer.stderr) == (0, "")
        wrote = list(run.glob("plan.json")) or list(run.glob("plans/*.json"))
        assert wrote
        assert json.loads(wrote[0].read_text())["world_size"] >= 1


def jobs_of(given: list[str]) -> list[list[str]]:
    """Return the jobs of a sweep over one key, or the one job."""
    for place, word in enumerate(given):
        key, _, value = word.partition("=")
        if re.fullmatch(r"[\w.]+(,[\w.]+)+", value):
            return [[*given[:place], f"{key}={x}", *given[place + 1 :]] for x in value.split(",")]
    return [given]


@pytest.mark.full
def test_the_model_of_hugging_face_learns(folder: Path) -> None:
    """The loss falls from that of bytes drawn alike (5.5), in the first steps already."""
    (command,) = (x for x in OURS if "GPT2LMHeadModel" in x)
    answer = whale_train([*overrides_of(command), "hydra.run.dir=run"], folder)
    assert (answer.status, answer.stderr) == (0, "")
    losses = [
        json.loads(x)["loss"] for x in (folder / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert losses[0] > 5
    assert losses[-1] < 4


def test_the_example_of_a_refusal_is_one(folder: Path) -> None:
    answer = whale_train(
        ["mode=plan", "hardware=v100_p100_mix", "strategy=dp", "strategy.graph.replicate.degree=3"],
        folder,
    )
    assert answer.status == 2
    (shown,) = (text for _, text in blocks() if text.startswith("error: "))
    assert " ".join(answer.stderr.split()) == " ".join(shown.split())


def test_the_inventory_that_is_shown_is_the_built_in_one() -> None:
    (shown,) = (text for kind, text in blocks() if kind == "yaml" and "v100_p100_mix" in text)
    built_in = (ROOT / "conf/hardware/v100_p100_mix.yaml").read_text()
    assert yaml.safe_load(shown) == yaml.safe_load(built_in)


def command_with(*words: str) -> list[str]:
    """Return the overrides of the first command that has all `words`."""
    return next(overrides_of(x) for x in OURS if all(word in x for word in words))


@pytest.mark.full
@pytest.mark.parametrize("command", [x for x in OURS if "mode=verify" in x])
def test_a_verification_of_the_readme_finds_the_plan_equal(command: str, folder: Path) -> None:
    answer = whale_train([*overrides_of(command), "hydra.run.dir=run"], folder)
    assert (answer.status, answer.stderr) == (0, "")
    verified = json.loads((folder / "run/verify.json").read_text())
    assert (verified["verdict"], verified["ranks"], verified["steps"]) == ("equal", 2, 3)


def test_the_rehearsal_of_the_readme_goes_through_a_rank_of_each_kind(folder: Path) -> None:
    answer = whale_train([*command_with("mode=rehearse"), "hydra.run.dir=run"], folder)
    assert (answer.status, answer.stderr) == (0, "")
    rehearsed = Rehearsal.from_json((folder / "run/rehearsal.json").read_text())
    assert not rehearsed.faults
    assert sorted(rank for kind in rehearsed.kinds for rank in kind.ranks) == list(range(16))
    assert all(kind.peak > 0 and not kind.error for kind in rehearsed.kinds)


@pytest.mark.full
@pytest.mark.parametrize("command", sorted({x for x in OURS if "mode=calibrate" in x}))
def test_a_calibration_of_the_readme_measures_this_machine(command: str, folder: Path) -> None:
    kept = {"WHALE_TRAIN_CALIBRATIONS": str(folder / "kept")}
    answer = whale_train([*overrides_of(command), "hydra.run.dir=run"], folder, kept)
    assert (answer.status, answer.stderr) == (0, "")
    assert list((folder / "kept").iterdir())
    measured = json.loads((folder / "run/calibration.json").read_text())
    assert measured["devices"]


def test_the_study_of_plans_of_the_readme_has_a_best(folder: Path) -> None:
    few = ("hydra.sweep.dir=study", "hydra.sweeper.n_trials=2")
    answer = whale_train([*command_with(_STUDY, "mode=plan"), *few], folder)
    assert (answer.status, answer.stderr) == (0, "")
    best = yaml.safe_load((folder / "study/optimization_results.yaml").read_text())
    plans = [json.loads((folder / f"study/{i}/plan.json").read_text()) for i in range(2)]
    assert best["best_value"] == max(plan["predicted"]["samples_per_s"] for plan in plans)


@pytest.mark.full
def test_the_study_of_trainings_of_the_readme_is_kept(folder: Path) -> None:
    few = ("train.steps=10", "hydra.sweeper.n_trials=2", "hardware=cpu", "hardware.devices=1")
    answer = whale_train([*command_with(_STUDY, "pruner"), *few], folder)
    assert (answer.status, answer.stderr) == (0, "")
    assert (folder / "study.db").exists()


@pytest.mark.full
def test_the_sweep_of_the_readme_ends_in_one_table(folder: Path) -> None:
    swept = command_with("-m strategy=")
    answer = whale_train([*swept, "train.steps=2", "hydra.sweep.dir=sweep"], folder)
    assert (answer.status, answer.stderr) == (0, "")
    table = answer.stdout[answer.stdout.rindex("strategy") :]
    assert [name for name in ("dp", "zero1", "zero3") if name in table] == ["dp", "zero1", "zero3"]


def test_a_run_of_the_readme_is_kept_resumed_exported_and_audited(folder: Path) -> None:
    """The checkpoints of its hundred steps, here of four: the second command goes on from there."""

    def shorter(command: list[str], steps: int) -> list[str]:
        changed = [x.replace("checkpoint.every=100", "checkpoint.every=2") for x in command]
        return [*changed, f"train.steps={steps}", "hardware=cpu", "hardware.devices=2"]

    first, second = command_with("checkpoint.keep=3"), command_with("zero3", "train.resume=auto")
    exports = [overrides_of(x) for x in OURS if "mode=export" in x or "mode=audit" in x]
    answers = [whale_train(shorter(first, 4), folder), whale_train(shorter(second, 6), folder)]
    answers += [whale_train([x.replace("_100", "_4") for x in y], folder) for y in exports]
    assert [(x.status, x.stderr) for x in answers] == [(0, "")] * 6
    run = folder / "runs/mine"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6
    assert sorted(x.name for x in (run / "checkpoints").iterdir()) == ["step_2", "step_4", "step_6"]
    assert (folder / "step_4/model/model.safetensors").exists()
    # The run's own, and one in the directory of each export.
    assert len(list(folder.rglob("model.safetensors"))) == 3


@pytest.mark.full
def test_the_program_of_the_readme_trains_and_verifies(folder: Path) -> None:
    (program,) = (text for kind, text in blocks() if kind == "python" and "whale_train" in text)
    command = [sys.executable, "-c", f"{program}\nprint(len(losses), same, shown.world_size > 0)"]
    done = subprocess.run(
        command, cwd=folder, env=environment_for(folder), capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("20 True True\n", "")
    assert (folder / "runs" / "from_python" / "model").is_dir()
