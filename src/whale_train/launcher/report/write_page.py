"""Write a page as one HTML file that needs no network, with its styles, charts and programs."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import jinja2
from markupsafe import Markup

from whale_train.launcher.report.charts import Chart
from whale_train.user_cache import user_cache

_MOST_ROWS = 24  # of a table that is open from the start
# Draws every chart of the page. The text of a chart is its figure's; what the SVG says of each of
# its hundreds of marks would be read out one by one.
_DRAW = """
const charts = JSON.parse(document.getElementById("charts").textContent);
for (const [name, spec] of Object.entries(charts)) {
  vegaEmbed(document.getElementById("chart-" + name), spec, {renderer: "svg", actions: false});
}
"""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    cells: texts, the first of which names the row.
    differs: whether the row is marked, as one in which two plans differ.
    """

    cells: Sequence[str]
    differs: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a page.

    caption: what it shows.
    columns: heads of the columns.
    rows: its rows.
    numbers: heads of the columns that are aligned as numbers.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    numbers: Sequence[str] = ()

    @property
    def is_folded(self) -> bool:
        """Return whether the table is opened on demand, as a long one is."""
        return len(self.rows) > _MOST_ROWS


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading.

    name: its id on the page.
    title: its heading.
    lines: sentences at its beginning.
    charts: its charts.
    tables: its tables.
    link: the text of the link to it at the top of the page; '' for none, None for its heading.
    """

    name: str
    title: str
    lines: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    link: str | None = None


@dataclass(frozen=True)
class Page:
    """A page.

    title: its heading.
    source: where what it shows was read.
    sections: its parts.
    """

    title: str
    source: str
    sections: Sequence[Section]

    @property
    def charts(self) -> list[Chart]:
        """Return all charts of the page."""
        return [chart for section in self.sections for chart in section.charts]


def write_page(page: Page, path: Path) -> None:
    """Write a page into a file. Raises OSError."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    specs = json.dumps({chart.name: chart.spec for chart in page.charts}, separators=(",", ":"))
    html = environment.from_string(text).render(
        page=page,
        version=version("whale-train"),
        # No text in it ends the element that it is in.
        charts=Markup(specs.replace("<", "\\u003c")),
        program=Markup(_program()) if page.charts else "",
    )
    path.write_text(html, encoding="utf-8")


def _program() -> str:
    """Return the program that draws charts, with all libraries that it needs.

    It takes seconds to make, and is kept in the user's cache.
    """
    key = hashlib.sha256(f"{version('vl-convert-python')}\n{_DRAW}".encode()).hexdigest()[:16]
    kept = user_cache("report") / f"{key}.js"
    with suppress(OSError):
        return kept.read_text(encoding="utf-8")
    import vl_convert

    program: str = vl_convert.javascript_bundle(_DRAW)
    program = program.replace("</script", "<\\/script")
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = kept.with_suffix(f".{os.getpid()}")
        made.write_text(program, encoding="utf-8")
        made.replace(kept)
    return program
