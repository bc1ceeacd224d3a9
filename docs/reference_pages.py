"""Write the pages of the reference that are made from the code, before Sphinx reads the others.

They are `docs/reference/keys.md` and `docs/reference/errors.md`, which git ignores. A page that has
not changed is left alone, so that Sphinx does not read it again.
"""

from sphinx.application import Sphinx
from sphinx.config import Config


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension. Sphinx calls it."""
    app.connect("config-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Sphinx, config: Config) -> None:
    """Write the pages that have changed."""
    from scripts.reference.errors_page import errors_page
    from scripts.reference.key_groups import key_groups
    from scripts.reference.keys_page import keys_page
    from scripts.reference.refusals import refusals

    package = app.srcdir.parent / "src" / "whale_train"
    pages = {"keys": keys_page(key_groups()), "errors": errors_page(refusals(package))}
    for name, text in pages.items():
        path = app.srcdir / "reference" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
