"""Write the pages that jobs leave in their directories: of a run, of a plan, of a comparison."""

from collections.abc import Mapping
from pathlib import Path

from whale_train.errors import ConfigError, Fault, RequestError
from whale_train.extras import how_to_install
from whale_train.launcher.planning.plan_request import Resolved
from whale_train.launcher.report.plan_page import comparison_page, plan_page
from whale_train.launcher.report.shown_run import ShownRun, read_run

REPORT = "report.html"  # of a run
PLAN_PAGE = "plan.html"  # of mode=plan
COMPARISON = "compare.html"  # of mode=plan compare=[...]
VIEW = "view.html"  # of mode=view


def write_view(path: Path, against: Path | None, page: Path) -> None:
    """Write the page of a plan or a run, and of another one beside it where `against` names one.

    Raises ConfigError where one of them cannot be read, or the libraries are not installed, and
    OSError.
    """
    shown = read_run(path, "path")
    other = None if against is None else read_run(against, "against")
    try:
        from whale_train.launcher.report.write_page import write_page
    except ImportError as error:
        rule = f"needs the package {error.name}, which is not installed"
        raise ConfigError([Fault("mode", "view", rule, how_to_install(str(error.name)))]) from error
    write_page(plan_page(shown) if other is None else comparison_page([shown, other]), page)


def write_comparison(
    run_dir: Path, compared: Mapping[str, Resolved | RequestError], title: str
) -> Path:
    """Write the page of a comparison of strategies, and return its path. Raises OSError.

    compared: the resolved request or the error of each strategy, by name.
    title: what all of them have in common.
    """
    from whale_train.launcher.report.write_page import write_page

    runs = [
        ShownRun(run_dir, f"{title} strategy={name}", made.plan, made.timeline)
        for name, made in compared.items()
        if isinstance(made, Resolved)
    ]
    refused = {
        name: [str(fault) for fault in made.faults]
        for name, made in compared.items()
        if isinstance(made, RequestError)
    }
    page = run_dir / COMPARISON
    write_page(comparison_page(runs, refused), page)
    return page
