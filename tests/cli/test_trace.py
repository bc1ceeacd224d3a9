"""`train.trace=true`: a timeline of what every rank did, of whatever strategy."""

import json
from pathlib import Path

import pytest
from tests.cli.command import whale_train

STEPS = 2
# What a rank does in a step, of any micro-batch, in order.
WHOLE = ["data", "forward", "backward", "update", "metrics"]
ACCUMULATED = ["data", *["forward", "backward"] * 2, "update", "metrics"]
FIRST = ["data", *["forward", "send"] * 2, *["receive_gradient", "backward"] * 2]
LAST = ["data", *["receive", "forward", "backward", "send_gradient"] * 2, "update", "metrics"]


@pytest.mark.parametrize(
    ("strategy", "events"),
    [
        (("strategy=dp", "train.accumulate=2"), [ACCUMULATED, ACCUMULATED]),
        (("strategy=hybrid_split_dp",), [WHOLE, WHOLE]),
        (
            ("strategy.graph={pipeline: {stages: 2, schedule: gpipe, micro_batches: 2}}",),
            [[*FIRST, "update", "metrics"], LAST],
        ),
    ],
    ids=["dp", "hybrid", "pipeline"],
)
def test_a_timeline_has_every_step_of_every_rank(
    strategy: tuple[str, ...], events: list[list[str]], tmp_path: Path
) -> None:
    answer = whale_train(
        [
            *("model=gpt", "model.width=32", "model.depth=2", "model.heads=2"),
            *("hardware=cpu", "hardware.devices=2", "train.global_batch=4", "hydra.run.dir=run"),
            *(f"train.steps={STEPS}", "train.trace=true", *strategy),
        ],
        tmp_path,
    )
    assert answer.status == 0, answer.stderr
    timeline = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    for rank, expected in enumerate(events):
        mine = [e for e in timeline if e["pid"] == rank and e["ph"] == "X"]
        names = [e["name"] if e["cat"] == "step" else e["cat"] for e in mine]
        assert names.count("forward and backward") == STEPS  # around those of all micro-batches
        assert sorted(names) == sorted([*expected, "forward and backward"] * STEPS)
        assert all(e["dur"] >= 0 for e in mine)
        ends = [e["ts"] + e["dur"] for e in mine]
        assert ends == sorted(ends)


LATE = """
import time

class Late:
    def save(self, step, folder):
        time.sleep(1)
"""


def test_a_profile_has_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    """Beside a timeline. Rank 0 is late, and the other rank has left both when it looks."""
    (tmp_path / "late.py").write_text(LATE)
    answer = whale_train(
        [
            *("model=gpt", "model.width=32", "model.depth=2", "model.heads=2", "strategy=zero1"),
            *("hardware=cpu", "hardware.devices=2", "train.global_batch=4", "hydra.run.dir=run"),
            *("train.steps=5", "train.profile=[3,4]", "train.trace=true"),
            *("checkpoint.final=false", "checkpoint.every=5", "callbacks.late._target_=late.Late"),
        ],
        tmp_path,
    )
    assert answer.status == 0, answer.stderr
    files = sorted(path.name for path in (tmp_path / "run/profile").iterdir())
    assert files == ["rank_0.json", "rank_1.json"]
    for name in files:
        events = json.loads((tmp_path / "run/profile" / name).read_text())["traceEvents"]
        # Each step has one loss, and so has what was recorded.
        losses = [e for e in events if e.get("name") == "aten::cross_entropy_loss"]
        assert len(losses) == 2
    timeline = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    ranks = sorted(e["pid"] for e in timeline if e["name"] == "forward and backward")
    assert ranks == [0] * 5 + [1] * 5
