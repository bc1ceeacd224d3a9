"""Define the parts of a page: sections with lines, charts and tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from whale_train.launcher.report.charts import Chart

_MOST_ROWS = 24  # of a table that is open from the start


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
