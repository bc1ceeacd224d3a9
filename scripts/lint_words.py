"""Check the wording rules of the code: names of locals, first words of docstrings, unique names.

    python scripts/lint_words.py

Every violation is printed as `path:line: RULE`. The exit status is 1 if there is any. The rules:

* a local or a parameter is named for its content, so none is called `found`, `each`, `listed`,
  `mine` or `least`;
* the docstring of a function begins with a verb, and a returned value is named by a noun ("Return
  the ranks that ...", not "Return what ...");
* a public top-level name has one meaning in the whole tree. Names that several modules define are
  listed in `SHARED`, which only ever gets shorter.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BANNED = frozenset(("found", "each", "listed", "mine", "least", "what", "whole", "kept", "written"))
NO_VERB = frozenset((
    "A", "All", "An", "And", "As", "At", "Each", "For", "From", "How", "If", "In", "It", "Its",
    "No", "Nothing", "Of", "On", "One", "Only", "Or", "Same", "Some", "That", "The", "These",
    "This", "Those", "To", "What", "When", "Where", "Whether", "Which", "Who", "Whom", "Whose",
    "With", "Without",
))  # fmt: skip
HEADLESS = ("Return what ", "Return those ", "Return how ", "Return where ", "Return who ")


def main() -> int:
    """Print all violations, and return the exit status."""
    faults: list[str] = []
    defined: dict[str, list[str]] = {}
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        place = path.relative_to(ROOT)
        faults += [f"{place}:{line}: {rule}" for line, rule in faults_of(tree)]
        for name in public_names(tree):
            defined.setdefault(name, []).append(str(place))
    for name, places in sorted(defined.items()):
        if len(places) > 1 and name not in SHARED:
            faults.append(f"{places[0]}: {name} is defined in {', '.join(places[1:])} as well")
    unused = sorted(name for name in SHARED if len(defined.get(name, ())) < 2)
    faults += [f"scripts/lint_words.py: {name} is shared no more: leave it out" for name in unused]
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return int(bool(faults))


def sources() -> Iterator[Path]:
    """Yield the paths of the product's Python files."""
    yield from sorted((ROOT / "src" / "whale_train").rglob("*.py"))


def faults_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the rule of each violation by a module's names and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BANNED:
            if not _is_field(tree, node):
                yield node.lineno, f"{node.id} says nothing of its content"
        elif isinstance(node, ast.arg) and node.arg in BANNED:
            yield node.lineno, f"{node.arg} says nothing of its content"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            first = text.partition(" ")[0].rstrip(".,:;")
            if first in NO_VERB or text.startswith(HEADLESS):
                start = " ".join(text.split()[:4])
                yield node.lineno, f"the docstring of {node.name} begins with {start!r}: use a verb"


def _is_field(tree: ast.Module, name: ast.Name) -> bool:
    """Return True if a name is a field: an annotated name in the body of a class."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    fields = (line for of in classes for line in of.body if isinstance(line, ast.AnnAssign))
    return any(line.target is name for line in fields)


def public_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the public functions and classes at a module's top level."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


# Names that several modules define. Each is to be replaced by names of one meaning.
SHARED = frozenset((
    "Block", "Output", "Record", "added", "along", "attention", "batch_norm", "cat", "check",
    "convolution", "einsum", "elementwise", "expand", "floor_s", "folder_of", "fresh", "gather",
    "grouped_mm", "index", "index_select", "item", "join", "kernel_of", "linear", "main",
    "matmul", "modules_of", "moved", "movedim", "narrow", "norm", "pad", "permute", "place_of",
    "repeat", "repeat_interleave", "reshape", "reverse", "select", "size_of", "squeeze",
    "stack", "transpose", "unbind", "uncompiled", "whole",
))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
