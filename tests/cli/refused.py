"""Requests that must be refused: what a case is, the files around it, and what it must say.

The cases themselves are tables in the tests.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cli.command import Answer, files_in, whale_train

PLAN = "mode=plan hardware=cpu hardware.devices=2"
ON_THE_MIX = "mode=plan hardware=v100_p100_mix"

NETS = """import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self, width=8, classes=4):
        super().__init__()
        self.inner = nn.Linear(6, width)
        self.outer = nn.Linear(width, classes)

    def forward(self, features, labels):
        return functional.cross_entropy(self.outer(torch.relu(self.inner(features))), labels)


class Pixels(Net):
    def forward(self, pixels, labels=None):
        return pixels.mean()


class Unlabelled(Net):
    def forward(self, features):
        return self.outer(self.inner(features))


class Scores(Net):
    def forward(self, features, labels):
        return {"scores": self.outer(self.inner(features))}


class Rows(Net):
    def forward(self, features, labels):
        scores = torch.stack([self.outer(self.inner(row)) for row in features])
        return functional.cross_entropy(scores, labels)


class Reversing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Adversarial(Net):
    def forward(self, features, labels):
        hidden = Reversing.apply(self.inner(features))
        return functional.cross_entropy(self.outer(hidden), labels)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
class Few(Net):
    def forward(self, features, labels):
        if features.shape[0] < 64:
            features = features.contiguous()
        return super().forward(features, labels)


class Contrastive(Net):
    def forward(self, features, labels):
        hidden = self.inner(features)
        scores = hidden @ hidden.T
        return functional.cross_entropy(scores, torch.arange(int(len(scores))))


class Headless(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, features, labels):
        return ((features * self.scale).sum(1) - labels).square().mean()
"""

# In the folder every case is run from.
FILES = {
    "my/strategy/mine.yaml": "graph:\n  replicate: {zero: 1\nbalance: even\n",
    "my/strategy/listed.yaml": "- replicate\n",
    "my/strategy/beside.yaml": "graph: [replicate, split: {dim: sequence, zero: 1}]\n",
    "my/strategy/two.yaml": "graph:\n  replicate: {}\n  split: {}\n",
    "my/strategy/odd.yaml": "graph:\n  - replicat: {}\n  - split: {modules: head, dim: vocab}\n",
    "my/strategy/nested.yaml": "graph:\n  split:\n    of: {pipeline: {stages: 2}}\n",
    "my/strategy/based.yaml": "defaults: [dpp]\n",
    "samples.npz": "no archive",
    "short.txt": "short",
    "earlier/plan.json": "{}",
    "taken": "",
    "broken.py": "import absent_thing\n",
    "nets.py": NETS,
}


class Case:
    """`whale-train COMMAND` and the faults it must name, in order.

    In a fault, `{here}` is the folder it is run in, and `{any}` text that is another package's
    or a figure of an estimate.
    """

    def __init__(
        self, name: str, command: str, *faults: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.command, self.faults = name, command, faults
        self.environment = environment

    def run(self, folder: Path, run: Callable[..., Answer] = whale_train) -> Answer:
        """Answer the command by `run`, in `folder` with the files around it."""
        for name, text in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return run(shlex.split(self.command), folder, self.environment)

    def check(self, folder: Path, answer: Answer) -> None:
        """Asserts the whole contract of a refusal."""
        if len(self.faults) == 1:
            expected = f"error: {self.faults[0]}\n"
        else:
            lines = [f"{len(self.faults)} things are wrong with this request:", *self.faults]
            expected = "\n  ".join(lines) + "\n"
        expected = expected.replace("{here}", str(folder))
        if "{any}" in expected and matches(expected, answer.stderr):
            expected = answer.stderr
        assert answer.stderr == expected
        assert answer.status == 2
        assert answer.stdout == ""
        assert files_in(folder) == set(FILES)  # neither a run directory nor a trace of one
        assert {name: (folder / name).read_text() for name in FILES} == FILES
        assert answer.left_running == ()


def matches(expected: str, text: str) -> bool:
    """Whether `text` is `expected` with some text on one line for each `{any}`."""
    pattern = ".+".join(re.escape(part) for part in expected.split("{any}"))
    return re.fullmatch(pattern, text) is not None
