"""Show how far a run is, read from the metrics that its ranks write.

This file owns the live line of a terminal, the plain lines of a log, and the last line of a run. It
reads `metrics.jsonl`, which has one object for each optimizer step (`step` counts the steps done,
from 1), with the results of the evaluation after the step (`evaluation_loss`,
`evaluation_accuracy`, and `NAME_loss` of a set of that name). It also reads `checkpoints.jsonl`,
which has one object for each checkpoint, and nothing else of the run.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from whale_train.checkpoints.checkpoint_files import SAVED
from whale_train.launcher.ui.terminal import Portable
from whale_train.quantities import in_bytes, in_rate, in_seconds

# Seconds between plain lines when steps are slow.
_PATIENCE_S = 10.0
# Steps whose mean time predicts the rest: enough to be steady, few enough to follow a change.
_RECENT_STEPS = 20
# The smallest part of a step that is shown as spent waiting for data.
_SHOWN_WAIT = 0.02


class Progress:
    """A follower of a run directory, which prints the progress of the run.

    On a terminal, there is one line, rewritten in place. Elsewhere, there is a line for about every
    tenth of the steps, for the first and the last step, for every evaluation, and one every ten
    seconds where steps are slow. Every checkpoint has a line.

    path: the run directory.
    total_steps: number of optimizer steps of the run.
    console: where lines are printed.
    clock: returns seconds.
    read_from: the byte of `metrics.jsonl` from which on this attempt writes.
    hears: is given every new line of `metrics.jsonl`; None: nobody is.
    """

    def __init__(
        self,
        path: Path,
        total_steps: int,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        read_from: int = 0,
        hears: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._hears = hears
        self._metrics = _Tail(path / "metrics.jsonl", read_from)
        self._saved = _Tail(path / SAVED)
        self._total = total_steps
        self._console = console
        self._clock = clock
        self._started_s = self._said_s = clock()
        self._step: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._waited_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._said: Mapping[str, Any] = {}
        self._skipped = 0  # steps without an update, of this attempt
        self._shown = ""
        # Refreshed by poll alone, and only when the line changes: no thread, no flicker.
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_interactive
            else None
        )
        if self._live:
            self._live.start()

    def poll(self) -> None:
        """Read new metrics and show them. It is cheap: call it about ten times a second."""
        for record in self._metrics.read():
            if self._hears is not None:
                self._hears(record)
            if "loss" in record:
                self._step = record
                self._recent_s.append(float(record["step_time_s"]))
                self._waited_s.append(float(record.get("data_wait_s", 0.0)))
                self._skipped += bool(record.get("skipped"))
                if not self._live and self._is_milestone():
                    self._say_step()
            if names := _evaluated(record):
                self._evaluation = record
                if not self._live:
                    where = f"step {record['step']}/{self._total}"
                    self._say("  ".join([where, *(_evaluation(record, name) for name in names)]))
        for record in self._saved.read():
            self._console.print(Portable(_checkpoint(record)), soft_wrap=True)
        if self._live:
            line = self._line(self._console.width)
            if line.plain != self._shown:
                self._shown = line.plain
                self._live.update(Portable(line), refresh=True)
        elif self._has_news() and self._clock() - self._said_s >= _PATIENCE_S:
            self._say_step()

    def close(self) -> None:
        """Read the rest, print the line of the last step, and free the terminal. A second call does
        nothing."""
        if self._metrics.closed:
            return
        self.poll()
        self._metrics.close()
        self._saved.close()
        if self._live:
            self._live.stop()
            if self._step:
                self._console.print(Portable(self._line(self._console.width)))
        elif self._has_news():
            self._say_step()

    def _has_news(self) -> bool:
        """Return whether the last step read has no line yet."""
        return bool(self._step) and self._step is not self._said

    def _is_milestone(self) -> bool:
        """Return whether the last step read is the first, the last, or the first of a tenth of all
        steps."""
        if not self._said:
            return True
        step, said = int(self._step["step"]), int(self._said["step"])
        return step >= self._total or step * 10 // self._total > said * 10 // self._total

    def _say_step(self) -> None:
        """Print the plain line of the last step read."""
        width = 2 * len(str(self._total)) + 1
        count = f"{self._step['step']}/{self._total}"
        left = self._left_s()
        parts = [f"step {count:<{width}}", f"loss {_loss(self._step['loss'])}", self._rate()]
        parts += [waits] if (waits := self._waits()) else []
        if self._skipped:
            parts.append(f"{self._skipped} skipped")
        self._say("  ".join([*parts, f"ETA {_clock_time(left)}"] if left else parts))
        self._said, self._said_s = self._step, self._clock()

    def _say(self, line: str) -> None:
        self._console.print(Portable(Text(line)))

    def _line(self, width: int) -> Text:
        """Return the live line, in at most `width` cells. Where it is too long, the least important
        parts are left out."""
        if not self._step:
            elapsed = _clock_time(self._clock() - self._started_s)
            line = Text.assemble(("starting ranks", "dim"), f"  {elapsed}")
            line.truncate(width)
            return line
        step, digits, left = int(self._step["step"]), len(str(self._total)), self._left_s()
        names = _evaluated(self._evaluation)
        evaluation = _evaluation(self._evaluation, names[0], is_short=True) if names else ""
        count = f"step {step:>{digits}}/{self._total}"
        loss = f"loss {_loss(self._step['loss'])}"
        remaining = f"{_clock_time(left)} left" if left else ""
        skipped = f"{self._skipped} skipped" if self._skipped else ""
        shown = (count, loss, skipped, self._rate(), remaining, self._waits(), evaluation)
        parts = [Text(part) for part in shown if part]
        gap = Text("  ")
        while len(parts) > 1 and gap.join(parts).cell_len > width:
            parts.pop()
        spare = width - gap.join(parts).cell_len - len(gap)
        # Two lengths only: a bar that follows every change of the numbers would jitter.
        cells = next((cells for cells in (24, 8) if cells <= spare), 0)
        if cells:
            parts.insert(1, _bar(step / self._total, cells))
        line = gap.join(parts)
        line.truncate(width)
        return line

    def _rate(self) -> str:
        """Return the training rate of the last step read, in samples/s, as text."""
        return f"{in_rate(float(self._step['samples_per_s']))} samples/s"

    def _waits(self) -> str:
        """Return the part of the recent steps in which rank 0 waited for its samples, as text; ''
        below `_SHOWN_WAIT`."""
        part = sum(self._waited_s) / sum(self._recent_s) if self._recent_s else 0.0
        return f"{part:.0%} waiting for data" if part >= _SHOWN_WAIT else ""

    def _left_s(self) -> float:
        """Return the seconds to the last step, at the mean pace of the recent steps; 0 when it is
        done."""
        steps = max(0, self._total - int(self._step["step"]))
        return steps * sum(self._recent_s) / len(self._recent_s)


def summary_line(summary: Mapping[str, Any], run_dir: Path, emulated: bool = False) -> str:
    """Return the last line of a run: steps, loss, speed, the step time with its prediction, and the
    run directory.

    summary: the content of `summary.json`.
    emulated: whether the prediction is for devices that were only emulated. The line says so then,
        since the two times are not alike.
    """
    step = f"{in_seconds(summary['step_time_s_median'])} a step"
    predicted, here = summary.get("predicted_step_time_s"), summary.get("predicted_here_s")
    if predicted is not None:
        where = " on the real devices" if emulated else ""
        first = f"{in_seconds(here)}, " if here is not None else ""
        step += f" (predicted {first}{in_seconds(predicted)}{where})"
    skipped = summary.get("skipped_steps")
    parts = [
        f"done: {summary['steps']} steps" + (f", {skipped} of them skipped" if skipped else ""),
        f"loss {_loss(summary['final_loss'])}",
        f"{in_rate(summary['samples_per_s'])} samples/s",
        step,
        str(run_dir),
    ]
    return "  ".join(parts)


def pasted_line(
    summary: Mapping[str, Any], first_loss: float | None, title: str, ranks: int
) -> str:
    """Return one line about a run for a message to others: what ran, its loss, speed and memory.

    summary: the content of `summary.json`.
    first_loss: the loss of the first step; None where it is not known.
    title: the names of model, strategy and hardware.
    ranks: number of ranks.
    """
    loss = _loss(summary["final_loss"])
    fullest = max(summary.get("peak_memory_bytes") or [0])
    parts = [
        f"{summary['steps']} steps in {in_seconds(summary['trained_s'])}",
        f"loss {loss}" if first_loss is None else f"loss {_loss(first_loss)} to {loss}",
        f"{in_rate(summary['samples_per_s'])} samples/s",
        *([f"at most {in_bytes(fullest)} a rank"] if fullest else []),
    ]
    return f"{title}, {ranks} {'rank' if ranks == 1 else 'ranks'}: {', '.join(parts)}"


def skipped_note(summary: Mapping[str, Any], precision: str) -> str:
    """Return the note that steps of a run were skipped, with the reason and a remedy; '' where none
    were.

    summary: the content of `summary.json`.
    precision: the precision of the run.
    """
    skipped, steps = summary.get("skipped_steps", 0), summary["steps"]
    if not skipped:
        return ""
    of_all = "no step was taken" if skipped == steps else f"{steps - skipped} steps were taken"
    if precision != "fp16":
        why, remedy = "a loss or gradient norm was not finite", "train.on_nan=stop says where"
    else:
        why = "gradients overflowed at the loss scales that were tried"
        remedy = "a lower train.loss_scale, or null, skips fewer"
    return f"{skipped} of {steps} steps were skipped, as {why}: {of_all}; {remedy}"


def compiled_line(seconds: Mapping[str, float]) -> str:
    """Return the line that says how long torch.compile took, in total and for each kind of block.

    seconds: the seconds of each kind of block, by name; '' is the rest of the model.
    """
    per_block = ", ".join(f"{name or 'the rest'} {in_seconds(x)}" for name, x in seconds.items())
    return f"compiled in {in_seconds(sum(seconds.values()))}: {per_block}"


_LIKE = 0.25  # relative error from which on a prediction is reported


def unlike_predicted(summary: Mapping[str, Any], emulated: bool) -> str:
    """Return the note that steps took much longer or shorter than predicted, or ''.

    summary: the content of `summary.json`.
    emulated: whether the devices were emulated. Their prediction is then compared only where the
        processes that stand for them were measured.
    """
    predicted = summary.get("predicted_here_s")
    if predicted is None and not emulated:
        predicted = summary.get("predicted_step_time_s")
    measured = summary["step_time_s_median"]
    if not predicted or abs(measured / predicted - 1) <= _LIKE:
        return ""
    times = measured / predicted
    said = f"{times:.2f} times" if times < 10 else f"{times:,.0f} times"
    return f"a step took {in_seconds(measured)}, {said} the predicted {in_seconds(predicted)}"


_LONG_WAIT = 0.2  # part of a step from which on waiting for data is why it is long


def waits_note(summary: Mapping[str, Any]) -> str:
    """Return the note that steps waited long for data, which no prediction counts, or ''.

    summary: the content of `summary.json`.
    """
    step_s, waited_s = summary["step_time_s_median"], summary.get("data_wait_s_median", 0.0)
    if waited_s < _LONG_WAIT * step_s:
        return ""
    said = f"{in_seconds(waited_s)} of it rank 0 waited for data, which no plan counts"
    return f"{said}: samples that are read faster shorten it"


class _Tail:
    """A reader of the complete lines of a file that may not exist yet and is still being
    written."""

    def __init__(self, path: Path, read_from: int = 0) -> None:
        self._path, self._read_from = path, read_from
        self._file: BinaryIO | None = None
        self._partial = b""
        self.closed = False

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Yield the JSON objects of the lines that were completed since the last call. Damaged
        lines are skipped."""
        if self._file is None and not self.closed and self._path.exists():
            self._file = self._path.open("rb")
            self._file.seek(self._read_from)
        if self._file is None:
            return
        *lines, self._partial = (self._partial + self._file.read()).split(b"\n")
        for line in lines:
            # A line spoilt by a full disk must not end a run that outlives it.
            with suppress(ValueError):
                yield json.loads(line)

    def close(self) -> None:
        """Close the file. Later reads yield nothing."""
        self.closed = True
        if self._file is not None:
            self._file.close()
            self._file = None


def _checkpoint(record: Mapping[str, Any]) -> Text:
    """Return the line about a checkpoint: its path, size and time, or why there is none."""
    if "error" in record:
        said = f"warning: no checkpoint after step {record['step']}: {record['error']}"
        return Text(said, style="yellow")
    size, seconds = in_bytes(record["bytes"]), in_seconds(record["seconds"])
    return Text(f"checkpoint: {record['path']} ({size} in {seconds})")


def _bar(fraction: float, cells: int) -> Text:
    """Return a progress bar of `cells` cells, `fraction` of which are filled."""
    filled = min(cells, int(fraction * cells))
    bar = Text("━" * filled, style="cyan")
    return bar.append("╌" * (cells - filled), style="dim")


def _evaluated(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the sets that were evaluated after a step."""
    return [key.removesuffix("_loss") for key in record if key.endswith("_loss")]


def _evaluation(record: Mapping[str, Any], name: str, is_short: bool = False) -> str:
    """Return the loss and the accuracy of the set `name` as text, without words where it
    `is_short`."""
    correct = record.get(f"{name}_accuracy")
    tail = "" if correct is None else f"{100 * correct:.1f}%"
    loss = _loss(record[f"{name}_loss"])
    if is_short:
        return "  ".join(x for x in (f"{name.replace('evaluation', 'eval')} {loss}", tail) if x)
    return "  ".join(x for x in (f"{name} loss {loss}", tail and f"accuracy {tail}") if x)


def _loss(loss: float | None) -> str:
    """Return a loss as text, such as `2.341`.

    Below 1, it has four decimals, and the power of ten where those would be zeros.
    """
    if loss is None:
        return "none"
    if abs(loss) >= 1 or loss == 0 or loss != loss:
        return f"{loss:.3f}"
    return f"{loss:.4f}" if abs(loss) >= 1e-3 else f"{loss:.2e}"


def _clock_time(seconds: float) -> str:
    """Return a duration as text, such as `0:12`, `12:05` or `3:07:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
