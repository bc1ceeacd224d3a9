"""Write a page as one HTML file that needs no network, with its styles, charts and programs."""

import hashlib
import json
import os
from contextlib import suppress
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import jinja2
from markupsafe import Markup

from whale_train.launcher.report.page_parts import Page
from whale_train.user_cache import user_cache

# Draws every chart of the page. The text of a chart is its figure's; what the SVG says of each of
# its hundreds of marks would be read out one by one.
_DRAW = """
const charts = JSON.parse(document.getElementById("charts").textContent);
for (const [name, spec] of Object.entries(charts)) {
  vegaEmbed(document.getElementById("chart-" + name), spec, {renderer: "svg", actions: false});
}
"""


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
    cached = user_cache("report") / f"{key}.js"
    with suppress(OSError):
        return cached.read_text(encoding="utf-8")
    import vl_convert

    program: str = vl_convert.javascript_bundle(_DRAW)
    program = program.replace("</script", "<\\/script")
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        made = cached.with_suffix(f".{os.getpid()}")
        made.write_text(program, encoding="utf-8")
        made.replace(cached)
    return program
