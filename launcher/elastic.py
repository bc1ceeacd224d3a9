"""Ranks that torchrun or srun started: rank 0 composes the job, the others join it.

Every process runs the same `whale-train` command. All but rank 0 become members at once and
wait to be told the run directory; rank 0 goes the ordinary road and starts its own member.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from whale_train.errors import ConfigError, Fault, PlanError
from whale_train.launcher.placement import Place, place_from_environment
from whale_train.strategies.plan import Plan

MEMBER_PROGRAM = (sys.executable, "-m", "whale_train.runtime.member")


def find_place(arguments: Sequence[str]) -> Place | None:
    """This process's place, its variables set as members read them; None when it has none.

    Raises ConfigError for variables that make no sense, and for what ranks started from outside
    cannot do.
    """
    place = place_from_environment(os.environ)
    if place is None:
        return None
    if any(flag in arguments for flag in ("-m", "--multirun")):
        rule = "starts several jobs, and the ranks were started from outside for one"
        raise ConfigError([Fault("-m", "", rule, "run the sweep outside, one launch a job")])
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }
    return place


def become_member() -> NoReturn:
    """Be a rank other than 0 instead of this process; its exit status becomes ours."""
    os.execv(MEMBER_PROGRAM[0], MEMBER_PROGRAM)


def tell_refused() -> None:
    """Tell the members that wait for rank 0 that there is no job."""
    subprocess.run([*MEMBER_PROGRAM, "--refused"], check=False, timeout=120)


def check_world(place: Place, plan: Plan) -> None:
    """Raises PlanError unless as many ranks were started as the plan has."""
    if place.world_size != plan.world_size:
        rule = f"ranks were started, and the plan for hardware={plan.cluster} has {plan.world_size}"
        remedy = f"start {plan.world_size}, or use hardware=cpu hardware.devices={place.world_size}"
        raise PlanError([Fault("WORLD_SIZE", str(place.world_size), rule, remedy)])
