"""Links of README.md inside the repository lead somewhere: to a file, a folder, or a heading.

Those of the pages of `docs/` are checked by `make docs`, and those to other sites by
`make check-links`.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
LINKS = sorted({x for x in re.findall(r"\]\(([^)\s]+)\)", TEXT) if "://" not in x})


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a Markdown text."""
    titles = re.findall(r"^#+ (.*)", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("link", LINKS)
def test_a_link_of_the_readme_leads_somewhere(link: str) -> None:
    path, _, anchor = link.partition("#")
    target = ROOT / (path or "README.md")
    assert target.exists()
    if anchor:
        assert anchor in anchors(target.read_text())


def test_a_heading_has_the_anchor_that_github_gives_it() -> None:
    assert anchors("## Any optimizer, any schedule\n### 16 bits: `fp16`\n") == {
        "any-optimizer-any-schedule",
        "16-bits-fp16",
    }
    assert LINKS
