"""The tree to patch: what kind it is, which release, and how its files are written."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .errors import need, PatchError, RollbackError


WHEEL, CHECKOUT = "wheel", "checkout"
KINDS = (WHEEL, CHECKOUT)
# The releases whose code the rules were written against, as base versions (2.13.0+cpu is 2.13.0).
SUPPORTED = "==2.13.0"


def kind_of(tree: Path) -> str:
    """WHEEL or CHECKOUT; an error if the tree is not PyTorch's."""
    if not tree.is_dir():
        raise PatchError(f"{tree} does not exist or is not a directory")
    torch = tree / "torch"
    csrc = torch / "csrc"
    if (csrc / "distributed/c10d/Functional.cpp").is_file() or (csrc.is_dir() and (tree / "setup.py").is_file()):
        return CHECKOUT
    if (torch / "version.py").is_file() and (torch / "lib").is_dir():
        return WHEEL
    raise PatchError(
        f"{tree} is not a PyTorch tree: it has neither torch/version.py and torch/lib/ (a wheel's copy) "
        "nor torch/csrc/ and setup.py (a source checkout); name the directory that contains torch/"
    )


VERSION_FILES = {CHECKOUT: "version.txt", WHEEL: "torch/version.py"}


def parse_version(data: bytes | None, kind: str, tree: Path) -> str:
    """The torch release that the tree's version file states."""
    version = None
    with contextlib.suppress(SyntaxError, ValueError):
        text = (data or b"").decode()
        if kind == CHECKOUT:
            version = text.strip()
        else:
            for s in ast.parse(text).body:
                if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "__version__":
                    version = str(ast.literal_eval(s.value))
    if not version:
        raise PatchError(f"{tree} is not a PyTorch tree: {VERSION_FILES[kind]} states no version")
    return version


def check_supported(version: str, tree: Path) -> None:
    packaging = need("packaging.version", "packaging")
    try:
        base = packaging.Version(version).base_version
    except packaging.InvalidVersion as e:
        raise PatchError(f"{tree}: cannot read torch's version {version!r}") from e
    if not need("packaging.specifiers", "packaging").SpecifierSet(SUPPORTED).contains(base):
        raise PatchError(
            f"{tree} is torch {version}; this patch supports torch {SUPPORTED.lstrip('=')} only. Use that release, "
            "or carry the patch over: adapt its rules and SUPPORTED in tools/semantic_patch/tree.py"
        )


@contextlib.contextmanager
def locked(tree: Path) -> Iterator[None]:
    """Hold the tree for this process. The lock is on the directory, so that it leaves no file behind."""
    fd = os.open(tree, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise PatchError(f"another semantic_patch is at work on {tree}; wait for it to end") from e
        yield
    finally:
        os.close(fd)


def read(tree: Path, rel: str) -> bytes | None:
    """The content of a file of the tree, or None if there is none."""
    path = tree / rel
    if not path.is_file():
        return None
    if path.resolve() != tree.resolve() / rel:
        raise PatchError(
            f"{path} is reached through a symbolic link ({path.resolve()}); writing there could change another "
            "tree. Make a real copy of it first"
        )
    try:
        return path.read_bytes()
    except OSError as e:
        raise PatchError(f"cannot read {path}: {e.strerror or e}") from e


def check_space(tree: Path, size: int) -> None:
    free = shutil.disk_usage(tree).free
    if free < size:
        raise PatchError(f"no space in {tree}: {size} bytes are needed, {free} are free; nothing was changed")


def scratch(path: Path) -> tuple[Path, Path]:
    """Where a file's new content, and a link to its old one, are kept while it is replaced."""
    return path.with_name(f".{path.name}.semantic_patch-new"), path.with_name(f".{path.name}.semantic_patch-old")


def write_all(tree: Path, changes: Mapping[str, tuple[bytes | None, int | None]]) -> None:
    """Write each (content, mode), or delete where content is None; all of them or none.

    A file is never written in place: a staged tree may share its inode with the stock one.
    """
    made: list[Path] = []
    replaced: list[Path] = []
    path = tree
    try:
        for rel, (data, mode) in changes.items():
            path = tree / rel
            if data is None:
                continue
            for parent in reversed(_missing_parents(path)):
                parent.mkdir()
                made.append(parent)
            new, _ = scratch(path)
            new.write_bytes(data)
            if mode is not None:
                os.chmod(new, mode)
            elif path.exists():
                shutil.copymode(path, new)
        for rel, (data, _) in changes.items():
            path = tree / rel
            new, old = scratch(path)
            if path.exists():
                old.unlink(missing_ok=True)
                _link(path, old)
                replaced.append(path)
            elif data is not None:
                replaced.append(path)
            if data is None:
                path.unlink(missing_ok=True)
            else:
                os.replace(new, path)
    except BaseException as e:
        try:
            _roll_back(tree, changes, replaced, made)
        except OSError as again:
            raise RollbackError(
                f"cannot write {path}: {e}; undoing what was written failed too: {again}. The tree is half-applied: "
                "mend what stopped it, then run revert"
            ) from e
        if isinstance(e, OSError):
            raise PatchError(f"cannot write {path}: {e.strerror or e}; nothing was changed") from e
        raise
    for rel in changes:
        _, old = scratch(tree / rel)
        old.unlink(missing_ok=True)
        _remove_bytecode(tree / rel)


def missing_directories(tree: Path, rels: Iterable[str]) -> list[str]:
    """The directories that writing these files will make."""
    return sorted({p.relative_to(tree).as_posix() for rel in rels for p in _missing_parents(tree / rel)})


def _missing_parents(path: Path) -> list[Path]:
    return [p for p in path.parents if not p.exists()]


def _roll_back(tree: Path, rels: Iterable[str], replaced: list[Path], made: list[Path]) -> None:
    # Renames only, so that this works on a full disk too.
    for path in reversed(replaced):
        _, old = scratch(path)
        if old.exists():
            os.replace(old, path)
        else:
            path.unlink(missing_ok=True)
    for rel in rels:
        # Where a file had not been replaced yet, it and its link are one inode, and rename did nothing.
        for leftover in scratch(tree / rel):
            leftover.unlink(missing_ok=True)
    for directory in reversed(made):
        directory.rmdir()


def _remove_bytecode(path: Path) -> None:
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.cpython-*.pyc") if path.suffix == ".py" else ():
        with contextlib.suppress(OSError):
            cached.unlink()


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # a filesystem without hard links
        shutil.copy2(path, to)
