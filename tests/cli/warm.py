"""A process that has imported what the command imports, and forks into the command.

One line of JSON in: the arguments, the folder, the environment, the files for stdout and stderr;
one out: the exit status. The fork goes on as `python -m whale_train.launcher.cli` does, whose
module nothing here imports.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from typing import NoReturn

from whale_train.launcher.compose.command_line import composed

COMMAND = "whale_train.launcher.cli"
IMPORTED = (
    "hydra",
    "hydra.core.hydra_config",
    "whale_train.launcher.job",
    "whale_train.launcher.ui.sweep_table",
    "torch",
    "torch.export",
    "whale_train.models.profile.measure",
    "whale_train.models.batch_parts.compare_parts",
    "sklearn.datasets",
)


def main() -> None:
    """Answer until stdin ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    composed(["mode=plan", "train.steps=3"])  # the parsers keep what they met
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            answers.close()
            become(**json.loads(line))
            run()
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def run() -> NoReturn:
    """Be the command, and end as its interpreter would, but for taking down what was imported."""
    status = 0
    try:
        runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
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


def become(
    arguments: list[str], folder: str, environment: dict[str, str], stdout: str, stderr: str
) -> None:
    """Give this process what a subprocess would have been started with."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate((os.devnull, stdout, stderr)):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    sys.argv[1:] = arguments
    sys.path[0] = folder


if __name__ == "__main__":
    main()
