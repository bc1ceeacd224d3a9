"""Have links from pages to the rest of the repository work on the site as they do on GitHub.

MyST itself makes a link to a source file a copy of that file in the site, and warns where there is
none. Two kinds of targets are left to do here: a Markdown file outside `docs/`, which MyST takes
for a page, and a folder. The first is copied as other files are; of the second, which a site has
not, the words stay.
"""

import os
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

BEFORE_COPIES = 400  # the priority of Sphinx's own collector of files to copy is 500


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension. Sphinx calls it."""
    app.connect("doctree-read", link_to_repository, priority=BEFORE_COPIES)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def link_to_repository(app: Sphinx, page: nodes.document) -> None:
    """Replace the links of a page to Markdown files outside `docs/`, and to folders."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for link in list(page.findall(addnodes.pending_xref)):
        if link["reftype"] != "myst":
            continue
        if link.get("refdomain") == "doc":
            path = Path(f"{link['reftarget']}.md")
            if path.is_absolute() and path.is_file():
                target = os.path.relpath(path, folder)
                copy = addnodes.download_reference(refdoc=app.env.docname, reftarget=target)
                copy.extend(link.children)
                link.replace_self(copy)
        elif (folder / link["reftarget"]).is_dir():
            link.replace_self(link.children)
