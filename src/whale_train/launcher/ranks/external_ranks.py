"""Join ranks that torchrun or srun started: rank 0 composes the job, the others join it.

Every process runs the same `whale-train` command. All but rank 0 become members at once, and wait
to be told the run directory. Rank 0 takes the ordinary road, and starts its own member.
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

# Arguments that ask for several jobs, and those that ask for none.
SWEEPS = ("-m", "--multirun", "hydra.mode=MULTIRUN")
ANSWERS = (
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info"),
    *("-sc", "--shell-completion", "mode=plan", "mode=export", "mode=audit"),
)


def find_place(arguments: Sequence[str]) -> LaunchPlace | None:
    """Return the place of this process among ranks that others started, or None where there are
    none.

    Sets the environment's variables of the place, and the job's key, as members read them.

    This process ends with torchrun, srun or our own agent, whichever started it, and so do the
    processes that it starts. torchrun and srun end ranks by SIGTERM. On rank 0, SIGTERM acts as
    Ctrl-C from here on, so that its member is ended with it.

    Raises ConfigError for variables that make no sense, for a job without a secret, and, on rank 0
    and after telling the others, for arguments that ranks started from outside cannot serve.
    """
    place = place_from_environment(os.environ)
    if place is None:
        return None
    # job_name takes ranks for torchrun's where RANK is set, so that it is called before that.
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
        # Not SIGTERM: on that, ranks that save would wait for the others first.
        end_with_parent(os.getppid(), signal.SIGKILL)
    if place.rank == 0:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        faults = [fault for text in arguments for fault in _no_job_for_ranks(text)]
        if faults:
            report_refusal()
            raise ConfigError(faults)
    return place


def _no_job_for_ranks(argument: str) -> list[Fault]:
    """Return the fault of an argument that asks for several jobs, or for none."""
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
    """Replace this process by a rank other than 0. The exit status of that rank becomes ours."""
    os.execv(MEMBER_PROGRAM[0], MEMBER_PROGRAM)


def report_refusal() -> None:
    """Tell the members that wait for rank 0 that there is no job. They leave with status 2."""
    # The program that started the ranks ends them all when the first one leaves. This one leaves by
    # itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        subprocess.run([*MEMBER_PROGRAM, "--refused"], check=False, timeout=TELLING_S)


class RendezvousTimeout(LaunchError):
    """The error of ranks that did not meet. `outcome` says how their run ended."""

    def __init__(self, outcome: HostOutcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.status)


class JobProcess:
    """The process that runs a job. Every `JobProcess` needs a `wait` or a `stop`.

    It prepares while a plan is made. It is a host that starts the ranks, or this process's own rank
    where others have started the ranks.

    run_dir: the run directory.
    place: the place of this process among ranks that others started; None where there are none.
    early: a host that imports already; None: there is none.
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
        """Resolve the request as that of a training, on the hosts that have met, and yield the
        plan.

        Ranks that wait for the plan are told where it is refused, here or inside the context.
        Raises RendezvousTimeout where the ranks did not meet, and ConfigError or PlanError.
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
        """Wait for the run's end, as `HostProcess.wait` does, and return its outcome."""
        return self._process.wait(poll)

    def stop(self) -> None:
        """End all processes of the job, as `HostProcess.stop` does."""
        self._process.stop()

    def _hosts(self, poll: Callable[[], None], console: Console) -> tuple[Host, ...]:
        """Return the hosts on which ranks were started, once they have met.

        Prints the hosts that do not share the run directory. Raises RendezvousTimeout where the
        ranks end before.
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
    """Have `member`, which has met the others, tell them that there is no job. All leave with
    status 2."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in `report_refusal`
    (run_dir / REFUSED).touch()
    deadline = time.monotonic() + TELLING_S
    with suppress(KeyboardInterrupt):
        while not member.has_ended and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _check_world(place: LaunchPlace, plan: Plan) -> None:
    """Raise PlanError where the plan has another number of ranks than were started."""
    if place.world_size != plan.world_size:
        rule = f"ranks were started, and the plan for hardware={plan.cluster} has {plan.world_size}"
        remedy = f"start {plan.world_size}, or use hardware=cpu hardware.devices={place.world_size}"
        raise PlanError([Fault("WORLD_SIZE", str(place.world_size), rule, remedy)])
