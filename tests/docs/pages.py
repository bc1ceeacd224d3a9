"""Read a page of the documentation as a scenario: its blocks, and what comments say of them.

What a comment may say is in `docs/contributing.md`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<info>.*)$")
_COMMENT = re.compile(r"^<!--\s*(run|files):\s*(.*?)\s*-->$")
_DIRECTIVE = re.compile(r"^\{code-block\}\s*(\w*)$")
_OPTION = re.compile(r"^:(\w+):\s*(.*)$")
_WORDS = ("file", "full", "no", "plan", "refused", "shows", "with")  # that comments begin with
_RUNS = "file NAME, full, no REASON, plan, refused, shows, with OVERRIDES"
CHECKED = ("bash", "python", "yaml", "output")  # kinds of blocks that are more than text


@dataclass(frozen=True)
class Block:
    """A fenced block.

    kind: `bash`, `python`, `yaml`, `output`, or another that nothing is done with.
    text: the lines inside.
    caption: the name of the file that it is; '' for none.
    said: what the comments before it say, as `plan` or `with train.steps=2`.
    line: the number of its first line in the page, from 1 on.
    """

    kind: str
    text: str
    caption: str
    said: tuple[str, ...]
    line: int

    def asked(self, word: str) -> str | None:
        """Return what stands after a word of the comments, or None where none begins with it."""
        matching = (x for x in self.said if x.split()[:1] == [word])
        return next((x[len(word) :].strip() for x in matching), None)


@dataclass(frozen=True)
class Page:
    """A page: the groups of sample files that it wants, and its blocks in order."""

    files: tuple[str, ...]
    blocks: tuple[Block, ...]

    @property
    def is_checked(self) -> bool:
        """Return whether any block is more than text."""
        return any(block.kind in CHECKED for block in self.blocks)


def read_page(path: Path) -> Page:
    """Return the page in a Markdown file."""
    return page_of(path.read_text(encoding="utf-8"))


def page_of(text: str) -> Page:
    """Return the page of a Markdown text. Raises ValueError for a comment without a block, and for
    a block without an end."""
    files: list[str] = []
    said: list[str] = []
    blocks: list[Block] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        comment, fence = _COMMENT.match(line.strip()), _FENCE.match(line.strip())
        if comment and comment[1] == "files":
            files += comment[2].split()
        elif comment:
            word, _, rest = comment[2].partition(" ")
            if word not in _WORDS or (word in ("file", "no", "with") and not rest):
                raise ValueError(f"line {number}: 'run: {comment[2]}' is none of {_RUNS}")
            said.append(comment[2])
        elif fence:
            inside: list[str] = []
            for _, next_line in lines:
                if next_line.strip() == fence["ticks"]:
                    break
                inside.append(next_line)
            else:
                raise ValueError(f"line {number}: the block has no end")
            blocks.append(_block(fence["info"].strip(), inside, tuple(said), number))
            said = []
        elif said and line.strip():
            raise ValueError(f"line {number}: 'run: {said[-1]}' stands before no block")
    return Page(tuple(files), tuple(blocks))


def _block(info: str, lines: list[str], said: tuple[str, ...], number: int) -> Block:
    directive = _DIRECTIVE.match(info)
    kind, options = (directive[1], {}) if directive else (info, {})
    while directive and lines and (option := _OPTION.match(lines[0])):
        options[option[1]] = option[2]
        lines = lines[1:]
    text = "\n".join(lines[1:] if options and lines and not lines[0] else lines)
    named = next((x.removeprefix("file ") for x in said if x.startswith("file ")), "")
    return Block(kind, f"{text}\n", options.get("caption", named), said, number)
