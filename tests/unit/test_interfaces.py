"""What is said of network interfaces that ranks are told to use."""

import socket

import pytest

from whale_train.errors import ConfigError
from whale_train.launcher.ranks.interfaces import interfaces_here, refuse_missing_interfaces

HERE = ("eth0", "lo")


@pytest.mark.parametrize("wanted", [None, "", "x", "lo", "eth0,lo"])
def test_interfaces_that_are_there_are_used(wanted: str | None) -> None:
    """One letter torch takes for none."""
    refuse_missing_interfaces({} if wanted is None else {"GLOO_SOCKET_IFNAME": wanted}, HERE)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("eht0", "names no interface of HOST that has an address; did you mean eth0? One of: "),
        ("wlan7", "names no interface of HOST that has an address; leave it out, or use one of: "),
        ("lo,eth9", "names 'eth9', no interface of HOST that has an address; did you mean eth0? "),
        ("lo,", "names '', no interface of HOST that has an address; leave it out, or use one "),
    ],
)
def test_an_interface_that_is_not_there_is_named(wanted: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_missing_interfaces({"GLOO_SOCKET_IFNAME": wanted}, HERE)
    said = said.replace("HOST", socket.gethostname())
    assert str(caught.value).startswith(f"GLOO_SOCKET_IFNAME={wanted} {said}")
    assert str(caught.value).endswith("eth0, lo")


def test_this_host_has_its_loopback() -> None:
    assert "lo" in interfaces_here()
