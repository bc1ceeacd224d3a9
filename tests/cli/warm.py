"""A process that has imported what the command and its hosts import, and forks into the command.

One line of JSON in: the arguments, the folder, the environment, the files for stdout and stderr;
one out: the exit status. The fork goes on as `python -m whale_train.launcher.cli` does, whose
module nothing here imports. The programs that the command starts are forks of it, in the place of
interpreters that would import torch and DeepSpeed again for seconds; `whale_train_process` of
`command.py` starts everything anew.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, NoReturn

from whale_train.launcher.compose.command_line import composed
from whale_train.launcher.ranks import early_host, host_process
from whale_train.runtime.process.preload import preload

COMMAND = "whale_train.launcher.cli"
IMPORTED = (
    "hydra",
    "hydra.core.hydra_config",
    "whale_train.launcher.command",
    "torch",
    "torch.export",
    "whale_train.models.profile.measure",
    "whale_train.models.batch_parts.compare_parts",
    "sklearn.datasets",
    "whale_train.runtime.process.rank_main",
    "whale_train.runtime.process.export_host",
    "whale_train.runtime.rehearse.main",
)


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints when it is imported
    preload()
    for name in IMPORTED:
        importlib.import_module(name)
    composed(["mode=plan", "train.steps=3"])  # the parsers keep what they met
    gc.freeze()
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            answers.close()
            become(**json.loads(line))
            fork_programs()
            leave_with(command_status)
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def leave_with(run: Callable[[], int]) -> NoReturn:
    """End with the status of `run()`, as an interpreter would but for taking down the imports."""
    status = 0
    try:
        status = run()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def command_status() -> int:
    """Be the command."""
    runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
    return 0


def fork_programs() -> None:
    """Have this process fork the programs of its hosts, and not start them."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    for module in (early_host, host_process):
        module.subprocess = SimpleNamespace(Popen=Forked, **names)  # type: ignore[assignment]


class Forked:
    """What hosts use of subprocess.Popen, of a fork that runs the module's `main`."""

    returncode: int | None = None
    stdin: BinaryIO | None = None

    def __init__(
        self,
        command: Sequence[str],
        stdin: int,
        stdout: BinaryIO | int,
        stderr: int,
        start_new_session: bool,
    ) -> None:
        _, _, module, *arguments = command
        assert start_new_session
        sys.stdout.flush()
        sys.stderr.flush()
        reads = None
        if stdin == subprocess.PIPE:
            reads, writes = os.pipe()
            self.stdin = os.fdopen(writes, "wb")
        output = os.devnull if isinstance(stdout, int) else stdout.name
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            redirect(os.devnull, output, output)
            if reads is not None and self.stdin is not None:
                self.stdin.close()
                os.dup2(reads, 0)
                os.close(reads)
            forget(Path.cwd())
            for number in signal.valid_signals():  # as a program starts
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            atexit._clear()
            leave_with(lambda: importlib.import_module(module).main(arguments))
        if reads is not None:
            os.close(reads)

    def wait(self) -> int:
        """Reap the process."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def forget(folder: Path) -> None:
    """Have a user's own modules imported again, whose generators would have drawn already."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(folder):
            del sys.modules[name]


def become(
    arguments: list[str], folder: str, environment: dict[str, str], stdout: str, stderr: str
) -> None:
    """Give this process what a subprocess would have been started with."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    redirect(os.devnull, stdout, stderr)
    sys.argv[1:] = arguments
    sys.path[0] = folder


def redirect(stdin: str, stdout: str, stderr: str) -> None:
    """Have this process read and write these files."""
    for number, path in enumerate((stdin, stdout, stderr)):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    main()
