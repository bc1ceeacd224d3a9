"""A real sshd on every one of some hosts, and the ssh that knows how to reach them."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.apart import HostApart

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
_START_S = 20.0


@contextmanager
def sshd_on(hosts: Sequence[HostApart], folder: Path) -> Iterator[Path]:
    """Serve the hosts; return a folder to put first into PATH, whose `ssh` logs in to them."""
    assert SSHD is not None
    for name in ("user", "host"):
        key = ("-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        subprocess.run(["ssh-keygen", *key], check=True)
    settings = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        **{"StrictModes": "no", "UsePAM": "no", "PidFile": "none", "PermitRootLogin": "yes"},
    }
    (folder / "sshd_config").write_text("".join(f"{k} {v}\n" for k, v in settings.items()))
    known = "".join(f"{h.name} {(folder / 'host.pub').read_text()}" for h in hosts)
    (folder / "known_hosts").write_text(known)
    options = {"IdentityFile": folder / "user", "UserKnownHostsFile": folder / "known_hosts"}
    (folder / "config").write_text("".join(f"{k} {v}\n" for k, v in options.items()))
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    ssh.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # where it separates privileges
    servers = [
        subprocess.Popen(
            host.command(SSHD, "-D", "-e", "-f", str(folder / "sshd_config")),
            stderr=subprocess.DEVNULL,
        )
        for host in hosts
    ]
    try:
        for host in hosts:
            _wait_for(host, ssh)
        yield ssh.parent
    finally:
        for server in servers:
            server.terminate()
            server.wait()


def _wait_for(host: HostApart, ssh: Path) -> None:
    deadline = time.monotonic() + _START_S
    while subprocess.run(host.command(str(ssh), host.name, "true"), check=False).returncode:
        assert time.monotonic() < deadline, f"no sshd on {host.name}"
        time.sleep(0.1)
