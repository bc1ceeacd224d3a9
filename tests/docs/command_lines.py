"""Read the command lines of a block, and make of one of them a command that is quick to check."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = "whale-train"
# Programs of a page that are not started here: other hosts, installers, builds.
ELSEWHERE = ("make", "torchrun", "srun", "sbatch", "ssh", "scp", "pip", "docker", "git", "sudo")
# Modes that read what the page has made before: a plan of them would say nothing.
READING = ("export", "evaluate", "predict", "audit", "view", "schedule")
_WITHOUT_PLAN = (
    "mode=", "train.resume", "checkpoint=", "run=", "path=", "hydra.run.dir", "hydra.sweep",
    "launcher.wait", "launcher.device_speed", "launcher.link_speed", "verify.", "audit.", "hydra/",
)  # fmt: skip
_OPERATOR = re.compile(r"[|&;<>]+")
_SEARCHED = re.compile(r"=(tag|interval|choice|range|int)\(")
_SEVERAL = re.compile(r"[\w.]+(,[\w.]+)+")


@dataclass(frozen=True)
class CommandLine:
    """A command line of a page: its text, and the words of it."""

    text: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """Return the program that is started, after variables of the environment."""
        return next((x for x in self.words if not re.match(r"[A-Za-z_]\w*=", x)), "")

    @property
    def is_ours(self) -> bool:
        """Return whether it is `whale-train` and nothing else: no pipe, no redirection."""
        return self.words[:1] == (OURS,) and not any(map(_OPERATOR.fullmatch, self.words))

    @property
    def has_ours(self) -> bool:
        """Return whether it starts `whale-train`, by itself or by another program."""
        return OURS in self.words or bool(self.overrides())

    @property
    def mode(self) -> str:
        """Return the mode that is asked for."""
        return next((x.partition("=")[2] for x in self.words if x.startswith("mode=")), "train")

    @property
    def starts_nothing(self) -> bool:
        """Return whether it shows something and ends: a plan, a help, what the machine has."""
        shows = {"doctor", "--help", "--hydra-help", "--cfg", "--version"} & set(self.words)
        simulates = self.mode == "schedule" and "schedule.simulate=true" in self.words
        return bool(shows) or simulates or (self.mode == "plan" and not self.is_sweep)

    @property
    def is_sweep(self) -> bool:
        """Return whether it runs several jobs."""
        return bool({"-m", "--multirun"} & set(self.words))

    def overrides(self) -> list[str]:
        """Return what is given to whale-train, whoever starts it; `make train` has its own."""
        if self.program == "make":
            return _overrides_of_make(self.words)
        if OURS not in self.words:
            return []
        given = self.words[self.words.index(OURS) + 1 :]
        kept = list(takewhile(lambda word: not _OPERATOR.fullmatch(word), given))
        redirects = given[len(kept) : len(kept) + 1] and ">" in given[len(kept)]
        return kept[:-1] if redirects and kept[-1:] in (["1"], ["2"]) else kept


def command_lines(block: str) -> list[CommandLine]:
    """Return the command lines of a block: lines are joined at backslashes and inside quotes, and
    comments are left out."""
    commands: list[CommandLine] = []
    begun = ""
    for line in block.splitlines():
        begun += line
        if line.endswith("\\"):
            begun = begun[:-1] + " "
            continue
        try:
            text = re.sub(r'"?\$\(which whale-train\)"?', OURS, begun)
            lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            words = tuple(lexer)
        except ValueError:  # a quote that ends in a later line
            begun += "\n"
            continue
        if words:
            commands.append(CommandLine(_without_comment(begun), words))
        begun = ""
    if begun.strip():
        raise ValueError(f"a quote has no end: {begun.strip()}")
    return commands


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#\s.*$", "", line).strip()


def planned(command: CommandLine, added: Sequence[str] = ()) -> list[list[str]]:
    """Return the overrides by which a command is planned, with those that are `added`: those of
    each job of a sweep over one key, without what a plan has no use for. None where it reads what
    others have made."""
    given = [*command.overrides(), *added]
    kept: list[str] = []
    for word in given:
        if not word.startswith(_WITHOUT_PLAN) and not _SEARCHED.search(word):
            kept.append(word)
    kept = [word for word in kept if word not in ("-m", "--multirun")]
    if command.mode != "plan":
        kept = [word for word in kept if not word.startswith("compare=")]
    return _jobs(kept) if command.is_sweep else [kept]


def _jobs(given: list[str]) -> list[list[str]]:
    """Return the jobs of a sweep: one for each value of the first key that has several, and the
    first value of the others."""
    places = [n for n, word in enumerate(given) if _SEVERAL.fullmatch(word.partition("=")[2])]
    for place in places[1:]:
        given = [*given[:place], given[place].split(",")[0], *given[place + 1 :]]
    if not places:
        return [given]
    place = places[0]
    key, _, values = given[place].partition("=")
    return [[*given[:place], f"{key}={x}", *given[place + 1 :]] for x in values.split(",")]


def _overrides_of_make(words: tuple[str, ...]) -> list[str]:
    """Return the overrides of `make train ARGS=...`, those of the Makefile first."""
    if "train" not in words:
        return []
    recipe = re.search(r"whale-train (.*) \$\(ARGS\)", (ROOT / "Makefile").read_text())
    assert recipe is not None
    given = (x.removeprefix("ARGS=") for x in words if x.startswith("ARGS="))
    return [*recipe[1].split(), *(word for text in given for word in shlex.split(text))]
