"""What this machine has: cores, memory, GPUs. Asked of the system, without starting CUDA here."""

import os

from whale_train.launcher.planning.nvml import visible_gpus
from whale_train.limits import cores, memory_bytes
from whale_train.strategies.hardware.gpu_facts import GpuFacts, device_of, link_of
from whale_train.strategies.hardware.inventory import MachineFacts


def this_machine() -> MachineFacts:
    """Return what there is here, with the GPUs that this process may use."""
    return facts_of(visible_gpus())


def facts_of(cards: tuple[GpuFacts, ...]) -> MachineFacts:
    """Return this machine, with `cards`; none where nobody asks for its GPUs."""
    return MachineFacts(
        cores(),
        memory_bytes(),
        tuple(map(device_of, cards)),
        link_of(cards) if cards else None,
        cards,
    )


def threads_asked() -> int | None:
    """Return the threads of every process on a CPU, where the environment says how many (as ranks
    read it)."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None
