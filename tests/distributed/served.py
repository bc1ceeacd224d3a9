"""A process that runs functions of test files: a line of JSON in, a line of JSON out.

Jobs are many and imports are slow, so that all files of a session share one process. Functions are
found again by their file and name, so any module-level function of a test file will do.

Run as a module, this file is that process.
"""

import functools
import gc
import importlib
import inspect
import json
import os
import selectors
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whale_train.models.export.export import EXPORT_BATCH
from whale_train.models.profile import measure as profile
from whale_train.runtime.process import rank_main as worker
from whale_train.runtime.process.preload import preload

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 280.0  # an answer's, the compilation of DeepSpeed's CPU kernel included


class Served:
    """The process, started when first asked. Modules of this folder are found in it by their bare
    names, as a user's own in the folder of a run; ranks of one process have one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, function: Callable[..., str], **question: Any) -> str:
        """Return what `function(**question)` returns there, or why it returned nothing."""
        if self._process is None:
            path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.served"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parent,
                # Two threads that wait for each other on busy cores are slower than one.
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        file = Path(function.__code__.co_filename).resolve().relative_to(ROOT)
        place = (".".join(file.with_suffix("").parts), function.__name__)
        self._process.stdin.write(json.dumps([*place, question]) + "\n")
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
        """End the process, and with it the ranks it has started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def serve() -> None:
    """Answer questions until there are no more; what functions print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    preload()
    ask_once()
    gc.freeze()  # jobs need not look through it
    for line in sys.stdin:
        module, name, question = json.loads(line)
        try:
            said = getattr(importlib.import_module(module), name)(**question)
        except Exception as error:
            said = "".join(traceback.format_exception(error))
        answers.write(json.dumps(said) + "\n")
        answers.flush()


def ask_once() -> None:
    """Keep what takes a second and answers the same to the same question: the export of a model,
    and what DeepSpeed's CPU optimizer asks about the CPU."""
    cpuinfo = importlib.import_module("cpuinfo")
    slow = ((profile, "profile_model"), (worker, "export_model"), (cpuinfo, "get_cpu_info"))
    for module, name in slow:
        made: dict[str, Any] = {}
        original = getattr(module, name)

        @functools.wraps(original)
        def cached(*args: Any, made: Any = made, original: Any = original, **named: Any) -> Any:
            key = repr(([_said(each) for each in args], named))
            if key not in made:
                made[key] = original(*args, **named)
            return made[key]

        setattr(module, name, cached)


def _said(argument: Any) -> Any:
    """Return what stands for an argument in a key: for a function that returns so many samples
    (`profile.Samples`), which is another object for each job, the samples themselves."""
    if not inspect.isfunction(argument):
        return argument
    return {name: array.tobytes() for name, array in argument(EXPORT_BATCH).items()}


if __name__ == "__main__":
    serve()
