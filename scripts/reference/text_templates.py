"""Tell which texts an expression of the source can make, with `<name>` for what only a run knows.

Followed are literals, f-strings, sums, conditional expressions, names (of locals, of constants, of
loops over literals), tables, and the returns of the product's own functions. Locals that are
assigned in several branches have a text for each, and texts that go together, as a rule and its
remedy, come from branches that can run together.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from scripts.reference.assignments import (
    Value,
    assigned_names,
    end_of,
    hole_of,
    is_name,
    is_number,
    part_for,
    says_something,
    text_or_hole,
)
from scripts.reference.source_tree import Function, Module, Sources

MOST = 60  # alternatives of one expression; of one with more the first are taken
# Functions that write a value as a message shows it: a placeholder is all that can be said.
_FORMATS = frozenset((
    "as_yaml", "shortened", "listed", "_text", "_shown", "legal_degrees", "in_bytes", "in_count",
    "in_seconds", "in_rate", "fold_numbers", "fold_modules", "of_all", "said",
))  # fmt: skip
_DEEPEST = 4  # calls that are followed inside each other


@dataclass(frozen=True)
class Text:
    """One of the texts, or tuples of texts, that an expression can be.

    value: the text.
    chosen: the values of locals that it is made of: by the id of the statement that assigned one
        and the local's name, the statement and all that it assigned.
    """

    value: Value
    chosen: "Choices" = field(default_factory=dict)


Choices = Mapping[tuple[int, str], tuple[ast.stmt, Value]]


@dataclass(frozen=True)
class Scope:
    """A function while its expressions are read.

    bound: values of its parameters, where they are known.
    depth: number of calls around it that are followed.
    """

    module: Module
    function: Function | None
    bound: Mapping[str, Value] = field(default_factory=dict)
    depth: int = 0


class Reader:
    """Reads expressions of the product's source."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._kept: list[ast.expr] = []  # nodes of ours, whose ids must stay theirs

    def together(self, nodes: Sequence[ast.expr], scope: Scope) -> list[Text]:
        """Return the tuples of texts that expressions of one statement can be together."""
        tuples = [Text(())]
        for node in nodes:
            starred = isinstance(node, ast.Starred)
            texts = self.texts(node.value if isinstance(node, ast.Starred) else node, scope)
            grown = []
            for one, two in product(tuples, texts):
                merged = self._merged(one, two, scope)
                if merged is not None:
                    end = two.value if starred and isinstance(two.value, tuple) else (two.value,)
                    assert isinstance(one.value, tuple)
                    grown.append(Text((*one.value, *end), merged))
            tuples = grown[:MOST]
        return tuples

    def texts(self, node: ast.expr, scope: Scope) -> list[Text]:
        """Return the texts that an expression can be."""
        texts = list(self._read(node, scope))
        unique = {(x.value, *((key, y[1]) for key, y in x.chosen.items())): x for x in texts}
        return list(unique.values())[:MOST]

    def _read(self, node: ast.expr, scope: Scope) -> Iterator[Text]:
        match node:
            case ast.Constant(value=str(text)):
                yield Text(text)
            case ast.Constant(value=value):
                yield Text("" if value is None else str(value).lower())
            case ast.JoinedStr(values=parts):
                yield from self._joined(parts, scope)
            case ast.FormattedValue(value=value):
                texts = self.texts(value, scope)
                yield from (x if isinstance(x.value, str) else Text(hole_of(value)) for x in texts)
            case ast.BinOp(left=left, op=ast.Add(), right=right) if not is_number(right):
                yield from self._joined([left, right], scope)
            case ast.IfExp(body=body, orelse=orelse):
                yield from self.texts(body, scope)
                yield from self.texts(orelse, scope)
            case ast.Tuple(elts=items):
                yield from self.together(items, scope)
            case ast.Name(id=name):
                yield from self._named(node, name, scope)
            case ast.Subscript(value=ast.Name() as table) if self._table(table, scope):
                yield from self._looked_up(node, table, scope)
            case ast.Call(func=ast.Name(id="str"), args=[value]):
                yield from (
                    Text(text_or_hole(x.value, value), x.chosen) for x in self.texts(value, scope)
                )
            case ast.Call(func=ast.Name(id="next"), args=[ast.GeneratorExp(), _]):
                yield from self._first_of(node, scope)
            case ast.Call(func=ast.Attribute(value=ast.Name() as base, attr="format")):
                for made in self.texts(base, scope):
                    said = re.sub(r"\{[^{}]*\}", "<value>", text_or_hole(made.value, base))
                    yield Text(said, made.chosen)
            case ast.Call() if (returned := self._called(node, scope)) is not None:
                yield from returned
            case _:
                yield Text(hole_of(node))

    def _joined(self, parts: Sequence[ast.expr], scope: Scope) -> Iterator[Text]:
        for text in self.together(parts, scope):
            assert isinstance(text.value, tuple)
            pairs = zip(text.value, parts, strict=True)
            yield Text("".join(text_or_hole(value, part) for value, part in pairs), text.chosen)

    def _named(self, node: ast.Name, name: str, scope: Scope) -> Iterator[Text]:
        """Yield the texts of a name: of a local by its assignments that reach the name."""
        if scope.function is not None:
            definitions = list(self._reaching(node, name, scope))
            if definitions:
                for statement, texts in definitions:
                    key = (id(statement), name)
                    for whole, text in texts:
                        yield Text(text.value, {**text.chosen, key: (statement, whole)})
                return
            if name in scope.bound:
                yield Text(scope.bound[name])
                return
        constant = self.sources.constant(scope.module, name)
        if constant is None or scope.depth > _DEEPEST:
            yield Text(f"<{name}>")
            return
        yield from self.texts(constant[1], Scope(constant[0], None, {}, scope.depth + 1))

    def _reaching(
        self, at: ast.AST, name: str, scope: Scope
    ) -> Iterator[tuple[ast.stmt, list[tuple[Value, Text]]]]:
        """Yield the statements that assign a local and reach a node, the last first, with all that
        they assign and the local's texts."""
        module, line = scope.module, getattr(at, "lineno", 0)
        assert scope.function is not None
        statements = [
            x
            for x in module.statements.get(id(scope.function), [])
            if not isinstance(x, ast.Return)
            and end_of(x) < line
            and not module.exclude_each_other(x, at)
        ]
        for statement in sorted(statements, key=lambda x: -x.lineno):
            texts = self._assigned(statement, name, scope)
            if texts is None:
                continue
            yield statement, texts
            inside = isinstance(statement, ast.For)
            if inside or module.always_before(statement, at):
                return

    def _assigned(
        self, statement: ast.stmt, name: str, scope: Scope
    ) -> list[tuple[Value, Text]] | None:
        """Return what a statement assigns, with the texts of one local among it; None where it
        assigns others."""
        match statement:
            case ast.AugAssign(target=target, value=value):
                before = ast.copy_location(ast.Name(name), statement)
                scope.module.places[id(before)] = scope.module.places[id(statement)]
                self._kept.append(before)
                texts = list(self._joined([before, value], scope)) if is_name(target, name) else []
                if is_number(value):  # a sum, and no longer text
                    texts = [Text(f"<{name}>")] if is_name(target, name) else []
            case ast.Assign(targets=[target], value=value):
                texts = self.texts(value, scope) if name in assigned_names(statement) else []
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                texts = self.texts(value, scope) if is_name(target, name) else []
            case ast.For(target=target, iter=items):
                known = name in assigned_names(statement)
                texts = self._iterated(items, scope) if known else []
            case _:
                return None
        if name not in assigned_names(statement) and not is_name(target, name):
            return None
        parts = [(x.value, part_for(target, x.value, name), x.chosen) for x in texts]
        assigned = [(whole, Text(x, chosen)) for whole, x, chosen in parts if x is not None]
        return assigned or [("", Text(f"<{name}>"))]

    def _iterated(self, items: ast.expr, scope: Scope) -> list[Text]:
        """Return the texts of the items that a loop goes over: of a tuple, or of a table."""
        match items:
            case ast.Tuple(elts=elements):
                return [x for element in elements for x in self.texts(element, scope)]
            case ast.Call(func=ast.Attribute(value=ast.Name() as name, attr="items")):
                module, table = self._table(name, scope) or (scope.module, {})
                inside = Scope(module, None, {}, scope.depth)
                return [
                    Text((str(key), x.value), x.chosen)
                    for key, value in table.items()
                    for x in self.texts(value, inside)
                ]
        return []

    def _first_of(self, call: ast.Call, scope: Scope) -> Iterator[Text]:
        """Yield the texts of `next(x for ... in TABLE.items() if ..., default)`."""
        generator, known = call.args[0], False
        if isinstance(generator, ast.GeneratorExp) and len(generator.generators) == 1:
            loop = generator.generators[0]
            for text in self._iterated(loop.iter, scope):
                name = getattr(generator.elt, "id", "")
                part = part_for(loop.target, text.value, name)
                if part is not None:
                    known = True
                    yield Text(part, text.chosen)
        if not known:
            yield Text("<value>")
        default = call.args[1]
        if not (isinstance(default, ast.Constant) and default.value is None):
            yield from self.texts(default, scope)

    def _looked_up(self, node: ast.Subscript, table: ast.Name, scope: Scope) -> Iterator[Text]:
        """Yield the texts of a table's item: of all items, where the key is not known."""
        module, items = self._table(table, scope) or (scope.module, {})
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        for name, value in items.items():
            if key in (None, name):
                for text in self.texts(value, Scope(module, None, {}, scope.depth)):
                    is_name = isinstance(text.value, str) and " " not in text.value
                    yield Text(hole_of(node.slice)) if is_name and key is None else text

    def _table(self, node: ast.Name, scope: Scope) -> tuple[Module, dict[object, ast.expr]] | None:
        """Return the items of a table of the top level, and its module."""
        constant = self.sources.constant(scope.module, node.id)
        if constant is None or not isinstance(constant[1], ast.Dict):
            return None
        keys = (getattr(key, "value", id(key)) for key in constant[1].keys)
        return constant[0], dict(zip(keys, constant[1].values, strict=True))

    def _called(self, call: ast.Call, scope: Scope) -> list[Text] | None:
        """Return the texts that a function of the product returns; None for other functions, and
        where it returns no text."""
        if not isinstance(call.func, ast.Name) or scope.depth >= _DEEPEST:
            return None
        target = self.sources.function(scope.module, call.func.id)
        if target is None or call.func.id in _FORMATS:
            return None
        module, function = target
        texts: list[Text] = []
        for bound in self.bindings(call, function, scope, is_text=False):
            inside = Scope(module, function, bound, scope.depth + 1)
            for node in module.statements.get(id(function), []):
                if isinstance(node, ast.Return) and node.value is not None:
                    texts += self.texts(node.value, inside)
        shown = [Text(x.value) for x in texts if says_something(x.value)]
        return shown or None

    def bindings(
        self, call: ast.Call, function: Function, scope: Scope, is_text: bool
    ) -> list[dict[str, Value]]:
        """Return the values that a call can give to a function's parameters together.

        is_text: whether the arguments are texts that are read, or are shown by their names.
        """
        names = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
        if names and names[0] in ("self", "cls"):
            names = names[1:]
        given = list(zip(names, call.args, strict=False))
        given += [(x.arg, x.value) for x in call.keywords if x.arg is not None]
        if any(isinstance(x, ast.Starred) for x in call.args):
            return [{}]
        if not is_text:
            constants = ((n, x) for n, x in given if isinstance(x, ast.Constant | ast.JoinedStr))
            given = list(constants)
        values = self.together([value for _, value in given], scope)
        return [dict(zip((n for n, _ in given), x.value, strict=True)) for x in values]

    def _merged(self, one: Text, two: Text, scope: Scope) -> Choices | None:
        """Return the choices of two texts together, or None where they cannot both be made."""
        module = scope.module
        for first, second in product(one.chosen, two.chosen):
            (early, early_values), (late, late_values) = one.chosen[first], two.chosen[second]
            if early is late:
                if early_values != late_values:
                    return None
                continue
            if id(early) not in module.places or id(late) not in module.places:
                continue  # of another module
            if module.exclude_each_other(early, late):
                return None
            if early.lineno < late.lineno:
                anew = first[1] in assigned_names(late) and second not in one.chosen
            else:
                anew = second[1] in assigned_names(early) and first not in two.chosen
            if anew:
                return None  # the later statement has assigned the local of the earlier one
        return {**one.chosen, **two.chosen}
