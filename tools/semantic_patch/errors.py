"""The one exception of this package, and the check for its third-party needs."""

from __future__ import annotations

import importlib
from types import ModuleType


class PatchError(Exception):
    """The patch cannot be applied, reverted or read. The message says what, where and what to do."""


class RollbackError(PatchError):
    """Writing failed, and so did undoing it: the tree is half-applied."""


def need(module: str, distribution: str) -> ModuleType:
    """Import a third-party module; only when used, so that ``--help`` and ``revert`` work without it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise PatchError(
            f"{distribution} is missing ({e}); install it: python -m pip install {distribution}"
        ) from e
