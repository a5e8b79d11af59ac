"""X.cpp, X.hpp: includes and definitions merged into upstream's X of a source checkout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import need, PatchError


SUFFIXES = (".cpp", ".hpp", ".h", ".cc", ".cu", ".cuh")
TRANSPARENT = ("declaration_list", "linkage_specification", "template_declaration")


def merge(upstream: str, ours: str, target: str, where: str) -> str:
    """Upstream's `target` with the includes and definitions of our file `where` merged in."""
    parse = need("ast_grep_py", "ast-grep-py").SgRoot
    nodes = parse(ours, "cpp").root().children()
    for node in nodes:
        if node.kind() == "ERROR":
            raise PatchError(f"{where}:{node.range().start.line + 1}: cannot be parsed as C++")
    includes = [n for n in nodes if n.kind() == "preproc_include"]
    pragmas = [n for n in nodes if n.kind() == "preproc_call" and n.text().split() == ["#pragma", "once"]]
    known = dict(_functions(parse(upstream, "cpp").root()))

    cuts = [_range(n) for n in includes + pragmas]
    replacements: list[tuple[int, int, str]] = []
    for name, functions in _functions(parse(ours, "cpp").root()):
        theirs = known.get(name, [])
        if not theirs:
            continue
        if len(theirs) > 1 or len(functions) > 1:
            theirs = [f for f in theirs if len(functions) == 1 and _parameters(f) == _parameters(functions[0])]
        if len(theirs) != 1:
            raise PatchError(
                f"{where}: {name} has several definitions in upstream's {target}, and none or many with these "
                "parameters; say which by a rule (.yml)"
            )
        start, end = _with_comments(functions[0], ours)
        cuts.append((start, end))
        start_up, end_up = _with_comments(theirs[0], upstream) if ours[start:].startswith("//") else _range(theirs[0])
        replacements.append((start_up, end_up, ours[start:end]))

    text = upstream
    for start, end, new in sorted(replacements, reverse=True):
        text = text[:start] + new + text[end:]
    rest = _rest(ours, nodes, cuts)
    if rest:
        text = text.rstrip("\n") + "\n\n" + rest + "\n"
    for include in includes:
        text = _add_include(text, include.text().strip())
    return text


def _rest(ours: str, nodes: list[Any], cuts: list[tuple[int, int]]) -> str:
    """Our file from its first definition on, without what went elsewhere and namespaces emptied by that."""
    items = [n for n in nodes if n.kind() not in ("comment", "preproc_include") and _range(n) not in cuts]
    for n in items:
        start, end = _range(n)
        inside = [c for c in cuts if start <= c[0] and c[1] <= end]
        if n.kind() == "namespace_definition" and inside:
            left = [m for m in _members(n) if not any(c[0] <= _range(m)[0] and _range(m)[1] <= c[1] for c in inside)]
            if not left:
                line = ours.find("\n", end)
                cuts = cuts + [(_with_comments(n, ours)[0], len(ours) if line < 0 else line)]
    items = [n for n in items if not any(c[0] <= _range(n)[0] and _range(n)[1] <= c[1] for c in cuts)]
    if not items:
        return ""
    begin = _with_comments(items[0], ours)[0]
    out, done = [], begin
    for start, end in sorted(cuts):
        if end <= done:
            continue
        out.append(ours[done : max(start, done)].rstrip("\n") + "\n\n" if start > done else "")
        done = end + len(ours[end:]) - len(ours[end:].lstrip("\n"))
    out.append(ours[done:])
    return "".join(out).strip("\n")


def _members(namespace: Any) -> list[Any]:
    members = []
    for child in namespace.children():
        if child.kind() == "declaration_list":
            for m in child.children():
                if m.is_named() and m.kind() != "comment":
                    members += _members(m) if m.kind() == "namespace_definition" else [m]
    return members


def _functions(root: Any) -> Iterator[tuple[str, list[Any]]]:
    """Each qualified name with its function definitions (their template headers included)."""
    found: dict[str, list[Any]] = {}

    def walk(node: Any, scope: tuple[str, ...], whole: Any) -> None:
        kind = node.kind()
        if kind == "function_definition":
            name = _declared_name(node)
            # TORCH_LIBRARY(…) { … } parses as a function without a return type; it can stand many times.
            if name and not name.isupper():
                found.setdefault("::".join((*scope, name)), []).append(whole or node)
            return
        if kind == "namespace_definition":
            name = node.field("name")
            scope = (*scope, name.text() if name else "(anonymous)")
        elif kind not in ("translation_unit", *TRANSPARENT):
            return
        inner = whole or node if kind in ("template_declaration", "linkage_specification") else None
        if kind == "linkage_specification" and any(c.kind() == "declaration_list" for c in node.children()):
            inner = None
        for child in node.children():
            walk(child, scope, inner)

    walk(root, (), None)
    yield from found.items()


def _declarator(function: Any) -> Any:
    node = function
    while node is not None and node.kind() != "function_declarator":
        # A reference_declarator names no field for what it wraps.
        node = node.field("declarator") or next((c for c in node.children() if c.kind().endswith("declarator")), None)
    return node


def _declared_name(function: Any) -> str | None:
    declarator = _declarator(function)
    name = declarator.field("declarator") if declarator is not None else None
    return "".join(name.text().split()) if name is not None else None


def _parameters(whole: Any) -> str:
    function = whole.find({"rule": {"kind": "function_definition"}})
    return "".join(_declarator(function).field("parameters").text().split())


def _range(node: Any) -> tuple[int, int]:
    r = node.range()
    return r.start.index, r.end.index


def _with_comments(node: Any, text: str) -> tuple[int, int]:
    """A node's range, begun at the // lines directly above it."""
    start, end = _range(node)
    line = text.rfind("\n", 0, start) + 1
    if text[line:start].strip():
        return start, end
    while line > 0:
        above = text.rfind("\n", 0, line - 1) + 1
        if not text[above:line].startswith("//"):
            break
        line = start = above
    return start, end


def _add_include(text: str, include: str) -> str:
    root = need("ast_grep_py", "ast-grep-py").SgRoot(text, "cpp").root()
    present = [n for n in root.children() if n.kind() == "preproc_include"]
    spelled = [n.text().strip() for n in present]
    if include in spelled:
        return text
    if not present:
        return include + "\n\n" + text
    # The include's own block: those that begin as it does, up to the first path component.
    block = include.split("/")[0]
    peers = [i for i, s in enumerate(spelled) if s.startswith(block)] or [
        i for i, s in enumerate(spelled) if s[: len("#include <")] == include[: len("#include <")]
    ]
    if not peers:
        peers = [len(spelled) - 1]
    before = [i for i in peers if spelled[i] < include]
    if before:
        _, at = _range(present[before[-1]])
        at = at if text[at - 1] == "\n" else text.find("\n", at) + 1
    else:
        at, _ = _range(present[peers[0]])
    return text[:at] + include + "\n" + text[at:]
