"""Every command and config of the documentation is run: a page is a scenario.

`make test-docs` runs the commands as they stand; `make test` plans those that train. README.md is
a page too, once its blocks say their kinds; until then its commands are planned.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.docs.command_lines import ROOT, command_lines
from tests.docs.pages import Block, Page, read_page
from tests.docs.sample_files import GROUPS
from tests.docs.scenario import Scenario
from tests.pairs import IS_FULL

# Made from the code, or kept as they were decided.
_NOT_RUN = ("adr", "reference/keys.md", "reference/errors.md")
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(DOCS)): path
    for path in sorted(DOCS.rglob("*.md"))
    if not str(path.relative_to(DOCS)).startswith(_NOT_RUN)
}
README = ROOT / "README.md"
IS_MARKED = any(block.kind == "bash" for block in read_page(README).blocks)
if IS_MARKED:
    PAGES["README.md"] = README
CHECKED = [name for name, path in PAGES.items() if read_page(path).is_checked]
_STARTS = ("whale-train ", "torchrun ", "srun ", "make ")


@pytest.mark.timeout(7200 if IS_FULL else 300)
@pytest.mark.parametrize("name", CHECKED)
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    Scenario(read_page(PAGES[name]), tmp_path, IS_FULL).run()


def commands_of_readme() -> Page:
    """Return the commands of README.md, which are planned, with all sample files."""
    blocks = []
    for block in read_page(README).blocks:
        lines = command_lines(block.text) if not block.kind and _is_commands(block) else []
        ours = "\n".join(x.text for x in lines if x.has_ours)
        if ours:
            blocks.append(replace(block, kind="bash", text=ours, said=("no they take long",)))
        elif block.kind in ("python", "yaml"):
            blocks.append(block)
    return Page(tuple(GROUPS), tuple(blocks))


def _is_commands(block: Block) -> bool:
    return any(line.startswith(_STARTS) for line in block.text.splitlines())


# What takes long to plan is planned in a full run, as all of it is by tests/cli/test_readme.py.
@pytest.mark.full
@pytest.mark.skipif(IS_MARKED, reason="README.md is a page like the others")
@pytest.mark.timeout(3600)
def test_the_readme_does_what_it_says(tmp_path: Path) -> None:
    page = commands_of_readme()
    assert len(page.blocks) > 15
    Scenario(page, tmp_path, IS_FULL, config_dir="conf").run()
