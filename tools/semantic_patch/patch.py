"""A patch, and what it makes of a tree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import cpp, definitions, rules, state as st
from .diff import unified
from .errors import PatchError
from .imports import add_imports, parse_import
from .source import check_python, decode
from .state import sha256, State
from .tree import (
    check_space,
    check_supported,
    CHECKOUT,
    kind_of,
    locked,
    missing_directories,
    parse_version,
    read,
    scratch,
    VERSION_FILES,
    WHEEL,
    write_all,
)


WHEEL_SHIM = Path("tools/wheel_shim")
WHEEL_NOTE = (
    "note: this is the Python half only, and a wheel's tree does not work with it alone. `make build` (setup.py) "
    "compiles the library that completes it."
)
Plan = dict[str, tuple[bytes | None, bytes]]


@dataclass
class Result:
    """What an apply or a revert did, as paths relative to the tree."""

    changed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kind: str = ""

    @property
    def wrote(self) -> bool:
        return bool(self.changed or self.added or self.restored or self.removed)


@dataclass(frozen=True)
class Status:
    """The state of a tree; `code` is the exit code of the command line's `status`."""

    code: int
    text: str


@dataclass(frozen=True)
class Input:
    """A file of the patch. Its path mirrors the one of upstream's file."""

    rel: str
    data: bytes
    where: str
    wheel_only: bool


class Patch:
    """The patch under `roots`: directories whose torch/ and test/ mirror upstream's paths.

    A root's tools/wheel_shim, where there is one, is a root of its own for wheels only.
    """

    def __init__(self, roots: Iterable[Path]) -> None:
        self.roots = [Path(root).resolve() for root in roots]
        shims = [root / WHEEL_SHIM for root in self.roots]
        self.inputs: list[Input] = []
        for root in dict.fromkeys(self.roots + [shim for shim in shims if shim.is_dir()]):
            if not root.is_dir():
                raise PatchError(f"{root}, a directory of the patch, does not exist")
            self.inputs += _read_root(root, wheel_only=root in shims)

    @property
    def digest(self) -> str:
        """Identifies the patch as a whole, whichever tree it is for."""
        return _digest(self.inputs)

    def _for(self, kind: str) -> list[Input]:
        if kind == CHECKOUT:
            return [i for i in self.inputs if not i.wheel_only]
        return [i for i in self.inputs if i.rel.startswith("torch/") and not i.rel.endswith(cpp.SUFFIXES)]

    def plan(self, tree: Path, kind: str | None = None) -> Plan:
        """What upstream's files, as they were before any apply, become: {path: (old or None, new)}."""
        tree = Path(tree)
        kind = kind or kind_of(tree)
        return self._plan(tree, kind, State.load(tree))[0]

    def _plan(self, tree: Path, kind: str, state: State | None) -> tuple[Plan, str]:
        def upstream(rel: str) -> bytes | None:
            return state.original(tree, rel) if state and rel in state.files else read(tree, rel)

        version = parse_version(upstream(VERSION_FILES[kind]), kind, tree)
        check_supported(version, tree)
        return _compute(self._for(kind), kind, version, upstream), version

    def apply(self, tree: Path, kind: str | None = None) -> Result:
        """Apply the patch, all of it or nothing. After a change of the patch, write only what differs."""
        tree = Path(tree)
        kind = kind or kind_of(tree)
        with locked(tree):
            state = State.load(tree)
            if state and state.state == st.APPLYING:
                raise PatchError(f"{tree} is half-applied: an apply or revert was interrupted; run revert first")
            if state:
                _refuse_hand_changes(state.changed_by_hand(tree), tree)
            plan, version = self._plan(tree, kind, state)
            return _write(tree, plan, state, State(st.APPLIED, kind, version, _digest(self._for(kind))))

    def revert(self, tree: Path) -> Result:
        """Restore every byte and mode, and remove what the patch added."""
        tree = Path(tree)
        result = Result(kind=kind_of(tree))
        with locked(tree):
            state = State.load(tree)
            if state is None:
                st.remove(tree)
                return result
            _refuse_hand_changes(state.changed_by_hand(tree, or_original=True), tree)
            changes: dict[str, tuple[bytes | None, int | None]] = {}
            for rel, entry in state.files.items():
                entry.was = sha256(read(tree, rel))
                if entry.was != entry.before:
                    changes[rel] = (state.original(tree, rel), entry.mode)
                    (result.removed if entry.before is None else result.restored).append(rel)
            check_space(tree, sum(len(data or b"") for data, _ in changes.values()))
            with st.transaction(tree, state):
                for rel in state.files:
                    for leftover in scratch(tree / rel):
                        leftover.unlink(missing_ok=True)
                write_all(tree, changes)
            _remove_directories(tree, state.directories)
            st.remove(tree)
        return result

    def status(self, tree: Path) -> Status:
        """How the tree stands to this patch."""
        tree = Path(tree)
        kind_of(tree)
        state = State.load(tree)
        if state is None:
            return Status(0, "not applied")
        if state.state == st.APPLYING:
            return Status(5, "half-applied: an apply or revert was interrupted; run revert, then apply again")
        if changed := state.changed_by_hand(tree):
            return Status(4, f"changed by hand: {', '.join(changed)}")
        if state.digest != _digest(self._for(state.kind)):
            return Status(3, "applied from another version of the patch; run apply to bring it up to date")
        return Status(0, f"applied and current ({len(state.files)} files, torch {state.torch})")

    def diff(self, tree: Path, kind: str | None = None) -> str:
        """What the patch does to upstream's files, as a patch that `git apply` accepts."""
        return "".join(unified(rel, old, new) for rel, (old, new) in self.plan(tree, kind).items())


def _read_root(root: Path, wheel_only: bool) -> Iterator[Input]:
    for top in ("torch", "test"):
        for path in sorted((root / top).rglob("*")):
            rel = path.relative_to(root)
            # This tool's own tests have no place in PyTorch.
            if any(p == "__pycache__" or p.startswith(".") for p in rel.parts) or rel.parts[:2] == ("test", "tools"):
                continue
            if path.is_file() and path.suffix != ".pyc":
                yield Input(rel.as_posix(), path.read_bytes(), str(path), wheel_only)


def _digest(inputs: Iterable[Input]) -> str:
    digest = hashlib.sha256()
    for i in inputs:
        digest.update(f"{i.rel}\0{len(i.data)}\0".encode() + i.data)
    return digest.hexdigest()


def _compute(inputs: list[Input], kind: str, version: str, upstream: Callable[[str], bytes | None]) -> Plan:
    release = f"torch {version}"
    new: dict[str, bytes] = {}
    old: dict[str, bytes | None] = {}

    def current(rel: str) -> bytes | None:
        if rel not in old:
            old[rel] = upstream(rel)
        return new.get(rel, old[rel])

    # Rules are about upstream's code, so they all come before what the patch adds to it.
    for i in inputs:
        if not i.rel.endswith(".yml"):
            continue
        for rule in rules.load(decode(i.data, i.where), i.where):
            target = i.rel[: -len(".yml")] + rules.SUFFIXES[rule.language]
            if (rule.language == "cpp" and kind == WHEEL) or not rule.applies_to(version):
                continue
            data = current(target)
            if data is None:
                raise PatchError(
                    f"{rule.name}: {release} has no {target}; upstream has moved or removed it. Find where that code "
                    "went and move the rule to that path, or limit it by 'releases'"
                )
            text = rule.apply(decode(data, f"{release}'s {target}"), target, version)
            if rule.language == "python":
                for statement in rule.imports:
                    text = add_imports(text, parse_import(statement, rule.name), rule.name)
                check_python(text, target, rule.name)
            new[target] = text.encode()
    for i in inputs:
        if i.rel.endswith(".yml"):
            continue
        suffix = Path(i.rel).suffix
        data = current(i.rel)
        if suffix != ".py" and suffix not in cpp.SUFFIXES and not i.rel.startswith("test/"):
            raise PatchError(f"{i.where}: a patch holds .py, .yml and C++ files under torch/, not {suffix or 'this'}")
        if data is None or suffix not in (".py", *cpp.SUFFIXES):
            if data not in (None, i.data):
                raise PatchError(f"{i.where}: {release} has another {i.rel} already; rename ours")
            new[i.rel] = i.data
            if suffix == ".py":
                check_python(decode(i.data, i.where), i.rel, i.where)
            continue
        merge = definitions.merge if suffix == ".py" else cpp.merge
        text = merge(decode(data, f"{release}'s {i.rel}"), decode(i.data, i.where), i.rel, i.where)
        if suffix == ".py":
            check_python(text, i.rel, i.where)
        new[i.rel] = text.encode()
    return {rel: (old[rel], new[rel]) for rel in sorted(new) if new[rel] != old[rel]}


def _refuse_hand_changes(changed: list[str], tree: Path) -> None:
    if changed:
        raise PatchError(
            f"changed by hand since the patch was applied to {tree}: {', '.join(changed)}; nothing was touched. "
            f"Save your change, copy the file of that name in {tree / st.DIRECTORY / 'originals'} over it (or delete "
            "it if there is none), then run revert"
        )


def _write(tree: Path, plan: Plan, state: State | None, target: State) -> Result:
    """Bring the tree from `state` to `plan`, and record it as `target`."""
    result = Result(kind=target.kind)
    changes: dict[str, tuple[bytes | None, int | None]] = {}
    originals: dict[str, bytes] = {}
    known = state.files if state else {}
    for rel, (old, data) in plan.items():
        now = read(tree, rel)
        path = tree / rel
        mode = known[rel].mode if rel in known else path.stat().st_mode & 0o7777 if path.exists() else None
        target.files[rel] = st.Entry(sha256(old), sha256(data), mode, sha256(now))
        if now == data:
            result.unchanged.append(rel)
            continue
        changes[rel] = (data, None)
        (result.added if old is None else result.changed).append(rel)
        if old is not None and rel not in known:
            originals[rel] = old
    for rel in sorted(set(known) - set(plan)):
        old = state.original(tree, rel) if state else None
        changes[rel] = (old, known[rel].mode)
        target.files[rel] = st.Entry(known[rel].before, known[rel].before, known[rel].mode, known[rel].after)
        (result.removed if old is None else result.restored).append(rel)
    if state and not changes and (state.digest, state.torch) == (target.digest, target.torch):
        return result
    new_bytes = sum(len(data or b"") for data, _ in changes.values())
    check_space(tree, new_bytes + sum(map(len, originals.values())) + 512 * len(target.files) + 8192)
    made = missing_directories(tree, changes)
    directories = sorted({*(state.directories if state else ()), *made})
    final = State(
        st.APPLIED,
        target.kind,
        target.torch,
        target.digest,
        {rel: replace(target.files[rel], was=None) for rel in plan},
        [d for d in directories if any(rel.startswith(d + "/") for rel in plan)],
    )
    target.directories = directories
    dropped = set(target.files) - set(plan)
    with st.transaction(tree, target, final):
        for rel, data in originals.items():
            st.keep_original(tree, rel, data)
        write_all(tree, changes)
    for rel in dropped:
        st.original_path(tree, rel).unlink(missing_ok=True)
    _remove_directories(tree, [d for d in directories if d not in final.directories])
    return result


def _remove_directories(tree: Path, directories: list[str]) -> None:
    """Remove directories that were made for added files, unless someone has put a file there since."""
    for rel in sorted(directories, reverse=True):
        for path in (tree / rel / "__pycache__", tree / rel):
            try:
                path.rmdir()
            except OSError:
                pass
