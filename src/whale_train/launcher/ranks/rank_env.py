"""Read from the environment whether this process is one of several ranks that torchrun or Slurm's
srun started.

All functions are pure: they read only the environment that they are given. MPI launchers are not
supported.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from whale_train.errors import ConfigError, Fault
from whale_train.machine.parents import STARTER


@dataclass(frozen=True)
class LaunchPlace:
    """The place of a rank among all ranks of a job.

    rank: the global rank.
    world_size: number of ranks.
    local_rank: the rank among the ranks on the same host.
    local_world_size: number of ranks on the same host.
    address: the address of the rendezvous, on rank 0's host.
    port: the TCP port of the rendezvous.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


@dataclass(frozen=True)
class Starter:
    """The environment variables in which a program that starts ranks gives each rank its place.

    name: the program.

    Every other field has the variables that may hold the LaunchPlace field of the same name, in
    order of preference.
    """

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    address: tuple[str, ...]
    port: tuple[str, ...]


# https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
TORCHRUN = Starter(
    name="torchrun",
    rank=("RANK",),
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    address=("MASTER_ADDR",),
    port=("MASTER_PORT",),
)
# https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES". The job's variables may
# describe more nodes and tasks than the step that started this rank, so the step's come first.
SLURM = Starter(
    name="srun",
    rank=("SLURM_PROCID",),
    world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=("SLURM_LOCALID",),
    local_world_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    address=("MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    port=("MASTER_PORT", "SLURM_JOB_ID"),
)

# Step ids from this one on are not steps of srun, but an interactive shell, a batch script or a
# job's outer container (SLURM_INTERACTIVE_STEP and above in slurm.h).
FIRST_SPECIAL_STEP = 0xFFFFFFFA

# Ports for Slurm jobs, below the ports that Linux gives to outgoing connections (32768 and above).
PORTS = range(20000, 32000)
# Distance between the ports of a job's steps. With 1, the second step of a job would have the port
# of the next job.
PORTS_BETWEEN_STEPS = 797

NODE_LIST = re.compile(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?:,|$)")
TASKS_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def place_from_environment(environment: Mapping[str, str]) -> LaunchPlace | None:
    """Return the place of this process among ranks that torchrun or srun started; None where this
    process is no such rank.

    Raises ConfigError, with the variables as keys, where variables are missing or not integers, or
    a rank is not below the number of ranks.
    """
    own = (TORCHRUN.rank, TORCHRUN.world_size, TORCHRUN.local_rank, TORCHRUN.local_world_size)
    if any(name in environment for names in own for name in names):
        return _Reader(TORCHRUN, environment).place()
    if is_slurm_task(environment):
        return _Reader(SLURM, in_order_of_ranks(environment)).place()
    return None


def job_name(environment: Mapping[str, str]) -> str:
    """Return a name that is common to the ranks of one launch, and unique to that launch.

    The name has torchrun's run id, or Slurm's job id, step id and restart count. It is no secret,
    and '' for ranks that were started by hand.
    """
    of_torchrun = any(name in environment for name in TORCHRUN.rank)
    of_slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    names = ("TORCHELASTIC_RUN_ID",) if of_torchrun else of_slurm
    return " ".join(f"{name}={environment[name]}" for name in names if name in environment)


def starter_of(environment: Mapping[str, str]) -> str:
    """Return the name of the program that started this rank, if it lives as long as the rank.

    For ranks started by hand the name is '', since a shell may end before the processes that it has
    started.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return TORCHRUN.name
    if any(name in environment for name in TORCHRUN.rank):
        return environment.get(STARTER, "")
    return SLURM.name if is_slurm_task(environment) else ""


def is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks.

    The shell of `salloc` and the script of `sbatch` also have SLURM_* variables, but are no tasks.
    """
    step = environment.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environment or not step:
        return False
    if step.isdigit() and int(step) >= FIRST_SPECIAL_STEP:
        return False
    counts = (environment[name] for name in SLURM.world_size if name in environment)
    return next(counts, "") != "1"


def in_order_of_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a task of srun, with the nodes of its step in the order of ranks.

    In a step over the components of a heterogeneous job, srun sorts the nodes by name, and ranks
    follow the components (`findings/slurm_sorts_the_nodes_of_a_heterogeneous_step.sh`). The nodes
    of a step over some of several components stay sorted: the task is not told which they are.
    """
    in_order = dict(environment)
    nodes_name, tasks_name = SLURM.address[1], SLURM.local_world_size[0]
    size = environment.get("SLURM_HET_SIZE", "")
    groups = range(int(size) if size.isdecimal() else 0)
    nodes = [environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in groups]
    tasks = [environment.get(f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}", "") for group in groups]
    try:
        in_components = sorted(tasks_per_node(",".join(tasks)))
        if groups and in_components == sorted(tasks_per_node(environment.get(tasks_name, ""))):
            in_order |= {nodes_name: ",".join(nodes), tasks_name: ",".join(tasks)}
    except ValueError:  # the variables of no such step
        pass
    return in_order


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list, such as `gpu003` for `gpu[003-007,012],login1`.

    Raises ValueError for text that is no node list.
    """
    match = NODE_LIST.match(node_list)
    if match is None:
        raise ValueError(node_list)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match.group().rstrip(","))


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each node, such as 2, 2, 2, 1 for `2(x3),1`. Raises ValueError
    for text in another form."""
    counts: list[int] = []
    for part in text.split(","):
        match = TASKS_PER_NODE.fullmatch(part)
        if match is None:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


class _Reader:
    """A reader of one starter's variables that collects the faults of all."""

    def __init__(self, starter: Starter, environment: Mapping[str, str]) -> None:
        self._starter = starter
        self._environment = environment
        self._faults: list[Fault] = []

    def place(self) -> LaunchPlace:
        """Return the place. Raises ConfigError with all faults."""
        starter = self._starter
        rank, rank_name = self._integer(starter.rank)
        world_size, world_name = self._integer(starter.world_size)
        local_rank, local_name = self._integer(starter.local_rank)
        local_world_size, local_world_name = self._local_world_size()
        address = self._address()
        port = self._port()
        if not self._faults:
            self._check_inside(rank, rank_name, world_size, world_name)
            self._check_inside(local_rank, local_name, local_world_size, local_world_name)
            if local_world_size > world_size:
                self._fault(
                    local_world_name, f"is more than {world_name}={world_size}, the whole job"
                )
        if self._faults:
            raise ConfigError(self._faults)
        return LaunchPlace(rank, world_size, local_rank, local_world_size, address, port)

    def _fault(self, name: str, rule: str) -> None:
        """Add a fault of the variable `name`."""
        remedy = (
            f"start the ranks with {self._starter.name}, which sets its variables itself, "
            "or unset them"
        )
        self._faults.append(Fault(name, self._environment.get(name, ""), rule, remedy))

    def _name(self, names: tuple[str, ...]) -> str:
        """Return the first of the variables `names` that is set, or the first name after adding a
        fault."""
        for name in names:
            if self._environment.get(name):
                return name
        fields = (self._starter.rank, self._starter.world_size, self._starter.local_rank)
        given = [
            f"{name}={self._environment[name]}"
            for names in fields
            for name in names
            if self._environment.get(name)
        ]
        beside = f" while {given[0]} is" if given else ""
        self._fault(names[0], f"is not set{beside}")
        return names[0]

    def _integer(self, names: tuple[str, ...]) -> tuple[int, str]:
        """Return the integer in the first of the variables `names` that is set, and the name of the
        variable. The integer is 0 after a fault."""
        name = self._name(names)
        text = self._environment.get(name, "")
        if text.isdecimal():
            return int(text), name
        if text:
            self._fault(name, "is not a whole number from 0 up")
        return 0, name

    def _local_world_size(self) -> tuple[int, str]:
        """Return the number of ranks on this host, and the name of the variable that has it. The
        number is 0 after a fault."""
        if self._starter is TORCHRUN:
            return self._integer(TORCHRUN.local_world_size)
        name = self._name(SLURM.local_world_size)
        text = self._environment.get(name, "")
        if not text:
            return 0, name
        try:
            counts = tasks_per_node(text)
        except ValueError:
            self._fault(name, "is not a list of tasks per node, like 2(x3),1")
            return 0, name
        if len(counts) == 1:
            return counts[0], name
        node, node_name = self._integer(("SLURM_NODEID",))
        if node >= len(counts):
            self._fault(node_name, f"is outside of the {len(counts)} nodes of {name}")
            return 0, name
        return counts[node], name

    def _address(self) -> str:
        """Return the address of the rendezvous; '' after a fault."""
        name = self._name(self._starter.address)
        text = self._environment.get(name, "")
        if name == "MASTER_ADDR" or not text:
            return text
        try:
            return first_host(text)
        except ValueError:
            self._fault(name, "is not a list of nodes, like gpu[003-007,012]")
            return ""

    def _port(self) -> int:
        """Return the port of the rendezvous. For a Slurm job, the port is computed from the ids of
        the job and the step."""
        number, name = self._integer(self._starter.port)
        if name == "MASTER_PORT":
            if number > 65535 or (number == 0 and self._environment.get(name) == "0"):
                self._fault(name, "is not a port, 1 to 65535")
            return number
        # Jobs, and steps of one job, may run on the same host at the same time.
        step, _ = self._integer(("SLURM_STEP_ID",))
        return PORTS[(number + step * PORTS_BETWEEN_STEPS) % len(PORTS)]

    def _check_inside(self, index: int, name: str, size: int, size_name: str) -> None:
        """Add a fault where `index`, of the variable `name`, is not below `size`."""
        if index >= size:
            self._fault(name, f"is not below {size_name}={size}")
