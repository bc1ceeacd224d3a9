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
    """Open files of the namespaces, which forked processes inherit."""

    namespaces: tuple[int, ...]
    switch: int
    rate_gbit_s: float

    @classmethod
    def make(cls, count: int, rate_gbit_s: float) -> "Hosts":
        """Exits with what is missing, where they cannot be made."""
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
        """Put this process, which has one thread, on host `rank` modulo their number; gloo then
        speaks over its interface."""
        _enter(self.namespaces[rank % len(self.namespaces)])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def measured_gbit_s(self, megabytes: int = 64) -> float:
        """What one connection carries from the second host to the first."""
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
    return f"10.77.0.{host + 1}"


def _namespace() -> int:
    """A new network namespace, which this thread is then in."""
    if _libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare of the network failed")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


def _limit(interface: str, rate_gbit_s: float) -> None:
    rate = f"{rate_gbit_s * 1000:.0f}mbit"
    _run(f"tc qdisc add dev {interface} root tbf rate {rate} {' '.join(BUCKET)}")


def _run(command: str) -> None:
    found = subprocess.run(command.split(), capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"{command}: {found.stderr.strip()}")
