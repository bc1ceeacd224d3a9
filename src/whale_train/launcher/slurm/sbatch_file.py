"""Write the text of a file for sbatch: what a job asks for, and the one step that starts its ranks.

The functions are pure: data in, text out. A job of several components is a heterogeneous job of
Slurm (https://slurm.schedmd.com/heterogeneous_jobs.html): its components get nodes by options of
their own, start together, and their tasks are one step with ranks from 0 up.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

Option = str | int | float | bool

# Ranks of a job trust each other by a secret. A job draws its own, unless it is submitted with one.
_SECRET = (
    "export WHALE_TRAIN_SECRET="
    "\"${WHALE_TRAIN_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}\""
)
_COMMAND = '"${command[@]}"'  # all words of the array, of which each stays one


@dataclass(frozen=True)
class Component:
    """Nodes of a job that Slurm gives by the same options.

    nodes: number of nodes.
    ranks_per_node: number of ranks on each node.
    options: options of sbatch by name, without dashes in front. `true` writes the name alone, and
        `false` leaves the option out.
    """

    nodes: int
    ranks_per_node: int
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True)
class SbatchFile:
    """The content of a file for sbatch.

    components: the components of the job, in the order of ranks.
    command: the program that each rank starts, and its arguments.
    options: options of sbatch for the job itself, such as its output.
    srun: options of the step, likewise.
    """

    components: tuple[Component, ...]
    command: tuple[str, ...]
    options: Mapping[str, Option] = field(default_factory=dict)
    srun: Mapping[str, Option] = field(default_factory=dict)

    def text(self) -> str:
        """Return the text of the file."""
        lines = ["#!/bin/bash"]
        for number, component in enumerate(self.components):
            size = {"nodes": component.nodes, "ntasks-per-node": component.ranks_per_node}
            if number:
                lines.append("#SBATCH hetjob")
            options = {**({} if number else self.options), **size, **component.options}
            lines += [f"#SBATCH {option}" for option in written_options(options)]
        command = ["command=(", *(f"    {shlex.quote(word)}" for word in self.command), ")"]
        return "\n".join([*lines, "", _SECRET, *command, self._step(), ""])

    def _step(self) -> str:
        """Return the command line of srun.

        Since Slurm 22.05, srun does not inherit `cpus-per-task` from the job. Where components
        differ in it, srun has options for each component, and the command once for each.
        """
        cores = [component.options.get("cpus-per-task", False) for component in self.components]
        last = len(cores) - 1
        groups: list[tuple[str | bool, Option]]
        if len(set(cores)) == 1:
            groups = [(f"0-{last}" if last else False, cores[0])]
        else:
            groups = [(str(number), own) for number, own in enumerate(cores)]
        parts = [
            written_options({"het-group": group, "cpus-per-task": own, **self.srun})
            for group, own in groups
        ]
        return "srun " + " : \\\n    ".join(" ".join([*part, _COMMAND]) for part in parts)


def written_options(options: Mapping[str, Option]) -> list[str]:
    """Return options as a command line has them."""
    return [
        f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
        for name, value in options.items()
        if value is not False
    ]
