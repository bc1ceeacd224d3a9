"""Hosts on a slow network, on one machine: network namespaces joined by a switch.

Every host is a namespace with one interface, `eth0`, of limited rate in both directions, whose
other end is a port of a bridge in a namespace of its own. None of them has a name: they live as
long as a process holds them, so that however a benchmark ends, the kernel takes them away with
it. Needs root, and iproute2's `ip` and `tc`. Processes share everything else, processors and
memory included.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000  # from Linux's <sched.h>
INTERFACE = "eth0"
# A token bucket must hold what the kernel hands it at once (64 KiB), and its queue what a
# connection may have on its way; neither changes the rate.
BUCKET = ("burst", "256kb", "latency", "20ms")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Hosts:
    """Hosts that are network namespaces.

    namespaces: open file of each host's namespace, which forked processes inherit.
    switch: open file of the switch's namespace.
    rate_gbit_s: rate of every link, in Gbit/s.
    """

    namespaces: tuple[int, ...]
    switch: int
    rate_gbit_s: float

    @classmethod
    def make(cls, count: int, rate_gbit_s: float) -> "Hosts":
        """Return `count` new hosts. Exits with what is missing where they cannot be made."""
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            sys.exit(f"needs root and iproute2 (missing: {', '.join(missing) or 'root'})")
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            switch = _namespace()
            _run("ip link add switch type bridge")
            _run("ip link set switch up")
            made = []
            for number in range(count):
                made.append(_namespace())
                _run("ip link set lo up")
                there = f"/proc/{os.getpid()}/fd/{switch}"
                _run(f"ip link add {INTERFACE} type veth peer name port{number} netns {there}")
                _run(f"ip address add {address(number)}/24 dev {INTERFACE}")
                _run(f"ip link set {INTERFACE} up")
                _limit(INTERFACE, rate_gbit_s)
                _enter(switch)
                _run(f"ip link set port{number} master switch up")
                _limit(f"port{number}", rate_gbit_s)
        finally:
            _enter(home)
        return cls(tuple(made), switch, rate_gbit_s)

    def move(self, rank: int) -> None:
        """Put this process on host `rank` modulo the number of hosts.

        The process must have one thread. gloo then communicates over that host's interface.
        """
        _enter(self.namespaces[rank % len(self.namespaces)])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def measured_gbit_s(self, megabytes: int = 64) -> float:
        """Return the rate of one connection from the second host to the first, in Gbit/s.

        It sends `megabytes` MB.
        """
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            _enter(self.namespaces[0])
            listening = socket.create_server((address(0), 0))
            _enter(self.namespaces[1])
            sending = socket.create_connection(listening.getsockname())
        finally:
            _enter(home)
        receiving, _ = listening.accept()
        started = time.perf_counter()
        sender = threading.Thread(target=sending.sendall, args=(bytes(megabytes * 10**6),))
        sender.start()
        left = megabytes * 10**6
        while left:
            left -= len(receiving.recv(1 << 20))
        seconds = time.perf_counter() - started
        sender.join()
        for connection in (listening, sending, receiving):
            connection.close()
        return megabytes * 8e6 / seconds / 1e9


def address(host: int) -> str:
    """Return the IP address of a host."""
    return f"10.77.0.{host + 1}"


def _namespace() -> int:
    """Put this thread into a new network namespace, and return an open file of it."""
    if _libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare of the network failed")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _enter(namespace: int) -> None:
    """Put this thread into a network namespace, given an open file of it."""
    if _libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


def _limit(interface: str, rate_gbit_s: float) -> None:
    """Limit the rate at which an interface sends."""
    rate = f"{rate_gbit_s * 1000:.0f}mbit"
    _run(f"tc qdisc add dev {interface} root tbf rate {rate} {' '.join(BUCKET)}")


def _run(command: str) -> None:
    """Run a command. Exits with its errors where it fails."""
    completed = subprocess.run(command.split(), capture_output=True, text=True)
    if completed.returncode:
        sys.exit(f"{command}: {completed.stderr.strip()}")
