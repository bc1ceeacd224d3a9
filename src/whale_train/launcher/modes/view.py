"""Run `mode=view`: write a page of a plan or a run, and of another one beside it."""

from pathlib import Path

from rich.console import Console

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault
from whale_train.extras import how_to_install
from whale_train.launcher.job_end import JobEnd
from whale_train.launcher.report.plan_page import plan_page
from whale_train.launcher.report.shown_run import read_run

VIEW = "view.html"  # in the run directory


def view_job(request: Request, run_dir: Path, console: Console) -> JobEnd:
    """Write the page of the plan or run that the request names into `run_dir`.

    Raises ConfigError where one of them cannot be read, or the libraries are not installed.
    """
    assert request.checkpoint.path is not None
    shown = read_run(Path(request.checkpoint.path), "path")
    against = None if request.against is None else read_run(Path(request.against), "against")
    try:
        from whale_train.launcher.report.write_page import write_page
    except ImportError as error:
        rule = f"needs the package {error.name}, which is not installed"
        raise ConfigError([Fault("mode", "view", rule, how_to_install(str(error.name)))]) from error
    run_dir.mkdir(parents=True, exist_ok=True)
    page = run_dir.absolute() / VIEW
    write_page(plan_page(shown, against), page)
    console.print(f"the page: {page}", soft_wrap=True, markup=False)
    return JobEnd("done", run_dir)
