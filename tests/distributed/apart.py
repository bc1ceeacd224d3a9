"""Hosts on one machine that share neither a network nor a folder nor a process table.

Every host is a set of Linux namespaces that live as long as its first process, with an interface
`eth0` on a switch. Only processors, memory and the files outside of the folder given are common.
Needs root, util-linux and iproute2.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount")
_NAMESPACES = ("--net", "--mount", "--uts", "--pid", "--ipc")


def can_be_apart() -> bool:
    """Return whether namespaces can be made here."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in _TOOLS):
        return False
    tried = ("unshare", *_NAMESPACES, "--fork", "true")
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class HostApart:
    """A host by its name, number and first process, and the folder that commands begin in."""

    name: str
    number: int
    pid: int
    folder: Path

    @property
    def address(self) -> str:
        return _address(self.number)

    def command(self, *words: str) -> list[str]:
        """Return what runs `words` there."""
        where = ("--target", str(self.pid), f"--wdns={self.folder}")
        return ["nsenter", *where, *_NAMESPACES, "--", *words]

    def kill(self) -> None:
        """End all its processes at once."""
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def hosts_apart(
    folder: Path, names: Sequence[str], rate: str = "1gbit"
) -> Iterator[list[HostApart]]:
    """Hosts that know each other by name, joined at `rate`. Each sees an empty `folder` of its own
    in place of that one, which the first host shares with this one."""
    addresses = folder.parent / f"{folder.name}.hosts"
    addresses.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{_address(n)} {name}\n" for n, name in enumerate(names))
    )
    # Of no path: they end with the last process that has them.
    switch = _start("switch", "ip link add switch type bridge; ip link set switch up")
    processes, made = [switch], []
    try:
        for number, name in enumerate(names):
            own = f"mount -t tmpfs {name} {folder}; " if number else ""
            process = _start(name, f"{own}mount --bind {addresses} /etc/hosts; ip link set lo up")
            processes.append(process)
            host = HostApart(name, number, _first_of(process), folder)
            made.append(host)
            _join(host, _first_of(switch), rate)
        yield made
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _address(number: int) -> str:
    return f"10.78.0.{number + 1}"


def _start(name: str, prepares: str) -> subprocess.Popen[str]:
    """Start the first process of a host, which has prepared it when this
    returns, and reaps what is left by others."""
    script = f"set -e; hostname {name}; {prepares}; echo ready; sleep infinity & wait"
    process = subprocess.Popen(
        [*("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"), "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _first_of(process: subprocess.Popen[str]) -> int:
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def _join(host: HostApart, switch: int, rate: str) -> None:
    port = f"port{host.number}"
    limit = f"root tbf rate {rate} burst 256kb latency 20ms"
    pair = f"ip link add eth0 netns {host.pid} type veth peer name {port} netns {switch}"
    subprocess.run(pair.split(), check=True)
    for command in (
        f"ip address add {host.address}/24 dev eth0",
        "ip link set eth0 up",
        f"tc qdisc add dev eth0 {limit}",
    ):
        subprocess.run(host.command(*command.split()), check=True)
    at_switch = HostApart("switch", -1, switch, Path("/"))
    for command in (f"ip link set {port} master switch up", f"tc qdisc add dev {port} {limit}"):
        subprocess.run(at_switch.command(*command.split()), check=True)
