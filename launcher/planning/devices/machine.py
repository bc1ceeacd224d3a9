"""What this machine has: cores, memory, GPUs. Asked of the system, without starting CUDA here."""

import os

from whale_train.machine.hosts import Host
from whale_train.strategies.hardware.gpu_facts import device_of, link_of
from whale_train.strategies.hardware.inventory import MachineFacts


def facts_of(host: Host) -> MachineFacts:
    """Return what an inventory wants to know of a host."""
    link = link_of(host.cards) if host.cards else None
    return MachineFacts(host.cores, host.memory_bytes, tuple(map(device_of, host.cards)), link)


def threads_asked() -> int | None:
    """Return the threads of every process on a CPU, where the environment says how many (as ranks
    read it)."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None
