"""Make the pages of plans and runs that the documentation shows, and pictures of them.

    python scripts/example_pages.py                # the pages, into docs/pages: make docs
    python scripts/example_pages.py --pictures     # and docs/pictures anew, by chromium

Six plans and two runs on this machine's CPUs. The pages are made whenever the site is; the pictures
are kept in the repository.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
PICTURES = ROOT / "docs" / "pictures"
_WIDTH = 1000  # pixels of a picture
_WHO_DOES_WHAT = (0, 855, _WIDTH, 1285)  # left, top, right and bottom of it, in pixels
_COLOURS = 192  # of a picture's palette
_BERT = (
    *("model=bert_large", "hardware=v100_p100_mix"),
    *("train.global_batch=256", "data.sequence_length=128"),
)


@dataclass(frozen=True)
class Example:
    """A plan or a run that the documentation shows.

    overrides: the command line.
    page: the name of the page in the run directory.
    height: height of the picture, in pixels.
    """

    overrides: tuple[str, ...]
    page: str
    height: int


EXAMPLES = {
    "mixed": Example(("mode=plan", "strategy=hybrid_split_dp", *_BERT), "plan.html", 1750),
    "auto": Example(("mode=plan", "strategy=auto", *_BERT), "plan.html", 2250),
    "pipeline": Example(
        ("mode=plan", "strategy=zero1_pipeline", *_BERT),
        "plan.html",
        2300,
    ),
    "experts": Example(
        (
            *("mode=plan", "model=m6_10b", "strategy=split_dp", "hardware=v100_512"),
            *("train.global_batch=512", "data.sequence_length=512"),
        ),
        "plan.html",
        1900,
    ),
    "comparison": Example(
        ("mode=plan", "compare=[dp,zero3,3d,auto]", *_BERT), "compare.html", 1300
    ),
    "why_not": Example(("mode=plan", "explain=3d", *_BERT), "explain.html", 1500),
    "run_of_a_pipeline": Example(
        (
            *("strategy=pipeline", "hardware=cpu", "hardware.devices=2", "train.trace=true"),
            *("strategy.graph.pipeline.stages=2", "train.steps=40"),
            *("data.evaluation_fraction=0.01", "train.evaluate_every=10"),
        ),
        "report.html",
        3600,
    ),
    "run_of_experts": Example(
        (
            *("model=moe_gpt", "strategy=experts_dp", "hardware=cpu", "hardware.devices=2"),
            *("train.steps=40", "data.evaluation_fraction=0.01", "train.evaluate_every=10"),
        ),
        "report.html",
        2400,
    ),
}


def main() -> int:
    """Make the pages and, where asked to, the pictures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", action="store_true", help="make docs/pictures anew")
    parser.add_argument("--only", nargs="*", choices=EXAMPLES, default=EXAMPLES)
    asked = parser.parse_args()
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            make_page(EXAMPLES[name], Path(folder), PAGES / f"{name}.html")
        if asked.pictures:
            make_picture(PAGES / f"{name}.html", PICTURES / f"{name}.png", EXAMPLES[name].height)
    if asked.pictures:
        crop(PICTURES / "mixed.png", PICTURES / "readme.png")
    return 0


def make_page(example: Example, folder: Path, page: Path) -> None:
    """Run the command of an example in `folder`, and copy its page.

    Raises CalledProcessError where the command fails.
    """
    command = [sys.executable, "-m", "whale_train.launcher.cli", *example.overrides]
    subprocess.run(
        [*command, "hydra.run.dir=run"], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    shutil.copy(folder / "run" / example.page, page)


def make_picture(page: Path, picture: Path, height: int) -> None:
    """Draw a page by chromium, `height` pixels of it. Raises CalledProcessError."""
    from PIL import Image

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "hide-scrollbars")
        quiet = ("no-first-run", "disable-background-networking", "virtual-time-budget=6000")
        size = f"window-size={_WIDTH},{height}"
        shot = (size, f"screenshot={picture}", f"user-data-dir={profile}")
        command = ["chromium", *(f"--{flag}" for flag in (*flags, *quiet, *shot)), page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(
            _COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    small.save(picture, optimize=True)


def crop(picture: Path, part: Path) -> None:
    """Save the part of a picture of a plan that shows who does what."""
    from PIL import Image

    with Image.open(picture) as image:
        image.crop(_WHO_DOES_WHAT).save(part, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
