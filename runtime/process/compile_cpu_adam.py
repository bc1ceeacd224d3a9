"""DeepSpeed's CPU optimizer, compiled once a host and before there are ranks."""

import fcntl
import os

from whale_train.kernel_cache import CPU_ADAM, VARIABLE, kernel_cache
from whale_train.runtime.engines.deepspeed import import_deepspeed


def load_cpu_adam() -> None:
    """Compile (20 s of g++) or load it; ranks forked afterwards have it loaded.

    torch guards a compilation by a file that is left behind when its process is killed, and then
    waited for without end. Our lock goes with its holder, so whoever has it may remove that file.
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
