"""Every example is run by the commands of its own pages, in few steps.

An example is a folder of `examples/` with what a user would have in one. It makes its data itself.
"""

import shutil
from pathlib import Path

import pytest
from tests.docs.command_lines import ROOT
from tests.docs.pages import read_page
from tests.docs.scenario import Scenario

EXAMPLES = ROOT / "examples"
PAGES = {str(path.relative_to(EXAMPLES)): path for path in sorted(EXAMPLES.glob("*/*.md"))}


@pytest.mark.parametrize("name", PAGES)
def test_an_example_does_what_it_says(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "example"
    kept_out = shutil.ignore_patterns("__pycache__", "runs", "*.csv", "*.tar", "*.jsonl")
    shutil.copytree(PAGES[name].parent, folder, ignore=kept_out)
    # Beside other tests, threads of several processes would wait for each other.
    threads = {"OMP_NUM_THREADS": "1"}
    Scenario(read_page(PAGES[name]), folder, is_full=True, environment=threads).run()


def test_every_example_has_a_page_and_is_named() -> None:
    named = (EXAMPLES / "README.md").read_text()
    for folder in sorted(x for x in EXAMPLES.iterdir() if x.is_dir()):
        assert f"{folder.name}/README.md" in PAGES
        assert f"({folder.name}/README.md)" in named


def test_the_shortest_project_has_sixty_lines() -> None:
    """Its model, its data and its config; what makes a CSV for the example is not the project."""
    files = [*EXAMPLES.glob("tweets/tweets.py"), *EXAMPLES.glob("tweets/conf/**/*.yaml")]
    assert len(files) == 2
    assert sum(len(path.read_text().splitlines()) for path in files) <= 60
