"""Ask the system for this machine's cores, memory and GPUs, without starting CUDA in this
process."""

import os

from whale_train.machine.hosts import Host
from whale_train.strategies.hardware.gpu_facts import device_of, link_of
from whale_train.strategies.hardware.inventory import MachineFacts


def facts_of(host: Host) -> MachineFacts:
    """Return the facts about a host that an inventory may refer to."""
    link = link_of(host.cards) if host.cards else None
    return MachineFacts(host.cores, host.memory_bytes, tuple(map(device_of, host.cards)), link)


def threads_asked() -> int | None:
    """Return the number of threads of a CPU process that OMP_NUM_THREADS sets, as ranks read it, or
    None."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None
