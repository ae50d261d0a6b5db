"""The stub of a module of our own, taken from its source: bodies dropped, the dynamic attributes declared."""

from __future__ import annotations

import ast
import copy
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["stub_of"]


def stub_of(
    module: str, *, bases: Mapping[str, str], returns: Mapping[str, str], imports: Sequence[str] = (), tail: str = ""
) -> str:
    """The stub of ``module``.

    Args:
        module: e.g. ``"slapo_core.tree.node"``; it is read, not imported.
        bases: a base class to add, by class name.
        returns: other return types, by ``"Class.method"``; every one must exist.
        imports: import lines to add.
        tail: source to append.

    Raises:
        LookupError: a class or method named in ``bases`` or ``returns`` is not in the source.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"module {module} has no source")
    wanted = {*bases, *returns}
    lines = ["from __future__ import annotations", "", *imports]
    for statement in _flat(ast.parse(Path(spec.origin).read_text("utf-8")).body):
        if isinstance(statement, ast.ClassDef):
            wanted.discard(statement.name)
            wanted -= {f"{statement.name}.{name}" for name in _method_names(statement)}
            lines += ["", _class_stub(statement, bases.get(statement.name), returns)]
        elif isinstance(statement, ast.FunctionDef) and _public(statement.name):
            lines += ["", ast.unparse(_bodiless(statement))]
        elif isinstance(statement, (ast.Import, ast.ImportFrom)) or _assigns_all(statement):
            lines.append(ast.unparse(statement))
    if wanted:
        raise LookupError(f"{module} has no {', '.join(sorted(wanted))}")
    return "\n".join([*lines, *(["", tail] if tail else [])]) + "\n"


def _flat(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements of a module; those under ``if TYPE_CHECKING`` in their place."""
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
            found += statement.body
        elif not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            found.append(statement)
    return found


def _class_stub(node: ast.ClassDef, base: str | None, returns: Mapping[str, str]) -> str:
    bases: list[ast.expr] = [*node.bases, *([ast.Name(base)] if base else [])]
    body: list[ast.stmt] = []
    documentation = ast.get_docstring(node, clean=False)
    if documentation:
        body.append(ast.Expr(ast.Constant(documentation)))
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and _public(_target(statement.target)):
            body.append(ast.AnnAssign(statement.target, statement.annotation, None, statement.simple))
        elif isinstance(statement, ast.FunctionDef) and statement.name not in ("__getattr__", "__dir__"):
            if statement.name == "__init__":
                declared = {_target(item.target) for item in body if isinstance(item, ast.AnnAssign)}
                body += [item for item in _attributes(statement) if _target(item.target) not in declared]
            if _public(statement.name):
                body.append(_bodiless(statement, returns.get(f"{node.name}.{statement.name}")))
    changed = copy.copy(node)
    changed.bases, changed.body = bases, body or [_dots()]
    return ast.unparse(ast.fix_missing_locations(changed))


def _attributes(init: ast.FunctionDef) -> list[ast.AnnAssign]:
    """The public attributes that ``__init__`` sets: ``self.mesh = mesh`` with the type of the argument."""
    arguments = {item.arg: item.annotation for item in (*init.args.args, *init.args.kwonlyargs)}
    found: list[ast.AnnAssign] = []
    for statement in ast.walk(init):
        target: ast.expr
        annotation: ast.expr | None = None
        if isinstance(statement, ast.AnnAssign):
            target, annotation = statement.target, statement.annotation
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(statement.value, ast.Name):
                annotation = arguments.get(statement.value.id)
            elif isinstance(statement.value, ast.Call) and isinstance(statement.value.func, ast.Name):
                annotation = statement.value.func if statement.value.func.id[0].isupper() else None
        else:
            continue
        name = _target(target)
        if isinstance(target, ast.Attribute) and _public(name):
            if annotation is None:
                raise LookupError(f"attribute '{name}' has no declared type; annotate it where it is set")
            found.append(ast.AnnAssign(ast.Name(name), annotation, None, 1))
    return found


def _bodiless(node: ast.FunctionDef, returns: str | None = None) -> ast.FunctionDef:
    documentation = ast.get_docstring(node, clean=False)
    body: list[ast.stmt] = [ast.Expr(ast.Constant(documentation))] if documentation else []
    changed = copy.copy(node)
    changed.body = [*body, _dots()]
    changed.returns = ast.parse(returns, mode="eval").body if returns is not None else node.returns
    return ast.fix_missing_locations(changed)


def _dots() -> ast.Expr:
    return ast.Expr(ast.Constant(...))


def _method_names(node: ast.ClassDef) -> list[str]:
    return [item.name for item in node.body if isinstance(item, ast.FunctionDef)]


def _assigns_all(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and any(_target(target) == "__all__" for target in statement.targets)


def _target(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else "_"


def _public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))
