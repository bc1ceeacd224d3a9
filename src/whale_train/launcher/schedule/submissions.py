"""Read the submissions that `mode=schedule` simulates: a CSV trace, or the jobs' file itself."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from whale_train.errors import ConfigError, Fault, nearest
from whale_train.strategies.cluster_scheduling.schedulable_job import SchedulableJob
from whale_train.validation import validated

KEY = "schedule.trace"


class _Row(BaseModel):
    """One row of a trace.

    name: the submission's name.
    like: the job of the jobs' file whose speed, plans and batch it has.
    arrival_s: seconds after the start of the schedule.
    devices: number of devices that are requested; '' for those of the job.
    steps: number of optimizer steps; '' for those of the job.
    guaranteed: true or false; '' for that of the job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1)]
    like: str
    arrival_s: Annotated[float, Field(ge=0)]
    devices: Annotated[int, Field(ge=1)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    guaranteed: bool | None = None


def read_trace(
    path: str, kinds: Sequence[SchedulableJob], counts: Sequence[int]
) -> list[SchedulableJob]:
    """Return the submissions of a CSV file whose first line names the columns.

    kinds: the jobs of the jobs' file.
    counts: the numbers of devices that plans are made for.

    Raises ConfigError with all faults.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        remedy = "name a CSV file with the columns name, like, arrival_s"
        raise ConfigError([Fault(KEY, path, f"cannot be read ({error})", remedy)]) from None
    by_name = {job.name: job for job in kinds}
    faults: list[Fault] = []
    jobs: list[SchedulableJob] = []
    names: set[str] = set()
    for number, row in enumerate(rows):
        at = f"{KEY}[{number}]"
        given = {str(key): value for key, value in row.items() if value not in (None, "")}
        read: _Row | None = validated(_Row, given, at, faults)
        if read is None:
            continue
        kind = by_name.get(read.like)
        if kind is None:
            remedy = nearest(read.like, by_name)
            faults.append(Fault(f"{at}.like", read.like, "is no job of the jobs' file", remedy))
            continue
        asked = read.devices or kind.devices
        if asked not in counts:
            remedy = f"use one of {', '.join(map(str, counts))}"
            faults.append(Fault(f"{at}.devices", str(asked), "is not planned for", remedy))
        if read.name in names:
            rule = "is the name of two submissions"
            faults.append(Fault(f"{at}.name", read.name, rule, "give each its own"))
        names.add(read.name)
        sla = kind.is_guaranteed if read.guaranteed is None else read.guaranteed
        job = replace(
            kind,
            name=read.name,
            devices=asked,
            steps=read.steps or kind.steps,
            arrival_s=read.arrival_s,
            is_guaranteed=sla,
        )
        jobs.append(job)
    if not rows:
        faults.append(Fault(KEY, path, "has no submission", "write one a line"))
    if faults:
        raise ConfigError(faults)
    return jobs
