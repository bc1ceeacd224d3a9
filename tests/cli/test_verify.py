"""`mode=verify` as a user runs it: what it says, what it leaves, and its exit status."""

import json
import re
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from tests.cli.command import Answer, whale_train

COMMON = (
    *("mode=verify", "hardware=cpu", "hardware.devices=2", "hydra.run.dir=run"),
    *("train.steps=9", "train.global_batch=6"),
)
GPT2 = (
    *("model=hf", "model.architecture=GPT2LMHeadModel", "data.sequence_length=16"),
    "model.config={vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 1, n_head: 2, "
    "bos_token_id: 0, eos_token_id: 0}",
)


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    folder = tmp_path_factory.mktemp("equal")
    return folder, whale_train([*COMMON, *GPT2, "strategy=zero2", "verify.steps=2"], folder)


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run/verify.json").read_text())
    return found


def test_an_equal_plan_is_said_to_be_and_is_done(equal: tuple[Path, Answer]) -> None:
    folder, answer = equal
    assert (answer.status, answer.stderr) == (0, "")
    assert answer.left_running == ()
    assert "\x1b" not in answer.stdout
    lines = answer.stdout.splitlines()
    assert (
        lines[-1] == "equal: 2 steps on 2 ranks computed what one process does, within 2e-05 (fp32)"
    )
    assert "dropout was off: its masks differ from plan to plan" in lines
    shared = "; ".join(written(folder)["shared"])
    assert f"not compared, as both sides share it: {shared}" in " ".join(lines)
    (header,) = (i for i, line in enumerate(lines) if line.startswith("compared "))
    rows = [line.split() for line in lines[header + 1 : header + 11]]
    assert [row[0] for row in rows[:2]] == ["loss", "gradient"]
    for row in rows[2:]:
        assert row[0].startswith("transformer.")
        assert row[1] in ("gradient", "update")
        assert float(row[-3]) < 1e-3
        assert row[-1].endswith("%")


def test_verify_json_has_both_sides_and_every_parameter(equal: tuple[Path, Answer]) -> None:
    found = written(equal[0])
    assert found["verdict"] == "equal"
    assert (found["worst"], found["losses_part_at_step"]) == (None, None)
    assert found["shared"] == [
        "the loss that GPT2LMHeadModel computes",
        "the samples of data=text and their order (seed=0, data.shuffle=true)",
        "the model's code and how its weights begin (seed=0)",
    ]
    assert (found["steps"], found["ranks"], found["tolerance"]) == (2, 2, 2e-5)
    assert found["losses"]["plan"] == pytest.approx(found["losses"]["one_process"], rel=1e-6)
    metrics = (equal[0] / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in metrics] == found["losses"]["plan"]
    parameters = {x["path"] for x in found["differences"]} - {""}
    plan = json.loads((equal[0] / "run/plan.json").read_text())
    assert parameters == set(plan["task_graphs"][0]["trained"])
    assert len(parameters) == 16  # of a GPT-2 of one block
    # wte, wpe, the block (attention, MLP, two norms), the last norm.
    assert found["elements"] == 256 * 16 + 16 * 16 + (16 * 64 + 64 + 128 * 16 + 80 + 64) + 32


def test_what_is_not_within_the_tolerance_fails_and_is_named(tmp_path: Path) -> None:
    """A tolerance that no fp32 arithmetic keeps."""
    arguments = [*COMMON, *GPT2, "strategy=dp", "verify.tolerance=1e-12", "verify.steps=3"]
    answer = whale_train(arguments, tmp_path)
    assert answer.status == 1
    assert answer.left_running == ()
    found = written(tmp_path)
    assert found["verdict"] == "different"
    differences = {(x["path"], x["what"]): x for x in found["differences"]}
    worst = differences[found["worst"], "gradient"]
    assert not worst["within"]
    of_gradients = [x["of_allowed"] for (_, what), x in differences.items() if what == "gradient"]
    assert worst["of_allowed"] == max(of_gradients)
    apart = [
        step + 1
        for step, (a, b) in enumerate(zip(*found["losses"].values(), strict=True))
        if abs(a - b) > 1e-12 * abs(b)
    ]
    assert found["losses_part_at_step"] == (apart[0] if apart else None)
    losses = (
        rf"the losses part at step {apart[0]} \(by \S+ of its size, 1.0e-12 being allowed\)"
        if apart
        else "the losses agree"
    )
    path = re.escape(found["worst"])
    said = (
        r"different: 3 steps on 2 ranks did not compute what one process does: the gradient of "
        rf"{path} is off by \S+ of its size, 1.0e-12 being allowed; {losses}"
    )
    assert re.fullmatch(rf"error: {said}; see \S+/run/verify.json\n", answer.stderr)
    assert "equal:" not in answer.stdout


@pytest.mark.full
def test_what_rounding_decides_is_measured(tmp_path: Path) -> None:
    """A model with a kink: one process is as far from itself, with other roundings."""
    copy(Path(__file__).parents[1] / "distributed/kinked_model.py", tmp_path)
    model = ("model._target_=kinked_model.Kinked", "data=classes", "data.num_classes=10")
    arguments = [*COMMON, *model, "strategy=dp", "optimizer=sgd", "verify.steps=1"]
    answer = whale_train(arguments, tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    assert answer.left_running == ()
    lines = " ".join(answer.stdout.split())
    assert "not within 2e-05 of one process; running that 3 times more with weights" in lines
    assert "rounding alone, in 3 runs of one process with weights rounded otherwise" in lines
    said = r"equal: 1 step on 2 ranks computed what one process does, within 2e-05 \(fp32\) or 2 "
    said += r"times what rounding does to this model, \S+ at most$"
    assert re.search(said, lines)
    found = written(tmp_path)
    (gradients,) = (x for x in found["rounding"] if x["what"] == "gradient")
    assert gradients["allowed"] == 2 * gradients["of_allowed"] > 2
    assert {(x["what"], x["step"]) for x in found["rounding"]} == {
        *(("loss", 1), ("gradient norm", 1), ("gradient", 1), ("update", 1), ("buffer", 1)),
    }


def test_ranks_started_from_outside_are_refused(tmp_path: Path) -> None:
    place = {
        **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"},
    }
    answer = whale_train([*COMMON, "mode=plan"], tmp_path, place)
    assert answer.status == 2
    assert answer.stderr == (
        "error: mode=plan needs no ranks, and some were started from outside; run it without "
        "torchrun or srun\n"
    )
