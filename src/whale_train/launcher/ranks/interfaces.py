"""List the network interfaces of this host, and check that the interfaces named for gloo exist."""

import ctypes
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from whale_train.errors import ConfigError, Fault, closest

GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"


class _Address(ctypes.Structure):
    """The first fields of `struct ifaddrs` (getifaddrs(3)): an address of an interface."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_ushort)),  # the first field of the address is its family
]


def interfaces_here() -> list[str]:
    """Return the names of the interfaces with an IP address, which gloo can use.

    On systems other than Linux, all interfaces are returned. Raises OSError where they cannot be
    listed.
    """
    if sys.platform != "linux":
        return sorted(name for _, name in socket.if_nameindex())
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Address)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    names, at = set(), first
    try:
        while at:
            entry = at.contents
            if entry.address and entry.address[0] in (socket.AF_INET, socket.AF_INET6):
                names.add(os.fsdecode(entry.name))
            at = entry.next
    finally:
        library.freeifaddrs(first)
    return sorted(names)


def refuse_missing_interfaces(
    environment: Mapping[str, str], here: Sequence[str] | None = None
) -> None:
    """Raise ConfigError where GLOO_SOCKET_IFNAME names an interface that does not exist on this
    host, or has no IP address.

    environment: the environment of the ranks.
    here: the names of this host's interfaces with an IP address; None looks them up.
    """
    wanted = environment.get(GLOO_INTERFACES, "")
    if len(wanted) < 2:  # torch ignores a shorter value
        return
    available = interfaces_here() if here is None else here
    missing = [name for name in wanted.split(",") if name not in available]
    if missing:
        close = closest(missing[0], available)
        remedy = f"did you mean {close}? One of: " if close else "leave it out, or use one of: "
        named = "" if wanted == missing[0] else f"{missing[0]!r}, "
        rule = f"names {named}no interface"
        rule += f" of {socket.gethostname()} that has an address"
        fault = Fault(GLOO_INTERFACES, wanted, rule, remedy + ", ".join(available))
        raise ConfigError([fault])
