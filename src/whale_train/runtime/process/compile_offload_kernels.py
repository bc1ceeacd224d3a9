"""Compile DeepSpeed's kernels for offload, once per host and before its ranks are forked."""

import fcntl
import os

from whale_train.errors import LaunchError
from whale_train.kernel_cache import ASYNC_IO, CPU_ADAM, PIN_MEMORY, VARIABLE, kernel_cache
from whale_train.runtime.engines.deepspeed import import_deepspeed


def load_cpu_adam() -> None:
    """Load DeepSpeed's CPU Adam, compiling it first where needed (20 s of g++)."""
    _load("CPUAdamBuilder", (CPU_ADAM,))


def load_async_io() -> None:
    """Load DeepSpeed's library for files on NVMe, compiling it first where needed (minutes of g++).

    Raises LaunchError where it cannot be compiled here.
    """
    try:
        _load("AsyncIOBuilder", (ASYNC_IO, PIN_MEMORY))
    except Exception as error:
        rule = f"DeepSpeed's library for state on NVMe cannot be made here: {error}"
        raise LaunchError(f"{rule}; install libaio-dev (libaio-devel), g++ and ninja") from error


def _load(builder: str, kernels: tuple[str, ...]) -> None:
    """Load what DeepSpeed's `builder` makes, which is cached as `kernels`.

    Ranks that are forked afterwards inherit it. torch guards a compilation by a lock file that
    remains when its process is killed, and then waits for the file forever. The lock that this
    function takes ends with its process, so its holder may remove torch's lock file.
    """
    folder = kernel_cache()
    os.environ[VARIABLE] = str(folder)
    for kernel in kernels:
        (folder / kernel).mkdir(parents=True, exist_ok=True)
    with (folder / f"{kernels[0]}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for kernel in kernels:
            (folder / kernel / "lock").unlink(missing_ok=True)
        import_deepspeed()
        from deepspeed.ops import op_builder

        getattr(op_builder, builder)().load(verbose=False)
