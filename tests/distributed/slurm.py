"""A real Slurm: a controller on the first of some hosts, and all of them its nodes."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.apart import HostApart

_TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "munged", "mungekey")
_START_S = 30.0
_SETTINGS = """ClusterName=tried
SlurmctldHost={controller}
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
# As long as a credential lives, a job that was queued again waits.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Heterogeneous jobs are started by backfill alone.
SchedulerParameters=bf_interval=1
ReturnToService=2
MpiDefault=none
# As many as there are ranks, whatever the machine has.
SlurmdParameters=config_overrides
"""
_NODE = "NodeName={name} CPUs=8 RealMemory=2000 State=UNKNOWN{feature}\n"
_PARTITION = "PartitionName={name} Nodes={nodes} State=UP OverSubscribe=FORCE{default}\n"


def has_slurm() -> bool:
    """Return whether its programs are installed."""
    return all(shutil.which(tool) is not None for tool in _TOOLS)


@contextmanager
def slurm_on(
    hosts: Sequence[HostApart], folder: Path, kinds: Sequence[str] = ()
) -> Iterator[Mapping[str, str]]:
    """Serve the hosts, which all see `folder`; return the variables of who submits to it.

    kinds: for every host the feature that its node has, and the name of a partition of the nodes
        with that feature; there is a partition of all nodes as well.
    """
    for name in ("state", "munge"):
        (folder / name).mkdir(mode=0o700)
    munge = folder / "munge"
    subprocess.run(["mungekey", "--create", f"--keyfile={munge}/key"], check=True)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    files["seed-file"] = "seed"
    options = [f"--{option}={munge / name}" for option, name in files.items()]
    names = [host.name for host in hosts]
    written = _SETTINGS.format(controller=names[0], folder=folder)
    features = dict(zip(names, (f" Feature={kind}" for kind in kinds), strict=False))
    written += "".join(_NODE.format(name=x, feature=features.get(x, "")) for x in names)
    written += _PARTITION.format(name="all", nodes=",".join(names), default=" Default=YES")
    for kind in dict.fromkeys(kinds):
        own = [name for name, other in zip(names, kinds, strict=True) if other == kind]
        written += _PARTITION.format(name=kind, nodes=",".join(own), default="")
    (folder / "slurm.conf").write_text(written)
    named = {"SLURM_CONF": str(folder / "slurm.conf")}
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        started.append(
            subprocess.Popen(
                command,
                env=os.environ | named,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    try:
        start("munged", "--foreground", "--force", *options)
        start(*hosts[0].command("slurmctld", "-D"))
        for host in hosts:
            start(*host.command("slurmd", "-D", "-N", host.name))
        _wait_for(hosts, named)
        yield named
    finally:
        for process in started[::-1]:
            process.terminate()
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(hosts: Sequence[HostApart], named: Mapping[str, str]) -> None:
    asks = hosts[0].command("sinfo", "--noheader", "--states=idle", "--format=%D")
    deadline = time.monotonic() + _START_S
    while True:
        said = subprocess.run(asks, env=os.environ | named, capture_output=True, check=False)
        if said.stdout.strip() == str(len(hosts)).encode():
            return
        assert time.monotonic() < deadline, said
        time.sleep(0.3)
