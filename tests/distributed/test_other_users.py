"""Sockets between the ranks of a host, which any user of the host can see and connect to."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from whale_train.runtime.cpu.shm_collectives import meet, user_of

TIMEOUT = timedelta(seconds=20)
NOBODY = 65534

of_both_kinds = pytest.mark.parametrize(
    "kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET], ids=["collectives", "messages"]
)


class Member(threading.Thread):
    """Member `rank` of two, which meets the other one, told by `user_of` whose a socket is."""

    def __init__(
        self,
        store: Store,
        rank: int,
        kind: socket.SocketKind,
        user_of: Callable[[socket.socket], int] = user_of,
    ) -> None:
        super().__init__(daemon=True)
        self._call = (store, rank, 2, TIMEOUT, kind, user_of)
        self.peer: socket.socket | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            (self.peer,) = meet(*self._call).values()
        except BaseException as error:
            self.error = error

    def met(self) -> socket.socket:
        self.join(30)
        assert self.error is None
        assert self.peer is not None
        return self.peer


def assert_joined(one: socket.socket, other: socket.socket) -> None:
    one.sendall(b"hello")
    assert other.recv(5) == b"hello"
    assert user_of(one) == user_of(other) == os.geteuid()


@of_both_kinds
def test_members_of_one_user_meet(kind: socket.SocketKind) -> None:
    store = HashStore()
    members = [Member(store, rank, kind) for rank in range(2)]
    assert_joined(*(member.met() for member in members))


@of_both_kinds
def test_who_claims_to_be_a_member_is_let_go(kind: socket.SocketKind) -> None:
    """The kernel's answer for the first socket that member 0 accepts is another user's here."""
    answers = iter([NOBODY])
    spoken = threading.Event()

    def told(peer: socket.socket) -> int:
        assert spoken.wait(TIMEOUT.total_seconds())
        return next(answers, user_of(peer))

    store = HashStore()
    listening = Member(store, 0, kind, told)
    with socket.socket(socket.AF_UNIX, kind) as stranger:
        stranger.settimeout(TIMEOUT.total_seconds())
        stranger.connect(store.get("0"))
        stranger.sendall((1).to_bytes(4, "big"))
        spoken.set()
        member = Member(store, 1, kind)
        assert_joined(listening.met(), member.met())
        with pytest.raises(ConnectionResetError):  # what it said was never read
            stranger.recv(1)


@of_both_kinds
def test_a_socket_of_another_user_is_not_used(kind: socket.SocketKind) -> None:
    store = HashStore()
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(f"\0test {os.getpid()} {kind}")
        listener.listen()
        store.set("0", listener.getsockname())
        with pytest.raises(PermissionError, match="member 0's socket is another user's"):
            meet(store, 1, 2, TIMEOUT, kind, lambda peer: NOBODY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@of_both_kinds
def test_the_kernel_tells_users_apart(kind: socket.SocketKind) -> None:
    store = HashStore()
    listening = Member(store, 0, kind)
    address = store.get("0")
    child = os.fork()
    if child == 0:  # another user, who connects first: 3 when it is let go
        try:
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX, kind) as stranger:
                stranger.settimeout(TIMEOUT.total_seconds())
                stranger.connect(address)
                with contextlib.suppress(BrokenPipeError):  # let go before it has spoken
                    stranger.sendall((1).to_bytes(4, "big"))
                os._exit(0 if stranger.recv(1) else 3)
        except ConnectionError:
            os._exit(3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    member = Member(store, 1, kind)
    assert_joined(listening.met(), member.met())
