"""X.yml: structural rewrites inside upstream's X, as ast-grep rules, one YAML document a rewrite."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .errors import need, PatchError
from .source import indent_of, shift


SUFFIXES = {"python": ".py", "cpp": ".cpp"}
MATCHER_KEYS = ("rule", "constraints", "utils", "transform")
REQUIRED = {"id", "language", "message", "note", "rule", "fix", "metadata"}
METADATA = {"matches", "imports", "releases", "sure"}
VARIABLE = re.compile(r"\$(\$\$)?([A-Z_][A-Z0-9_]*)")
# Their text may span lines whose indentation is content.
STRING_KINDS = {"python": "string", "cpp": "raw_string_literal"}


@dataclass(frozen=True)
class Rule:
    id: str
    language: str
    message: str
    fix: str
    matches: int
    matcher: dict[str, Any]
    imports: tuple[str, ...]
    releases: str | None
    file: str

    @property
    def name(self) -> str:
        return f"rule '{self.id}' ({self.file})"

    def applies_to(self, version: str) -> bool:
        if self.releases is None:
            return True
        packaging = need("packaging.specifiers", "packaging")
        base = need("packaging.version", "packaging").Version(version).base_version
        return packaging.SpecifierSet(self.releases).contains(base, prereleases=True)

    def apply(self, text: str, target: str, version: str) -> str:
        """Rewrite every match in `text`, which must hold exactly as many as the rule expects."""
        root = need("ast_grep_py", "ast-grep-py").SgRoot(text, self.language).root()
        try:
            found = root.find_all(self.matcher)
        except Exception as e:
            # ast-grep raises plain exceptions with a native backtrace under the reason.
            reason = " ".join(str(e).split("Stack backtrace:")[0].split())
            raise PatchError(f"{self.name}: ast-grep does not accept it: {reason}") from e
        if len(found) != self.matches:
            at = ", ".join(str(m.range().start.line + 1) for m in found[:8])
            raise PatchError(
                f"{self.name} matches {len(found)} times in {target} of torch {version}"
                f"{f' (lines {at})' if at else ''}, but expects {self.matches}. It looks for: {self.message}. "
                "Upstream has changed there: read that code again, then adapt the rule or its 'matches'"
            )
        edits = [(m.range().start.index, m.range().end.index, m) for m in found]
        edits.sort(key=lambda edit: edit[:2])
        out, done = [], 0
        for start, end, match in edits:
            if start < done:
                raise PatchError(
                    f"{self.name}: two of its matches overlap in {target}, line "
                    f"{match.range().start.line + 1}; make the rule narrower"
                )
            new = self._render(match, text)
            if not new:
                start, end = _widen_to_blank_line(text, start, end)
            out += [text[done:start], new]
            done = end
        return "".join(out) + text[done:]

    def _render(self, match: Any, text: str) -> str:
        base = _line_indent(text, match.range().start.index)
        rendered = []
        for i, line in enumerate(self.fix.split("\n")):
            line = base + line if i and line.strip() else line
            inner = indent_of(line) if i else base + indent_of(line)
            rendered.append(VARIABLE.sub(lambda v: self._value(v, match, text, inner), line))
        return "\n".join(rendered)

    def _value(self, variable: re.Match[str], match: Any, text: str, indent: str) -> str:
        several, name = variable.groups()
        if not several and name in self.matcher.get("transform", {}):
            return match.get_transformed(name) or ""
        if several:
            nodes = match.get_multiple_matches(name)
        else:
            node = match.get_match(name)
            nodes = [node] if node else []
        if not nodes:
            return ""
        start, end = nodes[0].range().start, nodes[-1].range().end
        kind = STRING_KINDS[self.language]
        inside_string = {
            line - start.line
            for node in nodes
            for s in node.find_all({"rule": {"kind": kind}})
            for line in range(s.range().start.line + 1, s.range().end.line + 1)
        }
        lines = text[start.index : end.index].split("\n")
        return "\n".join(
            lines[:1] + shift(lines[1:], _line_indent(text, start.index), indent, {i - 1 for i in inside_string})
        )


def load(data: str, file: str) -> list[Rule]:
    """The rules of one .yml file, in order."""
    yaml = need("yaml", "PyYAML")
    try:
        documents = [d for d in yaml.safe_load_all(data) if d is not None]
    except yaml.YAMLError as e:
        raise PatchError(f"{file} is not valid YAML: {' '.join(str(e).split())}") from e
    rules = [_parse(d, file, i) for i, d in enumerate(documents, 1)]
    for rule in rules:
        if sum(r.id == rule.id for r in rules) > 1:
            raise PatchError(f"{file}: two rules have the id '{rule.id}'; give each its own")
    return rules


def _parse(doc: Any, file: str, number: int) -> Rule:
    def check(good: bool, problem: str) -> None:
        if not good:
            name = doc.get("id", f"number {number}") if isinstance(doc, dict) else f"number {number}"
            raise PatchError(f"rule '{name}' ({file}): {problem}")

    check(isinstance(doc, dict), "is not a mapping")
    missing, unknown = REQUIRED - set(doc), set(doc) - REQUIRED - set(MATCHER_KEYS)
    check(not missing, f"lacks {', '.join(sorted(missing))}")
    check(not unknown, f"has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    for key in ("id", "message", "note", "fix"):
        check(isinstance(doc[key], str) and (key == "fix" or bool(doc[key].strip())), f"{key} must be text")
    check(doc["language"] in SUFFIXES, f"language must be one of {', '.join(SUFFIXES)}")
    metadata = doc["metadata"]
    check(isinstance(metadata, dict), "metadata must be a mapping")
    unknown = set(metadata) - METADATA
    check(not unknown, f"metadata has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    matches = metadata.get("matches")
    check(type(matches) is int and matches > 0, "metadata.matches must say how many matches to expect (1 or more)")
    imports = metadata.get("imports", [])
    check(
        isinstance(imports, list) and all(isinstance(i, str) for i in imports),
        "metadata.imports must be a list of import statements",
    )
    check(not imports or doc["language"] == "python", "metadata.imports is for python only")
    releases = metadata.get("releases")
    if releases is not None:
        try:
            need("packaging.specifiers", "packaging").SpecifierSet(releases)
        except (ValueError, AttributeError, TypeError) as e:
            check(False, f"metadata.releases is not a version specifier such as '>=2.13,<2.15': {e}")
    matcher = {key: doc[key] for key in MATCHER_KEYS if key in doc}
    known = set(re.findall(r"\$([A-Z_][A-Z0-9_]*)", json.dumps(matcher))) | set(matcher.get("transform", {}))
    for _, name in VARIABLE.findall(doc["fix"]):
        check(name in known, f"fix uses ${name}, which the rule does not capture")
    return Rule(
        id=doc["id"],
        language=doc["language"],
        message=doc["message"].strip(),
        fix=doc["fix"].rstrip("\n"),
        matches=matches,
        matcher=matcher,
        imports=tuple(imports),
        releases=releases,
        file=file,
    )


def _line_indent(text: str, index: int) -> str:
    """The indentation of the line that holds `index`."""
    return indent_of(text[text.rfind("\n", 0, index) + 1 :].split("\n", 1)[0])


def _widen_to_blank_line(text: str, start: int, end: int) -> tuple[int, int]:
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", end)
    last = len(text) if last < 0 else last + 1
    if text[first:start].strip() or text[end:last].strip():
        return start, end
    return first, last
