"""Tell which names a statement assigns, and what of a value each of them gets."""

import ast

Value = str | tuple["Value", ...]


def part_for(target: ast.expr, value: Value, name: str) -> Value | None:
    """Return the part of a value that a local gets where the value is assigned to a target."""
    if isinstance(target, ast.Name):
        return value if target.id == name else None
    items = getattr(target, "elts", [])
    if not isinstance(value, tuple) or len(value) != len(items):
        return None
    parts = (part_for(item, x, name) for item, x in zip(items, value, strict=True))
    return next((part for part in parts if part is not None), None)


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def is_name(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def end_of(statement: ast.stmt) -> int:
    """Return the last line of what a statement reads: of a loop, of what it goes over."""
    node = statement.iter if isinstance(statement, ast.For) else statement
    return node.end_lineno or node.lineno


def assigned_names(statement: ast.stmt) -> set[str]:
    """Return the names of the locals that a statement assigns."""
    if isinstance(statement, ast.AugAssign):
        return set()
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    nodes = (node for target in targets if target is not None for node in ast.walk(target))
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def text_or_hole(value: Value, node: ast.expr) -> str:
    return value if isinstance(value, str) else hole_of(node)


def hole_of(node: ast.expr) -> str:
    """Return the placeholder of an expression: its last name, or `<value>`."""
    while isinstance(node, ast.Call | ast.FormattedValue | ast.Subscript):
        if isinstance(node, ast.Call):
            node = node.args[0] if node.args else node.func
        else:
            node = node.value
    name = getattr(node, "id", getattr(node, "attr", "value"))
    return f"<{name.strip('_') or 'value'}>"


def says_something(value: Value) -> bool:
    """Return whether a text, or a part of a tuple, is more than a placeholder."""
    if isinstance(value, tuple):
        return any(map(says_something, value))
    return bool(value) and not (value[0] == "<" and value[-1] == ">" and value.count("<") == 1)
