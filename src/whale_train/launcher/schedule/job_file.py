"""Read the jobs' file of `mode=schedule`, and compose the request of each job under each plan.

All faults of the file and of every job's command are found together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault, RequestError
from whale_train.launcher.compose.command_line import parsed_overrides
from whale_train.launcher.compose.in_python import composed_request
from whale_train.schedule_options import JobEntry
from whale_train.validation import validated

AS_REQUESTED = "as requested"  # the name of the plan that a job's own command has
_KEY = "jobs"
# Keys of a command that the schedule sets itself, with the remedy.
_SET_HERE = {
    "mode": "leave it out: jobs are trained",
    "hardware": "leave it out: the schedule shares its own hardware",
    "launcher": "leave it out: the schedule's own launcher starts all jobs",
    "hydra.run.dir": "leave it out: it is jobs/NAME in the schedule's directory",
    "train.resume": "leave it out: a job goes on from its own checkpoints",
}


@dataclass(frozen=True)
class ScheduledRequest:
    """A job of the file with its requests.

    entry: the job as the file has it.
    by_plan: the request under each plan, by the plan's name; the first is `AS_REQUESTED`.
    commands: the overrides that make the request of each plan.
    """

    entry: JobEntry
    by_plan: dict[str, Request]
    commands: dict[str, tuple[str, ...]]


def read_jobs(
    path: str, devices: int, hardware: Sequence[str], plans: Sequence[str]
) -> list[ScheduledRequest]:
    """Return the jobs of the file at `path`.

    devices: number of devices of the cluster, which no job may exceed.
    hardware: overrides for the devices of the cluster, which every job is composed with.
    plans: the plans of `schedule.plans`.

    Raises ConfigError with all faults.
    """
    faults: list[Fault] = []
    entries = _entries(path, faults)
    for number, entry in entries.items():
        if entry.devices > devices:
            key, rule = f"{_KEY}[{number}].devices", f"is more than the {devices} devices there are"
            faults.append(Fault(key, str(entry.devices), rule, f"use at most {devices}"))
        if any(entry.name == entries[i].name for i in range(number) if i in entries):
            rule, remedy = "is the name of two jobs", "give each its own"
            faults.append(Fault(f"{_KEY}[{number}].name", entry.name, rule, remedy))
    choices = _choices(plans, faults)
    jobs = [
        job
        for number, entry in entries.items()
        if (job := _composed(number, entry, hardware, choices, faults)) is not None
    ]
    if faults:
        raise ConfigError(faults)
    return jobs


def _entries(path: str, faults: list[Fault]) -> dict[int, JobEntry]:
    """Return the entries of the file by their place in it, without those whose faults it adds."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        remedy = "name a YAML file with a list of jobs, each {name, command, devices}"
        faults.append(Fault(_KEY, path, f"cannot be read ({said})", remedy))
        return {}
    if isinstance(content, dict) and list(content) == [_KEY]:
        content = content[_KEY]
    if not isinstance(content, list) or not content:
        remedy = "write a list of jobs, each {name, command, devices}"
        faults.append(Fault(_KEY, path, "has no list of jobs", remedy))
        return {}
    read = (validated(JobEntry, x, f"{_KEY}[{i}]", faults) for i, x in enumerate(content))
    return {number: entry for number, entry in enumerate(read) if entry is not None}


def _choices(plans: Sequence[str], faults: list[Fault]) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each plan of `schedule.plans`, by its text. Adds a fault for a plan
    that sets other keys."""
    choices: dict[str, tuple[str, ...]] = {}
    for text in plans:
        words = tuple(x if "=" in x else f"strategy={x}" for x in text.split())
        try:
            keys = [override.key_or_group for override in parsed_overrides(words)]
        except ConfigError as error:
            faults += [replace(x, key=f"schedule.plans: {x.key}") for x in error.faults]
            continue
        for key in keys:
            if key.partition(".")[0] != "strategy" and key != "train.accumulate":
                rule = f"sets {key}, and a plan must not change what is computed"
                remedy = "use keys of strategy, and train.accumulate"
                faults.append(Fault("schedule.plans", text, rule, remedy))
        choices[text] = words
    return choices


def _composed(
    number: int,
    entry: JobEntry,
    hardware: Sequence[str],
    choices: dict[str, tuple[str, ...]],
    faults: list[Fault],
) -> ScheduledRequest | None:
    """Return a job with its requests, or None after adding faults.

    number: the job's place in the file.
    """
    at = f"{_KEY}[{number}].command"
    try:
        keys = [override.key_or_group for override in parsed_overrides(entry.command)]
    except ConfigError as error:
        faults += [replace(fault, key=f"{at}: {fault.key}") for fault in error.faults]
        return None
    wrong = [
        Fault(f"{at}: {key}", "", "is set by the schedule", remedy)
        for key in keys
        for ours, remedy in _SET_HERE.items()
        if key == ours or (ours == "hardware" and key.startswith("hardware."))
    ]
    if wrong:
        faults += wrong
        return None
    requested: dict[str, tuple[str, ...]] = {AS_REQUESTED: ()}
    given = {key.partition(".")[0] for key in keys}
    by_plan: dict[str, Request] = {}
    commands: dict[str, tuple[str, ...]] = {}
    for name, overrides in (requested | choices).items():
        command = entry.command
        if overrides and "strategy" in given:  # a plan replaces the command's strategy
            texts = zip(keys, entry.command, strict=True)
            command = tuple(x for key, x in texts if key.partition(".")[0] != "strategy")
        commands[name] = (*command, *overrides)
        try:
            by_plan[name] = composed_request([*commands[name], *hardware]).request
        except RequestError as error:
            where = at if name == AS_REQUESTED else f"{at} under {name}"
            faults += [replace(fault, key=f"{where}: {fault.key}") for fault in error.faults]
            return None
    return ScheduledRequest(entry, by_plan, commands)
