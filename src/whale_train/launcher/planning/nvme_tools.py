"""Check whether this host can keep state in files: a compiler, libaio, and a folder."""

import os
import shutil
import subprocess
from pathlib import Path

from whale_train.errors import Fault

LIBAIO = "libaio-dev (libaio-devel where packages are RPM)"


def files_refused(node: str, folder: str) -> list[Fault]:
    """Return the faults of the replicate at the path `node`, which keeps state in files in
    `folder`."""
    faults = []
    if missing := missing_for_files():
        rule = "is used through DeepSpeed's library, which is compiled at first use and needs "
        rule += missing
        remedy = f"install {LIBAIO}, g++ and ninja, or use optimizer=cpu"
        faults.append(Fault(f"{node}.offload", "nvme", rule, remedy))
    path = Path(folder)
    if not path.is_dir() or not os.access(path, os.W_OK):
        rule = "is no folder that this user can write to"
        remedy = "make it, or name another one of a local disk"
        faults.append(Fault(f"{node}.offload.path", folder, rule, remedy))
    return faults


def missing_for_files() -> str:
    """Return the tool or library without which DeepSpeed's library for files cannot be compiled
    here; '' if nothing is missing.

    A small program that calls libaio is compiled and linked.
    """
    compiler = os.environ.get("CXX", "c++")
    for tool in (compiler, "ninja"):
        if shutil.which(tool) is None:
            return tool
    program = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }\n"
    command = [compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    made = subprocess.run(
        command, input=program, encoding="utf-8", capture_output=True, check=False
    )
    return "" if made.returncode == 0 else "libaio"
