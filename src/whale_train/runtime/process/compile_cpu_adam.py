"""Compile DeepSpeed's CPU optimizer, once a host and before its ranks are forked."""

import fcntl
import os

from whale_train.kernel_cache import CPU_ADAM, VARIABLE, kernel_cache
from whale_train.runtime.engines.deepspeed import import_deepspeed


def load_cpu_adam() -> None:
    """Load DeepSpeed's CPU Adam, compiling it first where needed (20 s of g++).

    Ranks forked afterwards have it loaded. torch guards a compilation by a file that stays when its
    process is killed, and that torch then waits for without end. The lock taken here ends with its
    holder, so its holder may remove that file.
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
