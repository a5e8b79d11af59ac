"""Adds import statements to a module where an import sorter would put them."""

from __future__ import annotations

import ast
import sys

from .errors import PatchError
from .source import indent_of, lines_of


Import = ast.Import | ast.ImportFrom
LINE_LENGTH = 88


def parse_import(text: str, where: str) -> list[Import]:
    try:
        body = ast.parse(text).body
    except SyntaxError:
        body = []
    if not body or not all(isinstance(s, Import) for s in body):
        raise PatchError(f"{where}: not an import statement: {text!r}")
    return body  # type: ignore[return-value]


def type_checking_block(body: list[ast.stmt]) -> ast.If | None:
    """The top-level `if TYPE_CHECKING:`, if there is one."""
    return next((s for s in body if isinstance(s, ast.If) and ast.unparse(s.test).endswith("TYPE_CHECKING")), None)


def add_imports(text: str, imports: list[Import], where: str, type_checking: bool = False) -> str:
    """Add each name of `imports` that the module (or its `if TYPE_CHECKING:`) does not import yet."""
    for statement in imports:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__" and ast.unparse(
            statement
        ) not in map(ast.unparse, ast.parse(text).body):
            raise PatchError(f"{where}: `{ast.unparse(statement)}` would change all of upstream's module; do without")
        for alias in statement.names:
            text = _add(text, statement, alias, type_checking)
    return text


def _add(text: str, new: Import, alias: ast.alias, type_checking: bool) -> str:
    body = ast.parse(text).body
    top = [s for s in body if isinstance(s, Import)]
    present = top
    if type_checking:
        block = type_checking_block(body)
        if block is None:
            lines = lines_of(text)
            at = top[-1].end_lineno if top else 0
            lines[at:at] = ["\nif TYPE_CHECKING:\n", f"    {_spell(new, alias)}\n"]
            return _add("".join(lines), *_as_import("from typing import TYPE_CHECKING"), False)
        top = [s for s in block.body if isinstance(s, Import)]
        present = present + top
    if any(_same_module(s, new) and _same_name(a, alias) for s in present for a in s.names):
        return text
    lines = lines_of(text)
    if isinstance(new, ast.ImportFrom):
        for statement in top:
            if _same_module(statement, new) and (merged := _merge(lines, statement, alias)):
                return merged
    if type_checking and not top:
        at, before, after = block.body[0].lineno - 1, [], []
    else:
        at, before, after = _position(lines, body, top, new)
    indent = indent_of(lines[block.body[0].lineno - 1]) if type_checking else ""
    lines[at:at] = [*before, f"{indent}{_spell(new, alias)}\n", *after]
    return "".join(lines)


def _as_import(text: str) -> tuple[Import, ast.alias]:
    statement = parse_import(text, "")[0]
    return statement, statement.names[0]


def _module(s: Import, alias: ast.alias | None = None) -> str:
    if isinstance(s, ast.ImportFrom):
        return "." * s.level + (s.module or "")
    return (alias or s.names[0]).name


def _same_module(a: Import, b: Import) -> bool:
    if isinstance(a, ast.Import) or isinstance(b, ast.Import):
        return isinstance(a, ast.Import) and isinstance(b, ast.Import)
    return _module(a) == _module(b)


def _same_name(a: ast.alias, b: ast.alias) -> bool:
    return a.name == b.name and a.asname == b.asname


def _name(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _spell(s: Import, alias: ast.alias) -> str:
    if isinstance(s, ast.Import):
        return f"import {_name(alias)}"
    return f"from {_module(s)} import {_name(alias)}"


def _section(module: str) -> int:
    top = module.split(".")[0]
    if module.startswith("."):
        return 4
    if top == "__future__":
        return 0
    if top in sys.stdlib_module_names:
        return 1
    return 3 if top in ("torch", "torchgen") else 2


def _key(s: Import, module: str) -> tuple[int, bool, str]:
    return _section(module), isinstance(s, ast.ImportFrom), module.lower()


def _merge(lines: list[str], s: ast.ImportFrom, alias: ast.alias) -> str | None:
    """Put the name into `s`, which is left alone (None) unless its layout is plain."""
    first, last = s.lineno - 1, s.end_lineno
    names = [_name(a) for a in s.names]
    if "*" in names or alias.name == "*" or any("#" in line or ";" in line for line in lines[first:last]):
        return None
    at = next((i for i, name in enumerate(names) if name.lower() > _name(alias).lower()), len(names))
    names.insert(at, _name(alias))
    indent = indent_of(lines[first])
    one_line = f"{indent}from {_module(s)} import {', '.join(names)}\n"
    if last - first > 1 or len(one_line) > LINE_LENGTH + 1:
        one_name_a_line = "".join(f"{indent}    {name},\n" for name in names)
        one_line = f"{indent}from {_module(s)} import (\n{one_name_a_line}{indent})\n"
    return "".join([*lines[:first], one_line, *lines[last:]])


def _position(
    lines: list[str], body: list[ast.stmt], imports: list[Import], new: Import
) -> tuple[int, list[str], list[str]]:
    """Where a new statement goes (a line index), and the lines to put before and after it."""
    # Imports further down are there for a reason (cycles, conditions); only the leading ones are sorted.
    rest = [s.lineno for s in body if not isinstance(s, Import) and not _is_docstring(s)]
    leading = [s for s in imports if not rest or s.lineno < min(rest)] or imports[:1]
    if not leading:
        at = body[0].end_lineno if body and _is_docstring(body[0]) else 0
        while at < len(lines) and lines[at].startswith("#"):
            at += 1
        return at, ["\n"] if at else [], ["\n"] if at < len(lines) and lines[at].strip() else []
    key = _key(new, _module(new))
    same = [s for s in leading if _section(_module(s)) == key[0]]
    if not same:
        lower = [s for s in leading if _section(_module(s)) < key[0]]
        if lower:
            return lower[-1].end_lineno, ["\n"], []
        return leading[0].lineno - 1, [], ["\n"]
    before = None
    for s in same:
        if _key(s, _module(s)) > key:
            break
        before = s
    if before is not None:
        return before.end_lineno, [], []
    at = same[0].lineno - 1
    # A comment above an import belongs to it, but the one that heads the file does not.
    if same[0] is not body[0]:
        while at > 0 and lines[at - 1].startswith("#"):
            at -= 1
    return at, [], []


def _is_docstring(s: ast.stmt) -> bool:
    return isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str)
