"""Form one job of the ranks that torchrun or srun started: rank 0 composes it, the others join.

Every process runs the same `whale-train` command. Every rank but 0 becomes a member process at
once, which waits for the run directory. Rank 0 composes and plans the job as usual, and starts a
member process of its own.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault, LaunchError, PlanError, RequestError
from whale_train.launcher.planning.plan_request import Resolved, resolve_request
from whale_train.launcher.ranks.early_host import EarlyHost
from whale_train.launcher.ranks.host_process import (
    POLL_S,
    HostOutcome,
    HostProcess,
)
from whale_train.launcher.ranks.job_key import job_key
from whale_train.launcher.ranks.rank_env import (
    LaunchPlace,
    job_name,
    place_from_environment,
    starter_of,
)
from whale_train.machine.hosts import HOSTS, REFUSED, Host, read_hosts
from whale_train.machine.parents import STARTER, end_with_parent
from whale_train.strategies.plan.plan import Plan

MEMBER_PROGRAM = (sys.executable, "-m", "whale_train.runtime.process.external_rank")

TELLING_S = 120.0

# Arguments that ask for several jobs, and arguments that ask for no ranks.
SWEEPS = ("-m", "--multirun", "hydra.mode=MULTIRUN")
ANSWERS = (
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info"),
    *("-sc", "--shell-completion", "mode=plan", "mode=export", "mode=audit"),
)


def find_place(arguments: Sequence[str]) -> LaunchPlace | None:
    """Return the place of this process among ranks that another program started, or None where
    this process is no such rank.

    The place and the job's key are written into the environment, where member processes read them.

    This process and its children end with the program that started it: torchrun, srun or our own
    agent. torchrun and srun end ranks by SIGTERM. On rank 0, SIGTERM acts as Ctrl-C after this
    call, so that the member process is ended as well.

    Raises ConfigError for variables that make no place, and for a job without a secret. On rank 0
    it is also raised, after telling the other ranks, for arguments of sweeps or without ranks.
    """
    place = place_from_environment(os.environ)
    if place is None:
        return None
    # job_name treats any rank with RANK set as torchrun's, so it is called before RANK is set.
    key = job_key(os.environ, job_name(os.environ))
    os.environ |= {
        "WHALE_TRAIN_JOB_KEY": key,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }
    starter = starter_of(os.environ)
    if starter:
        os.environ[STARTER] = starter
        # SIGKILL, since on SIGTERM a rank that saves would first wait for the other ranks.
        end_with_parent(os.getppid(), signal.SIGKILL)
    if place.rank == 0:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        faults = [fault for text in arguments for fault in _no_job_for_ranks(text)]
        if faults:
            report_refusal()
            raise ConfigError(faults)
    return place


def _no_job_for_ranks(argument: str) -> list[Fault]:
    """Return the fault of an argument that asks for several jobs, or for no ranks."""
    flag, _, value = argument.partition("=")
    key, given = (flag, "") if argument.startswith("-") else (flag, value)
    asked = flag if argument.startswith("--") else argument
    if asked in SWEEPS:
        rule = "starts several jobs, and the ranks were started from outside for one"
        return [Fault(key, given, rule, "run the sweep outside, one launch a job")]
    if asked in ANSWERS:
        rule = "needs no ranks, and some were started from outside"
        return [Fault(key, given, rule, "run it without torchrun or srun")]
    return []


def join_job() -> NoReturn:
    """Replace this process by the member process of a rank other than 0, whose exit status becomes
    that of this process."""
    os.execv(MEMBER_PROGRAM[0], MEMBER_PROGRAM)


def report_refusal() -> None:
    """Tell the waiting members that rank 0 has refused the job. They exit with status 2."""
    # torchrun and srun end all ranks when the first one exits. Rank 0 exits by itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        subprocess.run([*MEMBER_PROGRAM, "--refused"], check=False, timeout=TELLING_S)


class RendezvousTimeout(LaunchError):
    """The error of ranks that did not meet. `outcome` is the outcome of their run."""

    def __init__(self, outcome: HostOutcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.status)


class JobProcess:
    """The process that runs a job. Every `JobProcess` needs a `wait` or a `stop`.

    The process is a host that starts the ranks, or a member process for this rank if another
    program has started the ranks. It imports while the plan is made.

    run_dir: the run directory.
    place: the place of this process among ranks that another program started; None without such
        ranks.
    early: a host that has begun its imports; None if no host was started.
    """

    def __init__(
        self, run_dir: Path, place: LaunchPlace | None, early: EarlyHost | None = None
    ) -> None:
        self._run_dir, self._place = run_dir, place
        if place is None:
            self._process = HostProcess.of(run_dir, early)
        else:
            self._process = HostProcess.start(run_dir, MEMBER_PROGRAM)

    @contextmanager
    def planned(
        self, request: Request, poll: Callable[[], None], console: Console
    ) -> Iterator[Resolved]:
        """Resolve the request with `mode=train`, on the hosts that have met, and yield the result.

        If the request is refused here or inside the context, the waiting ranks are told. Raises
        RendezvousTimeout where the ranks did not meet, and ConfigError or PlanError where the
        request is refused.
        """
        hosts = None if self._place is None else self._hosts(poll, console)
        try:
            resolved = resolve_request(request.model_copy(update={"mode": "train"}), hosts=hosts)
            if self._place is not None:
                _check_world(self._place, resolved.plan)
            yield resolved
        except RequestError:
            if self._place is not None:
                _refuse(self._run_dir, self._process)
            raise

    def wait(self, poll: Callable[[], None]) -> HostOutcome:
        """Wait for the end of the run, as `HostProcess.wait` does, and return the outcome."""
        return self._process.wait(poll)

    def stop(self) -> None:
        """End all processes of the job, as `HostProcess.stop` does."""
        self._process.stop()

    def _hosts(self, poll: Callable[[], None], console: Console) -> tuple[Host, ...]:
        """Wait until the ranks have met, and return the hosts on which they were started.

        The hosts that do not share the run directory are printed. Raises RendezvousTimeout where
        the ranks end before they meet.
        """
        while not (self._run_dir / HOSTS).exists():
            if self._process.has_ended:
                raise RendezvousTimeout(self._process.wait(poll))
            poll()
            time.sleep(POLL_S)
        hosts = read_hosts(self._run_dir)
        apart = ", ".join(host.name for host in hosts if not host.shares)
        if apart:
            said = f"{apart}: not this file system; logs stay there, in a directory of that name"
            console.print(said, soft_wrap=True, markup=False, highlight=False)
        return hosts


def _refuse(run_dir: Path, member: HostProcess) -> None:
    """Tell the ranks, which have met, that the job is refused. All members exit with status 2.

    member: the member process of rank 0, which passes the message on.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in `report_refusal`
    (run_dir / REFUSED).touch()
    deadline = time.monotonic() + TELLING_S
    with suppress(KeyboardInterrupt):
        while not member.has_ended and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _check_world(place: LaunchPlace, plan: Plan) -> None:
    """Raise PlanError where the number of started ranks is not the plan's."""
    if place.world_size != plan.world_size:
        rule = f"ranks were started, and the plan for hardware={plan.cluster} has {plan.world_size}"
        remedy = f"start {plan.world_size}, or use hardware=cpu hardware.devices={place.world_size}"
        raise PlanError([Fault("WORLD_SIZE", str(place.world_size), rule, remedy)])
