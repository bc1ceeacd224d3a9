"""Run the command `whale-train`, from its command line to its exit status.

Hydra composes the config once, in the parent. Every job runs in processes of its own.
"""

import logging
import os
import sys
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from secrets import token_hex
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from whale_train.errors import RequestError
from whale_train.launcher.compose import command_line
from whale_train.launcher.compose.own_files import said_of_own_files
from whale_train.launcher.doctor.doctor import asks_doctor, run_doctor
from whale_train.launcher.followed import Follower
from whale_train.launcher.job import run_job
from whale_train.launcher.job_end import EXIT_STATUS, JobEnd
from whale_train.launcher.queued import from_queue
from whale_train.launcher.ranks.early_host import EarlyHost
from whale_train.launcher.ranks.external_ranks import find_place, join_job, report_refusal
from whale_train.launcher.ranks.interfaces import refuse_missing_interfaces
from whale_train.launcher.ui.show_error import error_text, terminal_width
from whale_train.launcher.ui.sweep_table import SweepRow, sweep_table
from whale_train.launcher.ui.terminal import open_console

# Loggers that warn, when torchao is imported, of its kernels for other GPUs and of its own calls.
_LOGGERS_OF_IMPORTS = ("torchao", "torch.utils._pytree")


def run_command(early: EarlyHost | None = None) -> NoReturn:
    """Run the command and exit.

    early: a host that has begun its imports, for the first job that starts ranks; None if no host
        was started.

    The exit status is 0 when every job is done, 1 when a run failed, 2 when a request was refused,
    and 130 when the command was interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")  # the locale may lack some characters
    # Two runs that start in the same second get directories of their own.
    OmegaConf.register_new_resolver("whale_suffix", lambda: token_hex(3), use_cache=True)
    place = None
    try:
        if command_line.asks_version(sys.argv[1:]):
            sys.stdout.write(_version() + "\n")
            sys.exit(0)
        if asks_doctor(sys.argv[1:]):
            sys.exit(run_doctor())
        place = find_place(sys.argv[1:])
        if place is not None and place.rank:
            refuse_missing_interfaces(os.environ)
            join_job()
        sys.argv[1:] = command_line.rewritten(sys.argv[1:])
        command_line.read_own_files(sys.argv[1:])
        command_line.check(sys.argv[1:])
    except RequestError as error:
        sys.stderr.write(error_text(error, terminal_width(sys.stderr)) + "\n")
        if place is not None and not place.rank:
            report_refusal()
        sys.exit(EXIT_STATUS["refused"])
    except KeyboardInterrupt:
        sys.exit(EXIT_STATUS["interrupted"])
    for name in _LOGGERS_OF_IMPORTS:  # in this process alone: ranks log them
        logging.getLogger(name).setLevel(logging.ERROR)
    ends: list[tuple[tuple[str, ...], JobEnd]] = []

    @hydra.main(
        config_path=f"pkg://{command_line.CONFIG_MODULE}", config_name="config", version_base="1.3"
    )
    def job(config: DictConfig, follower: Follower | None = None) -> Any:
        hydra_config = HydraConfig.get()
        names = {str(k): str(v) for k, v in hydra_config.runtime.choices.items() if v is not None}
        run_dir = Path(hydra_config.runtime.output_dir)
        files = said_of_own_files(hydra_config)
        again = _again(hydra_config, run_dir)
        end = run_job(config, names, run_dir, again, place, files, early, follower)
        if follower is not None:  # Optuna's sweeper needs the whole end, not only the loss
            return end
        ends.append((tuple(hydra_config.overrides.task), end))
        if end.status == "interrupted":  # the rest of the sweep does not run
            sys.exit(_status(ends))
        return end.summary.get("final_loss")

    job()
    console = open_console(sys.stdout)
    ends = list(zip((o for o, _ in ends), from_queue([e for _, e in ends], console), strict=True))
    if len(ends) > 1 and not any(end.submission for _, end in ends):
        console.print(sweep_table([_row(*end) for end in ends], console.width))
    sys.stdout.flush()
    if place is not None and any(end.status == "refused" and not end.is_told for _, end in ends):
        report_refusal()
    sys.exit(_status(ends))


def _version() -> str:
    """Return the text of `--version`, read from package metadata without importing torch."""
    ours, torch, deepspeed = map(version, ("whale-train", "torch", "deepspeed"))
    return f"whale-train {ours} (torch {torch}, deepspeed {deepspeed})"


def _again(config: Any, run_dir: Path) -> list[str]:
    """Return command-line arguments that reproduce the request of one job.

    For a job of a sweep, the arguments reproduce that job alone.

    config: Hydra's own part of the composed config.
    run_dir: the run directory of the job, which the arguments name.
    """
    sources = (
        source for source in config.runtime.config_sources if source.provider == "command-line"
    )
    flags = [f"--config-dir={source.path}" for source in sources]
    # `rewritten` adds this override again for a graph that is given whole.
    overrides = [text for text in config.overrides.task if text != "~strategy.graph"]
    overrides += [text for text in config.overrides.hydra if text.startswith("hydra.searchpath=")]
    return [*overrides, f"hydra.run.dir={run_dir.absolute()}", *flags]


def _status(ends: list[tuple[tuple[str, ...], JobEnd]]) -> int:
    """Return the command's exit status: the highest of all jobs."""
    return max((EXIT_STATUS[end.status] for _, end in ends), default=0)


def _row(overrides: tuple[str, ...], end: JobEnd) -> SweepRow:
    """Return a job's row for the table of a sweep."""
    summary = end.summary
    return SweepRow(
        overrides=overrides,
        status=end.status,
        final_loss=summary.get("final_loss"),
        samples_per_s=summary.get("samples_per_s"),
        step_time_s=summary.get("step_time_s_median"),
        predicted_step_time_s=summary.get("predicted_step_time_s"),
        peak_memory_bytes=max(summary.get("peak_memory_bytes", ()), default=None),
        run_dir=Path(os.path.relpath(end.run_dir)),
    )
