"""Compile DeepSpeed's CPU optimizer, once per host and before its ranks are forked."""

import fcntl
import os

from whale_train.kernel_cache import CPU_ADAM, VARIABLE, kernel_cache
from whale_train.runtime.engines.deepspeed import import_deepspeed


def load_cpu_adam() -> None:
    """Load DeepSpeed's CPU Adam, compiling it first where needed (20 s of g++).

    Ranks that are forked afterwards inherit it. torch guards a compilation by a lock file that
    remains when its process is killed, and then waits for the file forever. The lock that this
    function takes ends with its process, so its holder may remove torch's lock file.
    """
    folder = kernel_cache()
    os.environ[VARIABLE] = str(folder)
    (folder / CPU_ADAM).mkdir(parents=True, exist_ok=True)
    with (folder / f"{CPU_ADAM}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / CPU_ADAM / "lock").unlink(missing_ok=True)
        import_deepspeed()
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)
