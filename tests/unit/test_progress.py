"""Progress: what is read from a file still being written, and what is said of it."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from whale_train.launcher.ui.progress import (
    Progress,
    pasted_line,
    skipped_note,
    summary_line,
    unlike_predicted,
    waits_note,
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich reads these whatever console it is given."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


class Run:
    """A run directory being written, a console being read, and a clock set by hand."""

    def __init__(self, path: Path, total: int, width: int, terminal: bool, encoding: str) -> None:
        self.now_s = 0.0
        self.path = path / "metrics.jsonl"
        self.raw = io.BytesIO()
        stream = io.TextIOWrapper(self.raw, encoding=encoding, write_through=True)
        console = Console(
            file=stream,
            width=width,
            force_terminal=terminal,
            force_interactive=terminal,
            highlight=False,
            color_system="standard" if terminal else None,
        )
        self.encoding = encoding
        self.progress = Progress(path, total, console, clock=lambda: self.now_s)

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def steps(self, first: int, last: int, every_s: float = 0.1) -> None:
        """Steps written one by one, each polled for."""
        for step in range(first, last + 1):
            self.write(record(step, every_s))
            self.now_s += every_s
            self.progress.poll()

    @property
    def text(self) -> str:
        return self.raw.getvalue().decode(self.encoding)

    @property
    def frames(self) -> list[str]:
        """Each content the live line had, colours and cursor movements removed."""
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame) for frame in self.text.split("\r")]


def record(step: int, step_time_s: float = 0.1) -> str:
    values: dict[str, Any] = {
        "step": step,
        "loss": 3 - step / 1000,
        "step_time_s": step_time_s,
        "samples_per_s": 812.4,
    }
    return json.dumps(values) + "\n"


def evaluation(step: int, loss: float, accuracy: float) -> str:
    return (
        json.dumps({"step": step, "evaluation_loss": loss, "evaluation_accuracy": accuracy}) + "\n"
    )


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def made(
        total: int = 100, width: int = 120, terminal: bool = False, encoding: str = "utf-8"
    ) -> Run:
        return Run(tmp_path, total, width, terminal, encoding)

    return made


def steps_said(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/\d+ +loss", text, re.MULTILINE)]


def test_a_log_has_the_first_step_each_tenth_and_the_last(start: Start) -> None:
    run = start()
    run.steps(1, 100, every_s=0.01)
    run.progress.close()
    assert steps_said(run.text) == [1, *range(10, 101, 10)]
    assert run.text.splitlines()[1] == "step 10/100   loss 2.990  812 samples/s  ETA 0:01"
    assert "ETA" not in run.text.splitlines()[-1]


def test_a_log_of_few_steps_has_them_all(start: Start) -> None:
    run = start(total=3)
    run.steps(1, 3)
    run.progress.close()
    assert steps_said(run.text) == [1, 2, 3]


def test_steps_written_at_once_are_said_as_those_written_slowly(start: Start) -> None:
    run = start()
    run.write("".join(record(step) for step in range(1, 101)))
    run.progress.poll()
    assert steps_said(run.text) == [1, *range(10, 101, 10)]


def test_slow_steps_are_said_every_ten_seconds(start: Start) -> None:
    run = start(total=1000)
    run.steps(1, 12, every_s=4.0)
    # The first, then the first one at least 10 s after the line before it.
    assert steps_said(run.text) == [1, 4, 7, 10]


def test_a_long_start_says_nothing_before_there_is_a_step(start: Start) -> None:
    run = start(total=3)
    run.now_s = 60.0
    run.progress.poll()
    run.progress.close()
    assert run.text == ""


def test_a_run_ended_early_still_says_its_last_step_once(start: Start) -> None:
    run = start()
    run.steps(1, 17)
    run.progress.close()
    run.progress.close()
    assert steps_said(run.text) == [1, 10, 17]


def test_a_resumed_run_goes_on_where_it_was(start: Start) -> None:
    run = start()
    run.steps(51, 62)
    assert steps_said(run.text) == [51, 60]


def test_no_file_then_half_a_line_then_the_rest(start: Start) -> None:
    run = start(total=5)
    run.progress.poll()
    line = record(1)
    run.write(line[:20])
    run.progress.poll()
    assert run.text == ""
    run.write(line[20:] + record(2)[:-1])
    run.progress.poll()
    assert steps_said(run.text) == [1]
    run.write("\n")
    run.progress.poll()
    assert steps_said(run.text) == [1, 2]


def test_a_spoilt_line_is_passed_over(start: Start) -> None:
    run = start(total=5)
    run.write(record(1) + '{"step": 2, "lo\n' + record(3))
    run.progress.poll()
    assert steps_said(run.text) == [1, 3]


def test_evaluations_have_lines_of_their_own(start: Start) -> None:
    run = start()
    run.steps(1, 2)
    run.write(evaluation(2, 2.4, 0.8125))
    run.progress.poll()
    assert run.text.splitlines()[-1] == "step 2/100  evaluation loss 2.400  accuracy 81.2%"


def test_a_loss_that_is_no_number_is_shown(start: Start) -> None:
    run = start(total=2)
    run.write(record(1).replace("2.999", "NaN"))
    run.progress.poll()
    assert "loss nan" in run.text


def test_time_left_follows_the_recent_steps(start: Start) -> None:
    run = start(total=1000)
    run.write("".join(record(step, 100.0) for step in range(1, 50)))
    run.write("".join(record(step, 2.0) for step in range(50, 101)))
    run.progress.poll()
    # 900 steps of 2 s are half an hour.
    assert run.text.splitlines()[-1].endswith("ETA 30:00")


def test_a_log_has_no_control_codes_in_any_encoding(start: Start) -> None:
    run = start(encoding="ascii")
    run.steps(1, 100)
    run.progress.close()
    assert "\x1b" not in run.text
    assert "\r" not in run.text


def test_before_the_first_step_a_terminal_shows_the_time_it_takes(start: Start) -> None:
    run = start(terminal=True)
    run.progress.poll()
    run.now_s = 65.0
    run.progress.poll()
    assert [frame for frame in run.frames if frame] == [
        "starting ranks  0:00",
        "starting ranks  1:05",
    ]
    run.progress.close()
    assert run.text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


@pytest.mark.parametrize("width", [20, 50, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_has_one_line_that_never_wraps(start: Start, width: int, encoding: str) -> None:
    run = start(total=1000, width=width, terminal=True, encoding=encoding)
    run.progress.poll()
    run.steps(1, 3)
    run.write(evaluation(3, 2.4, 0.8125))
    run.steps(4, 5)
    assert "\n" not in run.text
    assert all(cell_len(frame) <= width for frame in run.frames)
    run.progress.close()
    assert run.text.endswith("\n")
    assert all(cell_len(line) <= width for frame in run.frames for line in frame.splitlines())


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (20, "step 50/100"),
        (40, "step 50/100  loss 2.950  812 samples/s"),
        (50, "step 50/100  loss 2.950  812 samples/s  0:05 left"),
        (70, "step 50/100  loss 2.950  812 samples/s  0:05 left  eval 2.400  81.2%"),
        (80, "step 50/100  ━━━━╌╌╌╌  loss 2.950  812 samples/s  0:05 left  eval 2.400  81.2%"),
    ],
)
def test_what_does_not_fit_is_left_out_least_first(start: Start, width: int, expected: str) -> None:
    run = start(width=width, terminal=True)
    run.write("".join(record(step) for step in range(1, 51)) + evaluation(50, 2.4, 0.8125))
    run.progress.poll()
    assert run.frames[-1].replace("step  ", "step ") == expected


def test_a_line_that_did_not_change_is_not_written_again(start: Start) -> None:
    run = start(terminal=True)
    run.steps(1, 1)
    before = run.text
    run.progress.poll()
    assert run.text == before


def test_the_last_line_stays_on_the_terminal(start: Start) -> None:
    run = start(terminal=True, width=50)
    run.steps(1, 100)
    run.progress.close()
    assert run.frames[-1] == "step 100/100  ━━━━━━━━  loss 2.900  812 samples/s\n"


def test_the_part_of_a_step_that_waits_for_data_is_said(start: Start) -> None:
    run = start(total=4)
    for step, waited in enumerate((0.0, 0.05, 0.1, 0.05), 1):
        line = json.loads(record(step, 0.5)) | {"data_wait_s": waited}
        run.write(json.dumps(line) + "\n")
        run.progress.poll()
    said = [re.findall(r"(\d+%) waiting for data", line) for line in run.text.splitlines()]
    assert said == [[], ["5%"], ["10%"], ["10%"]]


def test_a_line_to_paste_says_what_ran_and_what_came_of_it() -> None:
    summary = {
        "final_loss": 0.01234,
        "steps": 100,
        "trained_s": 13.2,
        "samples_per_s": 1939.4,
        "peak_memory_bytes": [2e9, 3e9],
    }
    assert pasted_line(summary, 2.5, "model=gpt strategy=dp", 2) == (
        "model=gpt strategy=dp, 2 ranks: 100 steps in 13.2 s, loss 2.500 to 0.0123, "
        "1,939 samples/s, at most 3.00 GB a rank"
    )
    alone = pasted_line({**summary, "peak_memory_bytes": []}, None, "model=gpt", 1)
    assert alone == "model=gpt, 1 rank: 100 steps in 13.2 s, loss 0.0123, 1,939 samples/s"


def test_summary_line() -> None:
    summary = {
        "final_loss": 0.01234,
        "steps": 100,
        "samples_per_s": 1939.4,
        "step_time_s_median": 0.132,
        "predicted_step_time_s": 0.1284,
    }
    line = summary_line(summary, Path("outputs/run"))
    for fact in ("0.0123", "1,939 samples/s", "132 ms", "predicted 128 ms", "outputs/run"):
        assert fact in line
    line = summary_line(summary, Path("o"), emulated=True)
    assert "(predicted 128 ms on the real devices)" in line
    line = summary_line({**summary, "predicted_here_s": 0.1}, Path("o"), emulated=True)
    assert "(predicted 100 ms, 128 ms on the real devices)" in line
    assert "predicted" not in summary_line({**summary, "predicted_step_time_s": None}, Path("o"))


@pytest.mark.parametrize(
    ("predicted", "here", "emulated", "said"),
    [
        (0.1, None, False, ""),  # 0.125 s are a quarter longer, which is not more
        (0.05, None, False, "a step took 125 ms, 2.50 times the predicted 50.0 ms"),
        (1.25, None, False, "a step took 125 ms, 0.10 times the predicted 1.25 s"),
        (0.001, None, False, "a step took 125 ms, 125 times the predicted 1.00 ms"),
        (0.001, None, True, ""),  # of devices that nobody ran on
        (0.001, 0.12, True, ""),
        (0.125, 0.05, True, "a step took 125 ms, 2.50 times the predicted 50.0 ms"),
    ],
)
def test_a_prediction_far_off_is_said(
    predicted: float, here: float | None, emulated: bool, said: str
) -> None:
    summary = {
        "step_time_s_median": 0.125,
        "predicted_step_time_s": predicted,
        "predicted_here_s": here,
    }
    assert unlike_predicted(summary, emulated) == said


@pytest.mark.parametrize(
    ("waited_s", "said"),
    [
        (0.02, ""),
        (0.1, "100 ms of it rank 0 waited for data, which no plan counts: samples that are read"),
    ],
)
def test_long_waits_for_data_are_said(waited_s: float, said: str) -> None:
    summary = {"step_time_s_median": 0.125, "data_wait_s_median": waited_s}
    assert waits_note(summary) == (said and f"{said} faster shorten it")


def test_skipped_steps_are_said(tmp_path: Path) -> None:
    run = Run(tmp_path, 4, 100, terminal=False, encoding="utf-8")
    for step in range(1, 5):
        line = json.loads(record(step, 0.1))
        run.write(json.dumps({**line, "skipped": step < 3} if step < 4 else line) + "\n")
        run.progress.poll()
    assert re.findall(r"step (\d)/4 .*?(\d) skipped", run.text) == [
        *(("1", "1"), ("2", "2"), ("3", "2"), ("4", "2"))
    ]


@pytest.mark.parametrize(
    ("skipped", "precision", "said"),
    [
        (0, "fp16", ""),
        (
            *(3, "fp16"),
            "3 of 12 steps were skipped, as gradients overflowed at the loss scales that were "
            "tried: 9 steps were taken; a lower train.loss_scale, or null, skips fewer",
        ),
        (
            *(12, "bf16"),
            "12 of 12 steps were skipped, as a loss or gradient norm was not finite: no step was "
            "taken; train.on_nan=stop says where",
        ),
    ],
)
def test_what_skipped_steps_mean_is_said_at_the_end(
    skipped: int, precision: str, said: str
) -> None:
    assert skipped_note({"steps": 12, "skipped_steps": skipped}, precision) == said
