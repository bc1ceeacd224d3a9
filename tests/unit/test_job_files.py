"""What a schedule reads of its jobs' metrics."""

import json
from pathlib import Path

from whale_train.launcher.schedule.job_files import has_stepped_after, last_step, step_s_after


def metrics(run_dir: Path, steps: int, cut: str = "") -> None:
    lines = [json.dumps({"step": x, "step_time_s": 0.1 * x, "text": "x" * 99}) for x in
             range(1, steps + 1)]  # fmt: skip
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines, cut]))


def test_the_last_whole_line_is_the_last_step(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    metrics(tmp_path, 2_000, '{"step": 20')  # several times what is read of it
    assert last_step(tmp_path) == 2_000
    assert has_stepped_after(tmp_path, 1_999)
    assert not has_stepped_after(tmp_path, 2_000)


def test_first_steps_of_an_attempt_are_not_timed(tmp_path: Path) -> None:
    metrics(tmp_path, 16)
    assert step_s_after(tmp_path, 10) is None  # four steps after two
    assert step_s_after(tmp_path, 9) == 0.1 * 14
