"""A message of the command that is pasted into the site's search leads to its place on the page of
all refusals, in a browser."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.docs.command_lines import ROOT

CHROMIUM = shutil.which("chromium")
MESSAGE = (
    "error: strategy.graph.replicate.degree=3 does not divide the 16 devices of "
    "hardware=v100_p100_mix; use 1, 2, 4, 8 or 16"
)


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_pasted_message_is_found(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    site, build = tmp_path / "site", ("-m", "sphinx", "-q", "-W", "-n", str(ROOT / "docs"))
    subprocess.run([sys.executable, *build, str(site)], check=True, timeout=200)
    quiet = ("no-first-run", "disable-background-networking", "disable-component-update")
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "disable-sync", *quiet)
    shown = ("dump-dom", "virtual-time-budget=5000", f"user-data-dir={tmp_path / 'profile'}")
    command = [CHROMIUM, *(f"--{x}" for x in (*flags, *shown))]
    address = f"{(site / 'search.html').as_uri()}?q={quote(MESSAGE)}"
    done = subprocess.run(
        [*command, address], capture_output=True, text=True, timeout=100, check=True
    )
    (listed,) = re.findall(r'<ul id="refusals">(.*?)</ul>', done.stdout, flags=re.S)
    assert "does not divide the" in listed
    anchors = re.findall(r"reference/errors\.html#([\w-]+)", listed)
    page = (site / "reference" / "errors.html").read_text()
    assert anchors
    assert all(f'id="{anchor}"' in page for anchor in anchors)
