"""Write the pages that jobs leave in their directories: of a run, of a plan, of a comparison."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from whale_train.errors import ConfigError, Fault, RequestError
from whale_train.extras import how_to_install
from whale_train.launcher.planning.plan_request import Resolved
from whale_train.launcher.report.page_parts import Page, Section
from whale_train.launcher.report.plan_page import comparison_page, plan_page
from whale_train.launcher.report.rank_kinds import rank_kinds
from whale_train.launcher.report.shown_run import ShownRun, read_run
from whale_train.launcher.report.timelines import ranks_to_show
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.simulate.prediction import Simulated

REPORT = "report.html"  # of a run
PLAN_PAGE = "plan.html"  # of mode=plan
EXPLANATION = "explain.html"  # of mode=plan explain=STRATEGY
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


def write_explanation(
    run_dir: Path, answer: Section, plans: Mapping[str, tuple[Plan, Simulated]]
) -> Path:
    """Write the page of an explanation, and return its path. Raises OSError.

    answer: the section that answers the question.
    plans: the plans that are shown beside each other, and their simulated steps, by their titles.
    """
    from whale_train.launcher.report.write_page import write_page

    runs = [
        ShownRun(run_dir, title, plan, step.events(_shown_devices(plan)))
        for title, (plan, step) in plans.items()
    ]
    page = run_dir / EXPLANATION
    shown = comparison_page(runs) if runs else Page(answer.title, str(run_dir), ())
    write_page(replace(shown, title=answer.title, sections=[answer, *shown.sections]), page)
    return page


def _shown_devices(plan: Plan) -> dict[int, str]:
    """Return the device of a rank of each kind, by the rank."""
    return {rank: plan.ranks[rank].device for rank in ranks_to_show(rank_kinds(plan))}
