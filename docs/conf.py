"""Say how Sphinx makes the documentation site of `docs/`: `make docs`."""

import sys
from importlib.metadata import version as installed
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

project = "whale-train"
author = "the whale-train authors"
version = release = installed("whale-train")
extensions = ["myst_parser", "sphinx_copybutton", "repository_links", "reference_pages"]
# A link to a file that is not a page, as [the step](../src/whale_train/runtime/...), is a copy of
# the file in the site, and a warning where there is none: MyST's own doing, and repository_links'.
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
smartquotes = False  # what is shown is what is typed
html_theme = "furo"
html_static_path = ["_static"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_title = "whale-train"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# What is copied of a session is what was typed.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
copybutton_exclude = ".linenos, .go"
# Pages of the network that `make check-links` asks for.
linkcheck_timeout = 20
linkcheck_retries = 2
