"""Name the files of a job of Slurm, and read from them how the job ended.

`FOLDER/JOB.out` and `FOLDER/JOB.err` have the output of all ranks. `FOLDER/JOB.status` has the exit
status of rank 0's command, once that has ended for good.
"""

from dataclasses import dataclass
from pathlib import Path

_LAST_LINES = 30


@dataclass(frozen=True)
class SlurmJob:
    """A job that Slurm has taken.

    job_id: the id, as `squeue --array` prints it; of a heterogeneous job, that of its first
        component.
    folder: the folder of its files.
    num_components: number of components; more than one for a heterogeneous job.
    """

    job_id: str
    folder: Path
    num_components: int = 1

    @property
    def stdout(self) -> Path:
        """Return the path of the file with what the ranks print."""
        return self.folder / f"{self.job_id}.out"

    @property
    def stderr(self) -> Path:
        """Return the path of the file with the errors that the ranks print."""
        return self.folder / f"{self.job_id}.err"

    @property
    def status_path(self) -> Path:
        """Return the path of the file with the exit status."""
        return self.folder / f"{self.job_id}.status"

    def status(self) -> int:
        """Return the exit status of a job that has ended: rank 0's, or 1 without a result."""
        try:
            status = int(self.status_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 1
        return status if status >= 0 else 1

    def last_lines(self) -> str:
        """Return the last _LAST_LINES lines that ranks wrote to stderr; '' without a file."""
        try:
            lines = self.stderr.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        own = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
        return "\n".join(own[-_LAST_LINES:])

    def summary(self) -> str:
        """Return the summary that a finished job printed; '' for a job that is not done."""
        try:
            output = self.stdout.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        _, done, rest = output.rpartition("\ndone: ")
        return (done + rest).strip() if done else ""
