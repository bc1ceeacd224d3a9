"""Read from a run directory the positions of the data that each optimizer step took, over all
attempts.

A step that a later attempt repeated counts once, as the later attempt took it. A run that continued
from another run's checkpoint begins with the steps of that other run.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from whale_train.checkpoints.checkpoint_files import CHECKPOINTS, checkpoints_in
from whale_train.checkpoints.checkpoint_state import STATE, CheckpointState
from whale_train.checkpoints.safetensors_files import BrokenCheckpoint
from whale_train.checkpoints.url_path import Place, StoreError, UrlPath, place_of
from whale_train.config import AUTO, Request
from whale_train.data.coverage import Places, SampleOrder
from whale_train.data.mixture import MixedOrder
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.ranks.run_dir import ATTEMPTS, METRICS
from whale_train.strategies.plan.plan import Plan

KEY = "run"
Content = TypeVar("Content")


@dataclass(frozen=True)
class StepRange:
    """Consecutive steps of one attempt that no later attempt repeated.

    files: the folder with the attempt's files.
    began, ended: the range has the steps `began` + 1 to `ended`, counted from 1.
    first: the place of the first sample of step `began` + 1.
    batch: number of samples in a step.
    order: the order of the samples.
    anew: whether the data starts again at its first sample here, after other steps.
    digest: fingerprint of the data, in hex; None where the run has none.
    repeated: number of further steps of the attempt, which a later attempt repeated.
    """

    files: Path
    began: int
    ended: int
    first: int
    batch: int
    order: SampleOrder
    anew: bool = False
    digest: str | None = None
    repeated: int = 0

    def places(self, step: int) -> Places:
        """Return the places of the samples of `step`, which is counted from 1."""
        start = self.first + (step - self.began - 1) * self.batch
        return start, start + self.batch

    @property
    def after(self) -> int:
        """Return the place after the last sample of the range."""
        return self.first + (self.ended - self.began) * self.batch

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of the attempt. Raises ConfigError where it cannot be read."""
        return _read(self.files / "plan.json", Plan.from_json)


@dataclass(frozen=True)
class RunHistory:
    """The steps of a run, each once, and the faults of their record.

    segments: the steps, in order and without a gap.
    skipped: the steps without an update.
    wrong: sentences on records that are missing or contradict each other.
    """

    segments: tuple[StepRange, ...]
    skipped: frozenset[int]
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class _Line:
    """A line of `metrics.jsonl`: the step, its number of samples, and whether its update was
    skipped."""

    step: int
    samples: int
    skipped: bool


def history_of(run_dir: Path, until: int | None = None) -> RunHistory:
    """Return the history of a run, up to the step `until`, or up to the last step. Raises
    ConfigError for a directory without a run."""
    return _history(run_dir, until, ())


def _history(run_dir: Path, until: int | None, known: tuple[Path, ...]) -> RunHistory:
    """Return the history of a run up to a step.

    known: the directories of the runs that continued from this one. Their histories are being read,
        so that a cycle is found.
    """
    _refuse_no_run(run_dir)
    attempts = sorted((run_dir / ATTEMPTS).glob("*"), key=lambda path: (len(path.name), path.name))
    started = [x for x in (*attempts, run_dir) if (x / "launch.json").exists()]
    lines = _lines(run_dir / METRICS)
    segments: list[StepRange] = []
    wrong: list[str] = []
    skipped: set[int] = set()
    for number, files in enumerate(started):
        launch = _read(files / "launch.json", json.loads)
        request = _read(files / "request.json", Request.from_json)
        checkpoint = place_of(launch["checkpoint"]) if launch.get("checkpoint") else None
        began = 0 if checkpoint is None else _step_of(checkpoint)
        is_auto = request.train.resume == AUTO
        if isinstance(checkpoint, UrlPath):  # this run's, or a run's on another machine
            is_auto = is_auto and any(x.ended >= began for x in segments)
        if checkpoint is None or is_auto or _is_in(checkpoint, run_dir):
            segments = _up_to(segments, began)
        else:
            before = _before(checkpoint, began, (*known, run_dir.resolve()))
            segments, skipped = list(before.segments), set(before.skipped)
            wrong += [x for x in before.wrong if x not in wrong]
        is_last = number == len(started) - 1
        done = lines if is_last else _lines(files / METRICS)
        ended = max([began, *(line.step for line in done)])
        if is_last:
            ended = max(ended, _last_of_summary(run_dir))
        segments.append(_segment(files, request, launch, began, ended, run_dir))
    if until is not None:
        segments = _up_to(segments, until)
    segments = [x for x in segments if x.ended > x.began]
    own_segments = [x for x in segments if x.files == run_dir or run_dir in x.files.parents]
    by_step = {line.step: line for line in lines}
    wrong += _unlike_lines(own_segments, [*by_step.values()], len(lines), until)
    wrong += _unlike_states(own_segments, run_dir)
    own_steps = {step for x in own_segments for step in range(x.began + 1, x.ended + 1)}
    skipped = {step for step in skipped if step not in own_steps}
    skipped |= {line.step for line in lines if line.skipped and line.step in own_steps}
    return RunHistory(tuple(segments), frozenset(skipped), tuple(wrong))


def _refuse_no_run(run_dir: Path) -> None:
    """Raise ConfigError where a directory holds no run that has trained."""
    remedy = "name a run directory, as runs/MY_RUN"
    if not run_dir.is_dir():
        raise ConfigError([Fault(KEY, str(run_dir), "is not a folder", remedy)])
    if not (run_dir / "request.json").exists():
        raise ConfigError([Fault(KEY, str(run_dir), "holds no run", remedy)])
    mode = _read(run_dir / "request.json", Request.from_json).mode
    if mode != "train":
        rule = f"was made by mode={mode}, which trains nothing"
        raise ConfigError([Fault(KEY, str(run_dir), rule, remedy)])
    started = [run_dir, *(run_dir / ATTEMPTS).glob("*")]
    if not any((folder / "launch.json").exists() for folder in started):
        raise ConfigError([Fault(KEY, str(run_dir), "has started no ranks", remedy)])


def _read(path: Path, read: Callable[[str], Content]) -> Content:
    """Return the value that `read` makes of a file's text. Raises ConfigError where the file cannot
    be read, or `read` fails."""
    try:
        return read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        rule = f"has a file that cannot be read, {path.name} ({said})"
        raise ConfigError([Fault(KEY, str(path.parent), rule, "name another")]) from None


def _lines(path: Path) -> list[_Line]:
    """Return the complete lines of `metrics.jsonl`; no lines where the file is missing."""
    if not path.exists():
        return []
    lines = []
    with path.open(encoding="utf-8") as file:
        for text in file:
            try:
                content = json.loads(text)
                counts = (int(content["step"]), int(content["samples"]))
                lines.append(_Line(*counts, bool(content.get("skipped"))))
            except (ValueError, KeyError, TypeError):  # cut off by the end of an attempt
                continue
    return lines


def _step_of(checkpoint: Place) -> int:
    """Return the step of a checkpoint, from its state or else its name. Raises ConfigError where
    neither gives the step."""
    state = _state(checkpoint)
    if state is not None:
        return state.step
    number = checkpoint.name.removeprefix("step_")
    if not number.isdecimal():
        rule = f"went on from {checkpoint}, which is not there any more"
        raise ConfigError([Fault(KEY, str(checkpoint), rule, "put it back")])
    return int(number)


def _state(checkpoint: Place) -> CheckpointState | None:
    """Return the state of a checkpoint, or None where it cannot be read."""
    try:
        return CheckpointState.read(checkpoint) if (checkpoint / STATE).exists() else None
    except (BrokenCheckpoint, StoreError):
        return None


def _up_to(segments: Sequence[StepRange], step: int) -> list[StepRange]:
    """Return the segments without the steps after `step`, which a later attempt repeated."""
    shortened = []
    for x in segments:
        ended = min(x.ended, max(step, x.began))
        shortened.append(replace(x, ended=ended, repeated=x.repeated + x.ended - ended))
    return shortened


def _before(checkpoint: Place, step: int, known: tuple[Path, ...]) -> RunHistory:
    """Return the history of the run that wrote a checkpoint, up to the checkpoint's step.

    Where the run's directory cannot be read, the history has no segments, and one sentence on that.
    """
    try:
        if isinstance(checkpoint, UrlPath) or checkpoint.parent.name != CHECKPOINTS:
            raise ConfigError([])
        run_dir = checkpoint.parent.parent
        if run_dir.resolve() in known:
            raise ConfigError([])
        return _history(run_dir, step, known)
    except ConfigError:
        said = f"steps 1 to {step:,} are of a run that is not to be had: the run went on from "
        return RunHistory((), frozenset(), (f"{said}{checkpoint}",))


def _is_in(checkpoint: Place, run_dir: Path) -> bool:
    """Return whether a checkpoint is in a run directory."""
    if isinstance(checkpoint, UrlPath):
        return False
    return checkpoint.resolve().parent.parent == run_dir.resolve()


def _last_of_summary(run_dir: Path) -> int:
    """Return the number of steps in a run's summary; 0 without a summary."""
    path = run_dir / "summary.json"
    return int(_read(path, json.loads)["steps"]) if path.exists() else 0


def _segment(
    files: Path, request: Request, launch: Any, began: int, ended: int, run_dir: Path
) -> StepRange:
    """Return the steps of an attempt.

    files: the folder with the attempt's files.
    launch: the content of the attempt's `launch.json`.
    began, ended: the attempt has the steps `began` + 1 to `ended`, counted from 1.
    run_dir: the run directory.

    Raises ConfigError where the plan cannot be read, and where no file gives the number of samples.
    """
    plan = _read(files / "plan.json", Plan.from_json)
    states = [x for path in checkpoints_in(run_dir / CHECKPOINTS) if (x := _state(path))]
    resumed, anew = launch.get("checkpoint"), bool(launch.get("data_anew"))
    from_state = _state(Path(resumed)) if resumed else None
    samples, num_samples = launch.get("samples"), launch.get("num_samples")
    if samples is None:
        samples = 0 if from_state is None or anew else from_state.samples
        if from_state is None and resumed and not anew:
            samples = began * plan.global_batch
    if num_samples is None:
        num_samples = next((x.num_samples for x in (*states, from_state) if x is not None), None)
    if num_samples is None:
        rule = "does not say how many samples its data had (an older version of whale-train)"
        raise ConfigError([Fault(KEY, str(run_dir), rule, "name a run that saved a checkpoint")])
    mixture = launch.get("mixture")
    mixed = mixture and MixedOrder(tuple(mixture["sizes"]), tuple(mixture["shares"]))
    shuffle = request.data.shuffle and not launch.get("is_stream")
    order = SampleOrder(num_samples, request.seed, shuffle, mixed)
    digest = launch.get("data") and launch["data"]["digest"]
    return StepRange(files, began, ended, samples, plan.global_batch, order, anew, digest)


def _unlike_lines(
    segments: Sequence[StepRange], lines: Sequence[_Line], count: int, until: int | None
) -> list[str]:
    """Return sentences on steps that `metrics.jsonl` lacks, has twice, or has with another batch
    size.

    lines: one line for each step.
    count: number of lines in the file, repeated steps included.
    until: the last step of the history; None for the whole run.
    """
    said = []
    if count > len(lines):
        said.append(f"{METRICS} has {count - len(lines):,} steps twice")
    by_step = {line.step: line.samples for line in lines}
    for segment in segments:
        steps = range(segment.began + 1, segment.ended + 1)
        missing = [step for step in steps if step not in by_step]
        if missing:
            said.append(f"{METRICS} lacks {_steps(missing)}")
        others = [step for step in steps if by_step.get(step, segment.batch) != segment.batch]
        if others:
            said.append(f"{_steps(others)} took other batches than the plan's {segment.batch:,}")
    ended = max((segment.ended for segment in segments), default=0)
    more = [step for step in by_step if step > ended and until is None]
    if more:
        said.append(f"{METRICS} has {_steps(more)}, which no attempt has done")
    return said


def _steps(steps: Sequence[int]) -> str:
    """Return steps in words: `step 4`, or `3 steps from 4 on`."""
    return f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps):,} steps from {steps[0]:,} on"


def _unlike_states(segments: Sequence[StepRange], run_dir: Path) -> list[str]:
    """Return sentences on checkpoints of a run directory whose state has another number of samples
    than the steps up to the checkpoint took."""
    said = []
    for path in checkpoints_in(run_dir / CHECKPOINTS):
        state = _state(path)
        holder = next((x for x in segments if state and x.began < state.step <= x.ended), None)
        if state is None or holder is None:
            continue
        taken = holder.places(state.step)[1]
        if state.samples != taken:
            seen = f"says that the run had seen {state.samples:,} samples"
            said.append(f"{path.name}/{STATE} {seen}, and its steps had taken {taken:,}")
    return said
