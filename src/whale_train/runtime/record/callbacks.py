"""Call the callbacks of a run at its moments, and collect their requests. Only rank 0 has
callbacks."""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from whale_train.callbacks.make import make_callback
from whale_train.callbacks.options import CallbacksOptions
from whale_train.own_code import said
from whale_train.runtime.state.votes import CheckpointRequest
from whale_train.trackers.tracker import RunDescription, Status

_WISHES = {
    None: CheckpointRequest.NOTHING,
    "save": CheckpointRequest.SAVE,
    "end": CheckpointRequest.END,
}


class CallbackError(RuntimeError):
    """A callback has raised an exception, which is the cause, or has returned an unknown
    request."""


class Callbacks:
    """The callbacks of a run."""

    def __init__(self, options: CallbacksOptions) -> None:
        self._goes_on = options.on_error == "go_on"
        self._listed = options.listed
        self._objects: dict[str, object] = {}
        self._saved: SimpleQueue[tuple[int, Path]] = SimpleQueue()
        self._wish = CheckpointRequest.NOTHING
        self.warnings: list[str] = []

    def start(self, run: RunDescription) -> None:
        """Make the callbacks, and call their `start`."""
        for options in self._listed:
            with_key = options.key

            def make(options: Any = options) -> None:
                self._objects[options.key] = make_callback(options)

            self._try(with_key, "as it was made", make)
        self._call("start", run)

    def step(self, step: int, values: Mapping[str, Any], evaluation: Mapping[str, float]) -> None:
        """Call `step`, `save` for every newly complete checkpoint, and `evaluation` if there was
        one."""
        self._call("step", step, values)
        self._call_saved()
        if evaluation:
            self._call("evaluation", step, evaluation)

    def saved(self, step: int, folder: Path) -> None:
        """Register a checkpoint, for which `save` is called at the next moment.

        It may be called from another thread.
        """
        self._saved.put((step, folder))

    def fail(self, error: BaseException) -> None:
        """Call `failure`. Exceptions of the callbacks are only written to the log."""
        for key in list(self._objects):
            try:
                self._method(key, "failure")(error)
            except Exception:
                traceback.print_exc()

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Call `save` for the last checkpoints, and `end`."""
        self._call_saved()
        self._call("end", status, summary)

    def wish(self) -> CheckpointRequest:
        """Return the largest request since the last call."""
        wish, self._wish = self._wish, CheckpointRequest.NOTHING
        return wish

    def _call_saved(self) -> None:
        while True:
            try:
                step, folder = self._saved.get_nowait()
            except Empty:
                return
            self._call("save", step, folder)

    def _call(self, moment: str, *arguments: Any) -> None:
        for key in list(self._objects):

            def call(key: str = key) -> None:
                wish = self._method(key, moment)(*arguments)
                if moment in ("step", "evaluation"):
                    if not isinstance(wish, str | None) or wish not in _WISHES:
                        raise CallbackError(f'returned {wish!r}, not "save", "end" or None,')
                    self._wish = max(self._wish, _WISHES[wish])

            self._try(key, f"in {moment}", call)

    def _method(self, key: str, moment: str) -> Callable[..., Any]:
        return getattr(self._objects[key], moment, None) or (lambda *_: None)

    def _try(self, key: str, when: str, call: Callable[[], None]) -> None:
        """Make a call. A callback that raises is not called any more, or ends the run."""
        try:
            call()
        except Exception as error:
            did = str(error) if isinstance(error, CallbackError) else f"raised {said(error)}"
            if not self._goes_on:
                raise CallbackError(f"{key} {did} {when}") from error
            traceback.print_exc(file=sys.stderr)
            self._objects.pop(key, None)
            self.warnings.append(f"{key} {did} {when}; the run went on without it")


@contextmanager
def told_when_failing(callbacks: Callbacks | None) -> Iterator[None]:
    """Call the callbacks' `failure` if the code of the context raises an exception."""
    try:
        yield
    except Exception as error:
        if callbacks is not None:
            callbacks.fail(error)
        raise
