"""Simulate hosts on a slow network on one machine, by network namespaces joined by a switch.

Every host is a namespace with one interface, `eth0`, whose rate is limited in both directions. The
other end of the interface is a port of a bridge in a further namespace. The namespaces have no
names and live as long as a process holds them, so the kernel removes them however a benchmark
ends. Processes on different hosts share everything else, processors and memory included. Root and
iproute2's `ip` and `tc` are needed.
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
# A token bucket must hold the largest packet that the kernel passes to it (64 KiB), and its queue
# all data that a connection may have in flight. Neither number changes the rate.
BUCKET = ("burst", "256kb", "latency", "20ms")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Hosts:
    """Hosts that are network namespaces.

    namespaces: the file descriptor of each host's namespace, which forked processes inherit.
    switch: the file descriptor of the switch's namespace.
    rate_gbit_s: the rate of every link, in Gbit/s.
    """

    namespaces: tuple[int, ...]
    switch: int
    rate_gbit_s: float

    @classmethod
    def make(cls, count: int, rate_gbit_s: float) -> "Hosts":
        """Return `count` new hosts. Exits the process where root or iproute2 is missing.

        rate_gbit_s: the rate of every link, in Gbit/s.
        """
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            sys.exit(f"needs root and iproute2 (missing: {', '.join(missing) or 'root'})")
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            switch = _namespace()
            _run("ip link add switch type bridge")
            _run("ip link set switch up")
            namespaces = []
            for number in range(count):
                namespaces.append(_namespace())
                _run("ip link set lo up")
                switch_path = f"/proc/{os.getpid()}/fd/{switch}"
                _run(
                    f"ip link add {INTERFACE} type veth peer name port{number} netns {switch_path}"
                )
                _run(f"ip address add {address(number)}/24 dev {INTERFACE}")
                _run(f"ip link set {INTERFACE} up")
                _limit(INTERFACE, rate_gbit_s)
                _enter(switch)
                _run(f"ip link set port{number} master switch up")
                _limit(f"port{number}", rate_gbit_s)
        finally:
            _enter(home)
        return cls(tuple(namespaces), switch, rate_gbit_s)

    def move(self, rank: int) -> None:
        """Move this process to a host: number `rank` modulo the number of hosts.

        The process must have a single thread. gloo then communicates over the host's interface.
        """
        _enter(self.namespaces[rank % len(self.namespaces)])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def measured_gbit_s(self, megabytes: int = 64) -> float:
        """Measure the rate of one connection from the second host to the first, in Gbit/s.

        megabytes: amount of data to send, in MB.
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
    """Return the IP address of a host, given its number from 0."""
    return f"10.77.0.{host + 1}"


def _namespace() -> int:
    """Move this thread into a new network namespace, and return the namespace's file
    descriptor."""
    if _libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare of the network failed")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _enter(namespace: int) -> None:
    """Move this thread into a network namespace, given by a file descriptor."""
    if _libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


def _limit(interface: str, rate_gbit_s: float) -> None:
    """Limit the rate at which an interface sends."""
    rate = f"{rate_gbit_s * 1000:.0f}mbit"
    _run(f"tc qdisc add dev {interface} root tbf rate {rate} {' '.join(BUCKET)}")


def _run(command: str) -> None:
    """Run a command. Exits the process with the command's errors where it fails."""
    completed = subprocess.run(command.split(), capture_output=True, text=True)
    if completed.returncode:
        sys.exit(f"{command}: {completed.stderr.strip()}")
