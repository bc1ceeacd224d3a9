"""A process that answers questions: a line of JSON in, a line of JSON out.

Jobs are many and imports are slow: a file that runs jobs is started as a program once, calls
`serve` there, and is asked by a `Served` of it.
"""

import json
import os
import selectors
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whale_train.runtime import host

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 280.0  # an answer's, the compilation of DeepSpeed's CPU kernel included


class Served:
    """The process of a file, started when first asked; modules of `cwd` can be imported there."""

    def __init__(self, file: str, cwd: Path | None = None) -> None:
        self._file, self._cwd = file, cwd
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **question: Any) -> str:
        """What it answers; why there is no answer."""
        if self._process is None:
            path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
            self._process = subprocess.Popen(
                [sys.executable, self._file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self._cwd,
                env=os.environ | {"PYTHONPATH": path},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(DEADLINE_S)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            self.close()
            return "died" if ready else f"had not ended after {DEADLINE_S:.0f} s"
        said: str = json.loads(answer)
        return said

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # ranks end with it
            self._process.wait()
            self._process = None


def serve(answer: Callable[..., str]) -> None:
    """Give every question's fields to `answer`, until there are no more; what it prints goes to
    stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    host.preload()
    for line in sys.stdin:
        try:
            said = answer(**json.loads(line))
        except Exception as error:
            said = "".join(traceback.format_exception(error))
        answers.write(json.dumps(said) + "\n")
        answers.flush()
