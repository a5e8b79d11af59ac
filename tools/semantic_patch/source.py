"""Text helpers. Lines end in \\n only: what Python, C++ and git count as lines here."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Container

from .errors import PatchError


def decode(data: bytes, where: str) -> str:
    if b"\r" in data:
        raise PatchError(
            f"{where} has CRLF (or CR) line endings, and writing it back would mix them; check it out "
            "with LF endings (git config core.autocrlf input, then git checkout it again)"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise PatchError(f"{where} is not UTF-8 text: {e}") from e


def lines_of(text: str) -> list[str]:
    """The lines with their ends; unlike str.splitlines, not split at form feeds and the like."""
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return lines + [last] if last else lines


def indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def shift(lines: list[str], old: str, new: str, keep: Container[int] = ()) -> list[str]:
    """Re-indent lines from `old` to `new`; those whose index is in `keep` belong to a string literal."""
    if old == new:
        return lines
    return [
        line if i in keep or not line.strip() or not line.startswith(old) else new + line[len(old) :]
        for i, line in enumerate(lines)
    ]


def string_lines(tree: ast.AST) -> set[int]:
    """1-based numbers of the lines that begin inside a string literal."""
    return {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
        for number in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }


def check_python(text: str, name: str, blame: str) -> None:
    """Raise if `text` is not a valid module. `blame` says who made it so."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as e:
        line = getattr(e, "text", None)
        near = f" near {line.strip()!r}" if line else ""
        raise PatchError(f"{blame}: the result for {name} is not valid Python: {e}{near}") from e
