"""Describe a host to an inventory, and read the number of threads from the environment."""

import os

from whale_train.machine.hosts import Host
from whale_train.strategies.hardware.gpu_facts import device_of, link_of
from whale_train.strategies.hardware.inventory import MachineFacts


def facts_of(host: Host) -> MachineFacts:
    """Return the cores, memory, devices and link of a host, to which an inventory may refer."""
    link = link_of(host.cards) if host.cards else None
    return MachineFacts(host.cores, host.memory_bytes, tuple(map(device_of, host.cards)), link)


def threads_asked() -> int | None:
    """Return the number of threads that OMP_NUM_THREADS gives each CPU process; None where the
    variable has no positive integer."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None
