"""Read the options of `mode=schedule`, and the file that lists its jobs."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from whale_train.validation import FOLDER, no_truth_value

_Whole = Annotated[int, BeforeValidator(no_truth_value)]
_Count = Annotated[_Whole, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0)]


class ScheduleOptions(BaseModel):
    """Options of `mode=schedule`, under `schedule`.

    policy: how devices are shared: `replan` by the jobs' sensitivity curves, `resources` likewise
        with every job's requested plan, `plans` with the best plan on the requested devices in the
        order of submission, `first_come` as requested in that order.
    simulate: whether the jobs are simulated, and none is started.
    trace: a CSV file of submissions that are simulated, each like a job of the jobs' file.
    trace_jobs: number of submissions that `seed` draws in place of a trace.
    plans: the plans that jobs may run under beside the requested one: each is the name of a
        strategy, or overrides of `strategy` and `train.accumulate` in one text.
    reconfiguration_s: seconds that a checkpoint and a resume take; None takes those measured in
        this schedule, and Rubick's 78 in a simulation.
    least_useful_share: the least share of a job's time that reconfigurations must leave.
    starvation_s: seconds of waiting after which a job comes before all others.
    round_s: the longest time between two decisions, in seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policy: Literal["replan", "resources", "plans", "first_come"] = "replan"
    simulate: bool = False
    trace: str | None = Field(None, min_length=1)
    trace_jobs: _Count | None = None
    plans: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    reconfiguration_s: _Seconds | None = None
    least_useful_share: float = Field(0.97, ge=0, lt=1)
    starvation_s: _Seconds = 3600.0
    round_s: float = Field(60.0, gt=0)


class JobEntry(BaseModel):
    """One job of the jobs' file.

    name: the job's name, and that of its run directory.
    command: the overrides of its request.
    devices: number of devices that are requested.
    guaranteed: whether the job, once it runs, is never slower than on the resources and the plan
        that it requests.
    arrival_s: seconds after the start of the schedule at which the job is submitted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=FOLDER)
    command: tuple[str, ...]
    devices: _Count
    guaranteed: bool = True
    arrival_s: _Seconds = 0.0
