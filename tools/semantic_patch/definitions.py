"""X.py: definitions that are added to upstream's X or replace its definition of the same name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import PatchError
from .imports import add_imports, Import
from .source import indent_of, lines_of, shift, string_lines


MARKER = re.compile(r"#\s*patch:\s*(.*?)\s*$")
PLACE = re.compile(r"(before|after)\s+(\w+)$")
Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Block = (ast.If, ast.Try, ast.With)


@dataclass
class Item:
    """One top-level statement of our file, with the comments directly above it."""

    name: str | None
    comments: list[str]
    code: list[str]
    strings: set[int]  # indices into `code` of lines that begin inside a string
    place: tuple[str, str] | None
    blanks: int
    line: int


def merge(upstream: str, ours: str, target: str, where: str) -> str:
    """Upstream's module `target` with the imports and definitions of our file `where` merged in."""
    try:
        body = ast.parse(ours).body
    except (SyntaxError, ValueError) as e:
        raise PatchError(f"{where} is not valid Python: {e}") from e
    try:
        base = ast.parse(upstream).body
    except (SyntaxError, ValueError) as e:
        raise PatchError(f"upstream's {target} cannot be parsed by this Python: {e}") from e
    imports, typing_imports, items = _read(body, ours, where)
    text = _place(upstream, base, items, target, where)
    return add_imports(add_imports(text, imports, where), typing_imports, where, type_checking=True)


def _read(body: list[ast.stmt], ours: str, where: str) -> tuple[list[Import], list[Import], list[Item]]:
    lines = lines_of(ours)
    imports: list[Import] = []
    typing_imports: list[Import] = []
    items: list[Item] = []
    used_markers = set()
    for i, s in enumerate(body):
        if isinstance(s, Import):
            imports.append(s)
        elif i == 0 and isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant):
            pass  # the docstring documents the patch
        elif isinstance(s, ast.If) and ast.unparse(s.test) == "__name__ == '__main__'":
            pass
        elif isinstance(s, ast.If) and ast.unparse(s.test).endswith("TYPE_CHECKING"):
            if s.orelse or not all(isinstance(t, Import) for t in s.body):
                raise PatchError(f"{where}:{s.lineno}: only imports may stand under `if TYPE_CHECKING:`")
            typing_imports += s.body  # type: ignore[arg-type]
        elif isinstance(s, (*Definition, ast.Assign, ast.AnnAssign, ast.AugAssign)) or (
            isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)
        ):
            items.append(_item(s, lines, where, used_markers))
        else:
            raise PatchError(
                f"{where}:{s.lineno}: cannot merge a top-level {type(s).__name__} statement; only imports, "
                "definitions, assignments and calls can be. Change upstream's own statements by a rule (.yml)"
            )
    for number, line in enumerate(lines, 1):
        if MARKER.match(line) and number not in used_markers:
            raise PatchError(f"{where}:{number}: this '# patch:' line is not directly above a definition")
    names = [item.name for item in items if item.name]
    for name in names:
        if names.count(name) > 1:
            raise PatchError(f"{where}: defines {name} more than once")
    return imports, typing_imports, items


def _item(s: ast.stmt, lines: list[str], where: str, used_markers: set[int]) -> Item:
    first, last = _span(s)
    top = _comments_above(lines, first)
    comments, place = [], None
    for number in range(top, first):
        marker = MARKER.match(lines[number])
        if marker is None:
            comments.append(lines[number])
            continue
        order = PLACE.match(marker[1])
        if order is None or place is not None:
            raise PatchError(f"{where}:{number + 1}: expected one '# patch: before NAME' or '# patch: after NAME'")
        place = (order[1], order[2])
        used_markers.add(number + 1)
    blanks = 0
    while top - blanks > 0 and not lines[top - blanks - 1].strip():
        blanks += 1
    names = _names(s)
    code = lines[first:last]
    if not code[-1].endswith("\n"):
        code[-1] += "\n"
    return Item(
        name=names[0] if len(names) == 1 else None,
        comments=comments,
        code=code,
        strings={n - 1 - first for n in string_lines(s)},
        place=place,
        blanks=2 if isinstance(s, Definition) else min(blanks, 2),
        line=s.lineno,
    )


def _place(upstream: str, base: list[ast.stmt], items: list[Item], target: str, where: str) -> str:
    lines = lines_of(upstream)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    edits: list[tuple[int, int, list[str]]] = []  # line range to replace, by what
    for item in items:
        found = [s for s in _statements(base) if item.name in _names(s)] if item.name else []
        if len(found) > 1:
            at = ", ".join(str(s.lineno) for s in found)
            raise PatchError(
                f"{where}:{item.line}: {item.name} is defined {len(found)} times in upstream's {target} (lines {at}); "
                "say which by a rule (.yml) instead"
            )
        if found:
            edits.append(_replacement(found[0], item, lines, target, where))
        elif item.place:
            edits.append(_insertion(item, base, lines, target, where))
    appended: list[str] = []
    for item in items:
        if item.place is None and not (item.name and any(item.name in _names(s) for s in _statements(base))):
            appended += ["\n"] * (item.blanks if appended else 2) + item.comments + item.code
    if appended:
        # A test file's `if __name__ == "__main__":` must stay last to see what is added.
        main = base and isinstance(base[-1], ast.If) and ast.unparse(base[-1].test) == "__name__ == '__main__'"
        end = _span(base[-1])[0] if main else len(lines)
        if main:
            end = _comments_above(lines, end)
            appended += ["\n", "\n"]
        last = end
        while end > 0 and not lines[end - 1].strip():
            end -= 1
        edits.append((end, last, appended if end else appended[2:]))
    # Stable: two insertions at one place keep the order of our file, and come before a replacement there.
    edits.sort(key=lambda edit: edit[:2])
    out, done = [], 0
    for start, end, new in edits:
        if start < done:
            raise PatchError(f"{where}: two of its definitions change the same lines of upstream's {target}")
        out += lines[done:start] + new
        done = end
    return "".join(out + lines[done:])


def _replacement(s: ast.stmt, item: Item, lines: list[str], target: str, where: str) -> tuple[int, int, list[str]]:
    if item.place:
        raise PatchError(
            f"{where}:{item.line}: {item.name} replaces the one in upstream's {target}, where it stands; "
            "remove its '# patch:' line"
        )
    if len(_names(s)) != 1:
        raise PatchError(
            f"{where}:{item.line}: upstream's {target}:{s.lineno} assigns {item.name} together with other names; "
            "change it by a rule (.yml)"
        )
    first, last = _span(s)
    indent = indent_of(lines[first])
    if lines[first][len(indent.encode()) : s.col_offset].strip() or ";" in lines[last - 1][-2:]:
        raise PatchError(f"{where}:{item.line}: upstream's {target}:{s.lineno} holds two statements in a line")
    code = shift(item.code, "", indent, item.strings)
    comments = shift(item.comments, "", indent)
    # Our comment replaces the one that upstream's definition has; without one, upstream's stays.
    return (_comments_above(lines, first) if comments else first), last, comments + code


def _insertion(
    item: Item, base: list[ast.stmt], lines: list[str], target: str, where: str
) -> tuple[int, int, list[str]]:
    order, anchor = item.place  # type: ignore[misc]
    found = [s for s in base if anchor in {n for inner in _statements([s]) for n in _names(inner)}]
    if len(found) != 1:
        raise PatchError(
            f"{where}:{item.line}: '# patch: {order} {anchor}': upstream's {target} defines {anchor} at "
            f"{len(found)} top-level places, not one; name another definition"
        )
    first, last = _span(found[0])
    big = item.blanks == 2 or isinstance(found[0], (*Definition, *Block))
    gap = ["\n"] * (2 if big else 0)
    text = item.comments + item.code
    if order == "after":
        return last, last, gap + text
    top = _comments_above(lines, first)
    return top, top, text + gap


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The module's own statements, those inside top-level try:, if: and with: included."""
    for s in body:
        yield s
        if isinstance(s, Block):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(s, part, []))
            for handler in getattr(s, "handlers", []):
                yield from _statements(handler.body)


def _names(s: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(s, Definition):
        return [s.name]
    if isinstance(s, ast.Assign):
        return [n.id for t in s.targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name):
        return [s.target.id]
    return []


def _span(s: ast.stmt) -> tuple[int, int]:
    """Line range (0-based, half-open) of a statement with its decorators."""
    first = min([s.lineno, *(d.lineno for d in getattr(s, "decorator_list", []))])
    return first - 1, s.end_lineno or s.lineno


def _comments_above(lines: list[str], first: int) -> int:
    """Index of the first of the comment lines directly above line `first`, at its indentation."""
    indent = indent_of(lines[first])
    while first > 0 and lines[first - 1].startswith(indent + "#"):
        first -= 1
    return first
