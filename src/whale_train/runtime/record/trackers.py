"""Call the trackers of a run, each from a thread of its own, so that training does not wait for
them.

An exception of a tracker is reported at the end of the run and goes to the log, once; later rows
are still passed to the tracker. The trackers themselves are in `whale_train/trackers`.
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from whale_train.config import Request
from whale_train.own_code import said
from whale_train.strategies.plan.plan import Plan
from whale_train.trackers.make import make_tracker
from whale_train.trackers.tracker import RunDescription, Status, Tracker

PLACES = "trackers.json"  # in the run directory: the places of the curves, by tracker
_FILES = (
    *("plan.json", "request.json", "inventory.yaml", "strategy.yaml", "environment.json"),
    *(".hydra/config.yaml", ".hydra/overrides.yaml"),
)
OPEN_S = 30.0  # waited before the first step, whose time would otherwise include imports
STATE_S = 15.0  # waited for logged rows to be stored, when a checkpoint is saved
CLOSE_S = 60.0


class Trackers:
    """The open trackers of a run; empty where the request names none.

    run: the description of the run.
    """

    def __init__(
        self, run: RunDescription, calls: Sequence["TrackerThread"], warnings: list[str]
    ) -> None:
        self.run = run
        self._calls = calls
        self._warnings = warnings
        self._lock = threading.Lock()
        self._closing: list[threading.Event] = []

    def __len__(self) -> int:
        return len(self._calls)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the numbers of a step to all trackers, without waiting."""
        for call in self._calls:
            call.ask(f"at step {step}", lambda tracker: tracker.log(step, values))

    def states(self) -> Callable[[], dict[str, dict[str, Any]]]:
        """Ask all trackers for their states, and return the function that waits for them.

        The function returns the states by tracker, once all logged rows are stored or `STATE_S` is
        over. A tracker without a new state by then keeps its previous state.
        """
        pending = [(call, call.ask_state()) for call in self._calls]

        def wait() -> dict[str, dict[str, Any]]:
            deadline = time.monotonic() + STATE_S
            for _, answered in pending:
                answered.wait(max(0.0, deadline - time.monotonic()))
            return {call.key: call.state for call, _ in pending if call.state is not None}

        return wait

    def close(self, status: Status, summary: Mapping[str, Any], timeout_s: float = CLOSE_S) -> None:
        """Close all trackers, and wait for at most `timeout_s` seconds.

        A later call waits for the closing that the first call has begun.
        """
        with self._lock:
            if not self._closing:
                self._closing = [
                    call.ask("at its end", lambda tracker: tracker.close(status, summary))
                    for call in self._calls
                ]
        deadline = time.monotonic() + timeout_s
        for call, answered in zip(self._calls, self._closing, strict=True):
            if not answered.wait(max(0.0, deadline - time.monotonic())):
                late = f"had not taken all rows {timeout_s:g} s after the end"
                self._warnings.append(f"trackers: {call.key} {late}; the others are lost")

    @property
    def warnings(self) -> list[str]:
        """Return sentences about the trackers' failures, for the user."""
        return [*self._warnings, *(call.failure for call in self._calls if call.failure)]


@dataclass
class TrackerThread:
    """One tracker, and the only thread that calls it.

    key: the name of the tracker in checkpoints and messages.
    make: makes the tracker, in its thread.
    keep: called with each new state.
    state: the state returned last, or the state that the run resumes from.
    """

    key: str
    make: Callable[[], Tracker]
    keep: Callable[[str, dict[str, Any]], None]
    state: dict[str, Any] | None = None
    _tasks: SimpleQueue[Callable[[], None]] = field(default_factory=SimpleQueue)
    _tracker: Tracker | None = None
    _first: str = ""
    _failed: int = 0

    def start(self, run: RunDescription, state: dict[str, Any] | None) -> threading.Event:
        """Start the thread, which makes and opens the tracker.

        Return an event that is set when the tracker is open, or could not be opened.
        """
        self.state = state
        answered = threading.Event()

        def open_it() -> None:
            tracker = self.make()
            tracker.open(run, state)
            self._tracker = tracker
            self._keep_state()

        def task() -> None:
            self._try("as it was opened", open_it)
            answered.set()

        self._tasks.put(task)
        threading.Thread(target=self._run, name=f"tracker {self.key}", daemon=True).start()
        return answered

    def ask(self, when: str, call: Callable[[Tracker], None]) -> threading.Event:
        """Enqueue a call for the thread.

        Return an event that is set when the call was made, or cannot be made as the tracker is not
        open.
        """
        answered = threading.Event()

        def task() -> None:
            tracker = self._tracker
            if tracker is not None:
                self._try(when, lambda: call(tracker))
            answered.set()

        self._tasks.put(task)
        return answered

    def ask_state(self) -> threading.Event:
        """Enqueue a call that reads the tracker's state, as `ask` does."""
        return self.ask("as its state was saved", lambda _: self._keep_state())

    @property
    def failure(self) -> str:
        """Return the sentence about the tracker's exceptions, or ''."""
        if not self._failed:
            return ""
        more = f", and {self._failed - 1} more times" if self._failed > 1 else ""
        lost = "" if self._tracker is not None else "; it has nothing of this run"
        return f"trackers: {self.key} raised {self._first}{more}{lost}"

    def _keep_state(self) -> None:
        assert self._tracker is not None
        state = self._tracker.state()
        json.dumps(state)  # raises where it cannot be saved
        if state != self.state:
            self.state = state
        self.keep(self.key, state)

    def _try(self, when: str, call: Callable[[], None]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:
            self._failed += 1
            if self._failed == 1:
                self._first = f"{said(error)} {when}"
                traceback.print_exc()

    def _run(self) -> None:
        while True:
            self._tasks.get()()


def open_trackers(
    request: Request,
    plan: Plan,
    run_dir: Path,
    step: int,
    saved: Mapping[str, dict[str, Any]],
) -> Trackers:
    """Return the trackers of a request, once they are open or `OPEN_S` is over.

    step: the optimizer step after which the run begins.
    saved: the trackers' states in the checkpoint that the run resumes from, by tracker. States that
        an earlier attempt has left in the run directory are newer, and take precedence.
    """
    warnings: list[str] = []
    places = _Places(run_dir / PLACES)
    own = places.read()

    def note(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        warnings.append(text)

    run = RunDescription(
        name=run_dir.name,
        folder=run_dir,
        step=step,
        config={**request.model_dump(mode="json", by_alias=True), "plan": _facts(plan)},
        files=tuple(path for path in (run_dir / name for name in _FILES) if path.is_file()),
        note=note,
    )
    calls, opened = [], []
    for number, options in enumerate(request.trackers):
        key = f"trackers[{number}]"
        call = TrackerThread(
            options.key,
            lambda options=options, key=key: make_tracker(options, key),  # type: ignore[misc]
            places.keep,
        )
        saved_states = {} if getattr(options, "new_run", False) else saved
        opened.append(call.start(run, own.get(options.key, saved_states.get(options.key))))
        calls.append(call)
    deadline = time.monotonic() + OPEN_S
    for answered in opened:
        answered.wait(max(0.0, deadline - time.monotonic()))
    return Trackers(run, calls, warnings)


def _facts(plan: Plan) -> dict[str, Any]:
    """Return the facts of a plan by which runs are compared."""
    names = ("cluster", "world_size", "precision", "schedule", "reduce_dtype")
    return {name: getattr(plan, name) for name in names}


class _Places:
    """The file that has the places of a run's curves, by tracker."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._states: dict[str, dict[str, Any]] = {}

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the states in the file, or {} if there is no file or it is not JSON."""
        try:
            states: dict[str, dict[str, Any]] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        self._states = dict(states)
        return states

    def keep(self, key: str, state: dict[str, Any]) -> None:
        """Rewrite the file if the state of the tracker `key` has changed."""
        with self._lock:
            if self._states.get(key) == state:
                return
            self._states[key] = state
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self._states, indent=1) + "\n", encoding="utf-8")
            partial.replace(self._path)
