"""Prints a change as git does."""

from __future__ import annotations

import base64
import difflib
import hashlib
import zlib

from .source import lines_of


def unified(rel: str, old: bytes | None, new: bytes) -> str:
    """One file's part of a patch for `git apply`."""
    head = f"diff --git a/{rel} b/{rel}\n" + ("new file mode 100644\n" if old is None else "")
    try:
        before, after = (old or b"").decode(), new.decode()
    except UnicodeDecodeError:
        return head + _binary(old or b"", new)
    if old is None and not new:
        return f"{head}index {'0' * 40}..{_blob_id(new)}\n"
    hunks = difflib.unified_diff(
        lines_of(before), lines_of(after), "/dev/null" if old is None else f"a/{rel}", f"b/{rel}"
    )
    return head + "".join(h if h.endswith("\n") else h + "\n\\ No newline at end of file\n" for h in hunks)


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _binary(old: bytes, new: bytes) -> str:
    """git's binary patch: deflated, in base 85, each line headed by a letter for its length."""
    packed = zlib.compress(new)
    lines = []
    for i in range(0, len(packed), 52):
        part = packed[i : i + 52]
        length = chr(len(part) + (ord("A") - 1 if len(part) <= 26 else ord("a") - 27))
        lines.append(length + base64.b85encode(part, pad=True).decode() + "\n")
    before = _blob_id(old) if old else "0" * 40
    return f"index {before}..{_blob_id(new)}\nGIT binary patch\nliteral {len(new)}\n{''.join(lines)}\n"
