"""Run `mode=view`: write a page of a plan or a run, and of another one beside it."""

from pathlib import Path

from rich.console import Console

from whale_train.config import Request
from whale_train.launcher.job_end import JobEnd
from whale_train.launcher.report.report_files import VIEW, write_view


def view_job(request: Request, run_dir: Path, console: Console) -> JobEnd:
    """Write the page of the plan or run that the request names into `run_dir`.

    Raises ConfigError where one of them cannot be read, or the libraries are not installed.
    """
    assert request.checkpoint.path is not None
    run_dir.mkdir(parents=True, exist_ok=True)
    page = run_dir.absolute() / VIEW
    against = None if request.against is None else Path(request.against)
    write_view(Path(request.checkpoint.path), against, page)
    console.print(f"the page: {page}", soft_wrap=True, markup=False)
    return JobEnd("done", run_dir)
