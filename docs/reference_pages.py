"""Write the pages of the reference that are made from the code, before Sphinx reads the others.

They are `docs/reference/keys.md` and `docs/reference/errors.md`, and for the page of search results
`docs/_static/refusals.js`, which git ignores. A file that has not changed is left alone, so that
Sphinx does not read it again.
"""

from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension. Sphinx calls it."""
    app.connect("config-inited", write_pages)
    app.connect("html-page-context", add_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Sphinx, config: Config) -> None:
    """Write the pages that have changed."""
    from scripts.reference.errors_page import errors_page, refusals_script
    from scripts.reference.key_groups import key_groups
    from scripts.reference.keys_page import keys_page
    from scripts.reference.refusals import refusals

    known = refusals(app.srcdir.parent / "src" / "whale_train")
    files = {
        "reference/keys.md": keys_page(key_groups()),
        "reference/errors.md": errors_page(known),
        "_static/refusals.js": refusals_script(known),
    }
    for name, text in files.items():
        path = app.srcdir / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def add_scripts(app: Sphinx, name: str, *rest: Any) -> None:
    """Have the page of search results know the refusals."""
    if name == "search":
        app.add_js_file("refusals.js")
        app.add_js_file("pasted_message.js")
