"""Run a page: write its files, start its commands in order, and compare what they print.

In a full run every command runs as it stands. Otherwise a command that trains is planned in its
place, and what reads its results is left out.
"""

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from tests.cli.command import environment_for, whale_train
from tests.docs.command_lines import (
    ELSEWHERE,
    READING,
    CommandLine,
    command_lines,
    planned,
)
from tests.docs.pages import Block, Page
from tests.docs.sample_files import write_files

DEADLINE_S = 900.0
HOME = "/home/me/project"  # what a page shows for the folder that it is run in
# Numbers that differ from run to run: times, rates, dates, and the names of run directories.
_VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-\w+"), "DATE"),
    (re.compile(r"\d{4}-\d\d-\d\d"), "DATE"),
    (re.compile(r"\b\d+(:\d\d)+\b"), "N"),
    (re.compile(r"[\d.,]+ ?(µs|us|ms|s|min|h|(?:samples|tokens|[TGMk]FLOP)/s)\b"), "N"),
)


@dataclass
class Scenario:
    """A page while it runs.

    page: what is run.
    folder: where, with nothing in it but the page's files.
    is_full: whether commands run as they stand.
    config_dir: a folder of configs that its plans may name files of; '' for none.
    environment: what `export` set.
    said: what the commands of the last block printed; None where they did not run.
    """

    page: Page
    folder: Path
    is_full: bool
    config_dir: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    said: str | None = None
    _plans: int = 0

    def run(self) -> None:
        """Run the page. Raises AssertionError with the line of the block that fails."""
        write_files(self.folder, self.page.files)
        for block in self.page.blocks:
            if block.caption:
                (self.folder / block.caption).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / block.caption).write_text(block.text)
        shows = False
        for block in self.page.blocks:
            try:
                if block.kind == "bash":
                    self._run_block(block)
                    shows = block.asked("shows") is not None
                elif block.kind == "output" and shows:
                    self._compare(block.text)
                elif block.kind == "python":
                    ast.parse(block.text)
                elif block.kind == "yaml":
                    yaml.safe_load(block.text)
            except (AssertionError, ValueError, SyntaxError, yaml.YAMLError) as error:
                raise AssertionError(f"line {block.line}: {error}") from error

    def _run_block(self, block: Block) -> None:
        """Start the commands of a block, or what stands for them."""
        if block.asked("full") is not None and not self.is_full:
            self.said = None
            return
        self.said = ""
        added = (block.asked("with") or "").split()
        status = 2 if block.asked("refused") is not None else 0
        for command in command_lines(block.text):
            ours = command.is_ours
            if block.asked("no") is not None:
                self.said = None
                if command.has_ours:
                    self._plan(command, added)
            elif command.words[:1] == ("export",):
                self.environment |= dict(x.split("=", 1) for x in command.words[1:] if "=" in x)
            elif command.has_ours and block.asked("plan") is not None:
                self.said = None
                self._plan(command, added)
            elif ours and (self.is_full or status or command.starts_nothing):
                self._ours(command, [*command.overrides(), *added], status)
            elif ours:
                self.said = None
                self._plan(command, added)
            else:
                self._other(command, added)

    def _ours(self, command: CommandLine, words: list[str], status: int) -> None:
        """Run a command, which is to end with `status`."""
        answer = whale_train(words, self.folder, self.environment, DEADLINE_S)
        assert answer.status == status, (
            f"{command.text}: exit status {answer.status}\n{answer.stderr}{answer.stdout}"
        )
        if self.said is not None:
            self.said += answer.stdout + answer.stderr

    def _plan(self, command: CommandLine, added: list[str]) -> None:
        """Plan the jobs of a command; of one that reads what others have made there is no plan."""
        if command.mode in READING:
            return
        for job in planned(command, added):
            self._plans += 1
            run_dir = f"hydra.run.dir={self.folder / 'planned' / str(self._plans)}"
            flags = ["--config-dir", self.config_dir] if self.config_dir else []
            words = [*job, *flags, "mode=plan", run_dir]
            answer = whale_train(words, self.folder, self.environment)
            assert answer.status == 0, f"{command.text}: {answer.stderr}"

    def _other(self, command: CommandLine, added: list[str]) -> None:
        """Run a command of the shell in a full run; those of other hosts and installers are to be
        marked."""
        assert command.program not in ELSEWHERE, (
            f"{command.text}: is not run here; write <!-- run: no REASON --> before the block"
        )
        if not self.is_full:
            self.said = None
            if command.has_ours:
                self._plan(command, added)
            return
        beside = os.path.dirname(sys.executable)
        environment = {**environment_for(self.folder), **self.environment}
        environment["PATH"] = os.pathsep.join([beside, environment.get("PATH", os.defpath)])
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.text],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        printed = f"{done.stderr}{done.stdout}"
        assert done.returncode == 0, f"{command.text}: exit status {done.returncode}\n{printed}"
        if self.said is not None:
            self.said += done.stdout

    def _compare(self, shown: str) -> None:
        """Assert that what was printed is what the page shows."""
        if self.said is not None:
            said = self.said.replace(str(self.folder), HOME)
            both = f"the page shows\n{shown}\nand this was said:\n{said}"
            assert fits(shown, said), both


def fits(shown: str, said: str) -> bool:
    """Return whether what a page shows was said: up to white space at the ends of lines, and to
    numbers of time. A line `...` stands for any lines."""
    parts = [steady(part) for part in re.split(r"^\.\.\.$\n?", shown, flags=re.M)]
    pattern = ".*".join(re.escape(part) for part in parts)
    return re.fullmatch(pattern, steady(said), flags=re.S) is not None


def steady(text: str) -> str:
    """Return a text without what differs from run to run."""
    text = "".join(f"{line.rstrip()}\n" for line in text.strip().splitlines())
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return re.sub(r" {2,}", "  ", text)
