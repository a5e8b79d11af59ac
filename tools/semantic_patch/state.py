"""TREE/.semantic_patch: what was applied, and upstream's files as they were."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import PatchError, RollbackError
from .tree import read


DIRECTORY = ".semantic_patch"
APPLIED, APPLYING = "applied", "applying"


def sha256(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


@dataclass
class Entry:
    """A file that the patch changed or, where `before` is None, added."""

    before: str | None
    after: str | None
    mode: int | None
    was: str | None = None  # its hash when the apply or revert that is under way began


@dataclass
class State:
    state: str
    kind: str
    torch: str
    digest: str
    files: dict[str, Entry] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)  # made for added files

    @staticmethod
    def load(tree: Path) -> State | None:
        path = tree / DIRECTORY / "manifest.json"
        try:
            raw = json.loads(path.read_text())
            return State(**{**raw, "files": {rel: Entry(**e) for rel, e in raw["files"].items()}})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            raise PatchError(
                f"{path} cannot be read ({e}); copy the files of {path.parent}/originals back over {tree} by hand, "
                f"then remove {path.parent}"
            ) from e

    def save(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")
        os.replace(new, path)

    def changed_by_hand(self, tree: Path, or_original: bool = False) -> list[str]:
        """The files that are neither what was applied nor, mid-way, what stood there before."""
        changed = []
        for rel, entry in self.files.items():
            good = {entry.after}
            if self.state == APPLYING:
                good |= {entry.before, entry.was}
            elif or_original:
                good.add(entry.before)
            if sha256(read(tree, rel)) not in good:
                changed.append(rel)
        return changed

    def original(self, tree: Path, rel: str) -> bytes | None:
        entry = self.files[rel]
        if entry.before is None:
            return None
        path = original_path(tree, rel)
        data = path.read_bytes() if path.is_file() else None
        if sha256(data) != entry.before:
            raise PatchError(f"{path}, the copy of upstream's file, is missing or damaged; install that torch afresh")
        return data


def original_path(tree: Path, rel: str) -> Path:
    return tree / DIRECTORY / "originals" / rel


def keep_original(tree: Path, rel: str, data: bytes) -> None:
    path = original_path(tree, rel)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def remove(tree: Path) -> None:
    """Forget the patch. The manifest goes first: without it the rest means nothing."""
    (tree / DIRECTORY / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(tree / DIRECTORY, ignore_errors=True)


@contextlib.contextmanager
def transaction(tree: Path, during: State, after: State | None = None) -> Iterator[None]:
    """Has the manifest say `during`, half-applied, while the body writes the tree; then `after`.

    If the body fails, the manifest is as it was. All that needs space on the disk is written before it.
    """
    directory = tree / DIRECTORY
    manifest, previous, final = (directory / f"manifest.{name}" for name in ("json", "previous", "final"))
    during.state = APPLYING
    existed, saved = manifest.exists(), False
    try:
        directory.mkdir(exist_ok=True)
        (directory / ".gitignore").write_text("*\n")
        if existed:
            shutil.copyfile(manifest, previous)
            saved = True
        if after:
            after.save(final)
        during.save(manifest)
        yield
    except RollbackError:
        raise
    except BaseException as e:
        if saved:
            os.replace(previous, manifest)
        elif not existed:
            remove(tree)
        if isinstance(e, OSError):
            raise PatchError(f"cannot write {e.filename or directory}: {e.strerror or e}; nothing was changed") from e
        raise
    if after:
        try:
            os.replace(final, manifest)
        except OSError as e:
            raise RollbackError(f"cannot write {manifest}: {e}; the tree is half-applied, run revert") from e
    previous.unlink(missing_ok=True)
