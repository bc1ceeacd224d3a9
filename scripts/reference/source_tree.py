"""Read the product's source: its modules, what their names stand for, and what runs before what."""

import ast
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[tuple[int, str], ...]  # blocks around a statement: the compound statement, its part
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.Return)
_PARTS = ("body", "orelse", "handlers", "finalbody", "cases")


@dataclass(eq=False)
class Module:
    """A module of the product.

    path: its path below the package, as `strategies/grammar/nodes.py`.
    tree: its syntax tree.
    constants: the values of the names that it assigns at its top level.
    imported: by the name that it imports from another module of the product, that module and the
        name there.
    functions: its functions and methods by name.
    places: by the id of a node, the blocks around it.
    owners: by the id of a node, the function around it.
    statements: by the id of a function, its statements that assign locals or return.
    """

    path: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    owners: dict[int, Function | None] = field(default_factory=dict)
    statements: dict[int, list[ast.stmt]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.constants[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if node.value is not None:
                    self.constants[node.target.id] = node.value
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                names = getattr(node.targets[0], "elts", [])
                for target, value in zip(names, node.value.elts, strict=False):
                    self.constants[target.id] = value
        self._note(self.tree, (), None)

    def _note(self, node: ast.AST, place: Place, owner: Function | None) -> None:
        self.places[id(node)], self.owners[id(node)] = place, owner
        if isinstance(node, _STATEMENTS) and owner is not None:
            self.statements.setdefault(id(owner), []).append(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whale_train"):
            for name in node.names:
                self.imported[name.asname or name.name] = (node.module or "", name.name)
        if isinstance(node, Function):
            self.functions.setdefault(node.name, node)
            place, owner = (), node
        for part, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    is_block = part in _PARTS and not isinstance(node, Function | ast.Module)
                    inside = (*place, (id(node), self._branch(part, child))) if is_block else place
                    self._note(child, inside, owner)

    @staticmethod
    def _branch(part: str, child: ast.AST) -> str:
        """Return the name of a branch: those of handlers and cases are told apart."""
        return f"{part}{id(child)}" if part in ("handlers", "cases") else part

    def always_before(self, node: ast.AST, other: ast.AST) -> bool:
        """Return whether `node` has run whenever `other` runs, which follows it in one function."""
        place = self.places[id(node)]
        return self.places[id(other)][: len(place)] == place

    def exclude_each_other(self, node: ast.AST, other: ast.AST) -> bool:
        """Return whether only one of two nodes of a function runs: they are in other branches."""
        for one, two in zip(self.places[id(node)], self.places[id(other)], strict=False):
            if one != two:
                return one[0] == two[0] and "finalbody" not in (one[1], two[1])
        return False


@dataclass(frozen=True)
class Sources:
    """All modules of the product, by their dotted names."""

    modules: dict[str, Module]

    @classmethod
    def of(cls, package: Path) -> "Sources":
        """Return the modules below the folder of a package."""
        modules = {}
        for path in sorted(package.rglob("*.py")):
            place = path.relative_to(package)
            parts = [package.name, *place.with_suffix("").parts]
            name = ".".join(part for part in parts if part != "__init__")
            modules[name] = Module(str(place), ast.parse(path.read_text(encoding="utf-8")))
        return cls(modules)

    @cached_property
    def calls(self) -> dict[str, list[tuple[Module, ast.Call]]]:
        """Return all calls, by the name of the function or method that is called."""
        calls: dict[str, list[tuple[Module, ast.Call]]] = {}
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                    calls.setdefault(name, []).append((module, node))
        return calls

    def function(self, module: Module, name: str) -> tuple[Module, Function] | None:
        """Return the function that a name of a module stands for, and the function's module."""
        at = self._origin(module, name)
        return (at[0], at[0].functions[at[1]]) if at[1] in at[0].functions else None

    def constant(self, module: Module, name: str) -> tuple[Module, ast.expr] | None:
        """Return the expression that a name of a module's top level stands for, and its module."""
        at = self._origin(module, name)
        return (at[0], at[0].constants[at[1]]) if at[1] in at[0].constants else None

    def _origin(self, module: Module, name: str) -> tuple[Module, str]:
        """Return the module that a name is imported from, over several, and its name there."""
        while name not in module.constants and name not in module.functions:
            source, name_there = module.imported.get(name, ("", ""))
            if source not in self.modules:
                break
            module, name = self.modules[source], name_there
        return module, name
